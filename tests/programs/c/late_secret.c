/* Makes a communicator without a secret, then a run with one in this process, and ends: exit() must
 * not clean up OpenSSL while threads of the library use it. */
#include <stdio.h>
#include <stdlib.h>

#include "pccl.h"

static void check(pcclResult_t result) {
  if (result == pcclSuccess) return;
  fprintf(stderr, "%s\n", pcclGetLastError());
  _Exit(1);
}

int main(void) {
  ccoip_socket_address_t nobody, listen;
  pcclMasterInstance_t* master;
  pcclComm_t* comm;
  check(pcclInit());
  check(pcclResolveAddress("127.0.0.1:9", &nobody));
  check(pcclResolveAddress("127.0.0.1:0", &listen));
  pcclCommCreateParams_t params = {.master_address = nobody};
  check(pcclCreateCommunicator(&params, &comm));
  check(pcclDestroyCommunicator(comm));
  setenv("PCCL_SECRET", "a secret of this test: 0123456789 abcdefgh", 1);
  check(pcclCreateMaster(listen, &master));
  check(pcclRunMaster(master));
  check(pcclGetMasterAddress(master, &params.master_address));
  for (uint32_t i = 0; i < 8; ++i) {
    params.peer_group = i / 2;
    check(pcclCreateCommunicator(&params, &comm));
    if (i % 2 == 0) check(pcclConnect(comm));
  }
  return 0;
}
