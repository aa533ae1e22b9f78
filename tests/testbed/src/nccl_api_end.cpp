// The C functions that end communicators.
#include <nccl.h>

#include "bed.h"
#include "nccl_comm.h"
#include "nccl_faults.h"
#include "nccl_group.h"

namespace bed::nccl {
namespace {

constexpr long LOOK_AGAIN_MS = 5;

void hang(Communicator& communicator, bool before) {
  long ms = faults::abort_hang_ms(communicator.id, before);
  if (!ms) return;
  complain(&communicator, "ncclCommAbort hangs for %ld ms %s it ends the pending operations, as told", ms,
           before ? "before" : "after");
  faults::hang([&] { return faults::abort_hang_ms(communicator.id, before); }, [&] { communicator.overwrite(); });
}

// As graphs that hold operations of a communicator keep it (src/init.cc, commDestroySync: localPersistentRefs).
void wait_for_graphs(Communicator& communicator) {
  if (faults::graphs_alive(communicator.id)) complain(&communicator, "waits for CUDA graphs, as told");
  while (long graphs = faults::graphs_alive(communicator.id))
    faults::hang([&] { return faults::graphs_alive(communicator.id) == graphs ? LOOK_AGAIN_MS : 0; },
                 [&] { communicator.overwrite(); });
}

// As memory that is freed under the lock that all calls of CUDA take.
void lock_context(const Communicator& communicator) {
  if (!faults::abort_lock_ms(communicator.id)) return;
  ContextHeld held;
  faults::hang([&] { return faults::abort_lock_ms(communicator.id); });
}

ncclResult_t done(const char* call, const Shared& communicator, int result) {
  return static_cast<ncclResult_t>(traced(call, communicator.get(), result));
}

// Freeing memory and streams fails where the device is of no more use.
int result_of(int told) { return told == success && context_error() != cudaSuccess ? unhandled_cuda : told; }

}  // namespace
}  // namespace bed::nccl

using namespace bed::nccl;

extern "C" {

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const char* call = "ncclCommFinalize";
  int result;
  Shared communicator = find(comm, call, &result);
  if (!communicator) return done(call, nullptr, result);
  lifetime::Inside inside(*communicator, lifetime::finalize, call);
  lifetime::join_job(*communicator, call);
  if (communicator->ended() || !communicator->finalize()) {
    complain(communicator.get(), "ncclCommFinalize: revoked, or finalized already");
    return done(call, communicator, ncclInvalidArgument);
  }
  if (bed::context_error() != cudaSuccess) return done(call, communicator, ncclUnhandledCudaError);
  if (communicator->blocking) {
    communicator->wait_all_done();
  } else {
    lifetime::non_blocking(*communicator, group::while_busy(communicator));
  }
  return done(call, communicator, communicator->state());
}

// Waits for what is pending, as NCCL does, however long that takes: an operation whose peer is dead never ends.
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const char* call = "ncclCommDestroy";
  if (!comm) return ncclSuccess;
  int result;
  Shared communicator = find(comm, call, &result);
  if (!communicator) return done(call, nullptr, result);
  lifetime::Inside inside(*communicator, lifetime::destroy, call);
  lifetime::join_job(*communicator, call);
  if (!inside.frees()) return done(call, communicator, ncclSuccess);
  if (bed::context_error() != cudaSuccess) communicator->end();  // nothing of it runs any more
  communicator->wait_all_done();
  wait_for_graphs(*communicator);
  faults::hang([&] { return faults::destroy_hang_ms(communicator->id); });
  take_back(comm, call);
  communicator->end();
  communicator->release();
  return done(call, communicator, result_of(success));
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const char* call = "ncclCommAbort";
  if (!comm) return ncclSuccess;
  int result;
  Shared communicator = find(comm, call, &result);
  if (!communicator) return done(call, nullptr, result);
  bed::count("aborts");
  lifetime::Inside inside(*communicator, lifetime::abort, call);
  lifetime::join_job(*communicator, call, true);
  hang(*communicator, true);
  communicator->end();
  hang(*communicator, false);
  wait_for_graphs(*communicator);
  lock_context(*communicator);
  // An abort that fails has freed nothing: its job never ran (v2.30.7-1 src/init.cc, ncclCommAbort; src/group.cc).
  // What one has freed that meets an error of CUDA is not known; callers do try again (torch's nccl2).
  int told = result_of(faults::abort_result(communicator->id));
  if (inside.frees()) {
    take_back(comm, call, told == success);
    communicator->release();
  }
  communicator->overwrite();  // for the last time
  return done(call, communicator, told);
}

#ifdef NCCL_REVOKE_DEFAULT
ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  const char* call = "ncclCommRevoke";
  int result;
  Shared communicator = find(comm, call, &result);
  if (!communicator) return done(call, nullptr, result);
  if (flags != NCCL_REVOKE_DEFAULT) return done(call, communicator, ncclInvalidArgument);
  // It sets finalizeCalled before its job runs, too (v2.28.9-1 src/init.cc, ncclCommRevoke).
  lifetime::Inside inside(*communicator, lifetime::finalize, call);
  communicator->interrupt();
  return done(call, communicator, ncclSuccess);
}
#endif

}  // extern "C"
