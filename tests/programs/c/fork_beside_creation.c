/* Threads make and destroy communicators while the main thread forks. Each child makes its own. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pccl.h"

enum { THREADS = 3, SECONDS = 20 };

static pcclCommCreateParams_t params;
static atomic_int over;

static pcclResult_t make_one(void) {
  pcclComm_t* comm;
  const pcclResult_t made = pcclCreateCommunicator(&params, &comm);
  return made == pcclSuccess ? pcclDestroyCommunicator(comm) : made;
}

static void* make_many(void* unused) {
  (void)unused;
  while (!over) make_one();
  return NULL;
}

int main(int count, char** arguments) {
  const int forks = count > 1 ? atoi(arguments[1]) : 100;
  pthread_t threads[THREADS];
  pcclInit();
  pcclResolveAddress("127.0.0.1:9", &params.master_address);
  for (int i = 0; i < THREADS; ++i) pthread_create(&threads[i], NULL, make_many, NULL);
  for (int i = 0; i < forks; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(SECONDS); /* ends a child that hangs */
      _exit((int)make_one());
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) {
      fprintf(stderr, "fork %d: status %d\n", i, status);
      return 1;
    }
  }
  over = 1;
  for (int i = 0; i < THREADS; ++i) pthread_join(threads[i], NULL);
  return 0;
}
