/* Faults for the reproducers, on demand: preloaded, it stands before NCCL. with_faults() of ranks.py compiles it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <time.h>

int fault_aborts = 0; /* calls of ncclCommAbort that have begun */

static long wanted(const char *name) {
  const char *value = getenv(name);
  return value ? atol(value) : 0;
}

/* FAULT_ABORT_MS: how long ncclCommAbort hangs before it does its work. */
int ncclCommAbort(void *comm) {
  int (*real)(void *) = (int (*)(void *))dlsym(RTLD_NEXT, "ncclCommAbort");
  long ms = wanted("FAULT_ABORT_MS");
  __atomic_add_fetch(&fault_aborts, 1, __ATOMIC_SEQ_CST);
  struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
  nanosleep(&pause, NULL);
  return real(comm);
}

/* FAULT_ALL_REDUCE: its calls reach NCCL with a type that does not exist, so that NCCL itself refuses them. */
int ncclAllReduce(const void *in, void *out, size_t count, int type, int op, void *comm, void *stream) {
  int (*real)(const void *, void *, size_t, int, int, void *, void *) =
      (int (*)(const void *, void *, size_t, int, int, void *, void *))dlsym(RTLD_NEXT, "ncclAllReduce");
  return real(in, out, count, wanted("FAULT_ALL_REDUCE") ? 99 : type, op, comm, stream);
}
