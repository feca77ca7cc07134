/* Averages and a shared state:  average MASTER PEERS NUMBER
 *
 * Peers come in one by one, receive the weights, average their gradients, and go on when one of
 * them vanishes without a word. Whoever starts later joins the same way. MASTER is host:port, PEERS
 * how many to wait for at the start, NUMBER tells the peers apart (0, 1, ...); the last one
 * vanishes half-way. */

#define _POSIX_C_SOURCE 200809L
#include <pccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { STEPS = 6, COUNT = 1000 };

static float weights[COUNT];
static float gradient[COUNT];
static float mean[COUNT];

static void check(pcclResult_t result) {
  if (result == pcclSuccess) return;
  fprintf(stderr, "%s\n", pcclGetLastError());
  exit(1);
}

static int world_size(const pcclComm_t* comm) {
  int size = 0;
  check(pcclGetAttribute(comm, PCCL_ATTRIBUTE_PEER_GROUP_WORLD_SIZE, &size));
  return size;
}

/* The mean of all members' gradients; of those that are left, if one is lost. Returns how many. */
static int average(const pcclComm_t* comm, int number) {
  const pcclReduceDescriptor_t what = {
      .count = COUNT,
      .op = pcclAvg,
      .src_descriptor = {.datatype = pcclFloat},
  };
  for (;;) {
    pcclReduceInfo_t info;
    const pcclResult_t result = pcclAllReduce(gradient, mean, &what, comm, &info);
    if (result == pcclSuccess) return (int)info.local_world_size;
    if (result == pcclTooFewPeers) { /* alone: the mean is what we have */
      for (int i = 0; i < COUNT; ++i) mean[i] = gradient[i];
      return 1;
    }
    /* A member was lost: all others are told once, and `gradient` is as it was. If it was this
     * peer, then world_size() fails, too. */
    if (result != pcclRankConnectionLost) check(result);
    printf("peer %d: %s\n", number, pcclGetLastError());
    printf("peer %d: %d are left\n", number, world_size(comm));
  }
}

int main(int argc, char** argv) {
  if (argc != 4) {
    fprintf(stderr, "usage: %s MASTER PEERS NUMBER\n", argv[0]);
    return 2;
  }
  const int wanted = atoi(argv[2]);
  const int number = atoi(argv[3]);
  for (int i = 0; i < COUNT; ++i) {
    weights[i] = (float)number; /* the first peer's will be everybody's */
    gradient[i] = 1.0F + (float)number;
  }

  check(pcclInit());
  pcclCommCreateParams_t params = {.peer_group = 0};
  check(pcclResolveAddress(argv[1], &params.master_address));
  pcclComm_t* comm = NULL;
  check(pcclCreateCommunicator(&params, &comm));
  check(pcclConnect(comm)); /* the first peer at once, later ones by the members' update */

  pcclTensorInfo_t entries[] = {{
      .name = "weights",
      .data = weights,
      .count = COUNT,
      .datatype = pcclFloat,
  }};
  pcclSharedState_t state = {.revision = 0, .count = 1, .infos = entries};
  for (bool joining = true;; joining = false) {
    /* Members ask whether anybody waits; all get the same answer. */
    bool pending = false;
    if (!joining) check(pcclArePeersPending(comm, &pending));
    if (joining || pending) {
      /* Waiting peers come in. One place in the loop: a newcomer's first call returns at once, so
       * that its next call is the members' next one. */
      check(pcclUpdateTopology(comm));

      /* Newcomers receive weights and revision; members that are in step move no byte. */
      pcclSharedStateSyncInfo_t synced;
      check(pcclSynchronizeSharedState(
          comm, &state, PCCL_SHARED_STATE_SYNC_STRATEGY_ENFORCE_POPULAR, &synced));
      if (synced.rx_bytes > 0) printf("peer %d received %d bytes\n", number, (int)synced.rx_bytes);
    }
    /* Here, not in the loop's head: a peer that comes during the last step gets the result. */
    if (state.revision == STEPS) break;

    /* Now revision and size are the same on all members, so all of them take the same branch. */
    if (state.revision == 0 && world_size(comm) < wanted) {
      const struct timespec pause = {.tv_nsec = 50 * 1000 * 1000};
      nanosleep(&pause, NULL);
      continue;
    }
    const int step = (int)state.revision;
    if (step == STEPS / 2 && number == wanted - 1 && wanted > 1) {
      printf("peer %d vanishes\n", number);
      fflush(stdout);
      _exit(0); /* no goodbye: the others notice by themselves */
    }
    const int peers = average(comm, number);
    printf("peer %d, step %d: mean %.3f over %d peers\n", number, step, mean[0], peers);
    for (int i = 0; i < COUNT; ++i) weights[i] -= 0.5F * mean[i];
    ++state.revision;
  }
  printf("peer %d ends with weights %.4f\n", number, weights[COUNT - 1]);
  check(pcclDestroyCommunicator(comm)); /* the others see a departure, not a loss */
  return 0;
}
