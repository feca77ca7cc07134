/* A master until Ctrl-C:  master [HOST:PORT]   (port 0 takes a free one) */

#include <pccl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

static pcclMasterInstance_t* master;

static void stop(int number) {
  (void)number;
  (void)pcclInterruptMaster(master);
}

static void check(pcclResult_t result) {
  if (result == pcclSuccess) return;
  fprintf(stderr, "%s\n", pcclGetLastError());
  exit(1);
}

int main(int argc, char** argv) {
  ccoip_socket_address_t address;
  check(pcclResolveAddress(argc > 1 ? argv[1] : "0.0.0.0:48148", &address));
  check(pcclCreateMaster(address, &master));
  check(pcclRunMaster(master));
  signal(SIGINT, stop);
  signal(SIGTERM, stop);

  check(pcclGetMasterAddress(master, &address));
  printf("listening on port %u\n", (unsigned)address.port);
  fflush(stdout);

  check(pcclMasterAwaitTermination(master));
  check(pcclDestroyMaster(master));
  return 0;
}
