// The C functions that end communicators.
#include <nccl.h>

#include <cstdlib>

#include "bed.h"
#include "nccl_comm.h"
#include "nccl_faults.h"
#include "nccl_group.h"

namespace bed::nccl {
namespace {

void hang(const Communicator& communicator, bool before) {
  long ms = faults::abort_hang_ms(communicator.id, before);
  if (!ms) return;
  complain(&communicator, "ncclCommAbort hangs for %ld ms %s it ends the pending operations, as told", ms,
           before ? "before" : "after");
  faults::hang([&] { return faults::abort_hang_ms(communicator.id, before); });
}

// From 2.22 on ncclCommFinalize marks the communicator before it waits; ncclCommAbort, which sees the mark, waits for
// nothing and frees it (src/init.cc, commReclaim): what the other thread uses on.
void no_use_after_free(const Communicator& communicator) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 22, 0)
  const char* call = communicator.inside;
  if (!call) return;
  bed::say("ncclCommAbort frees a communicator that another thread uses, inside %s", call);
  std::abort();
#else
  (void)communicator;
#endif
}

ncclResult_t done(const char* call, const Shared& communicator, int result) {
  return static_cast<ncclResult_t>(traced(call, communicator.get(), result));
}

}  // namespace
}  // namespace bed::nccl

using namespace bed::nccl;

extern "C" {

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const char* call = "ncclCommFinalize";
  int result;
  Shared communicator = find(comm, call, &result);
  if (!communicator) return done(call, nullptr, result);
  if (communicator->ended() || !communicator->finalize()) {
    complain(communicator.get(), "ncclCommFinalize: revoked, or finalized already");
    return done(call, communicator, ncclInvalidArgument);
  }
  if (communicator->blocking) {
    communicator->inside = call;
    communicator->wait_all_done();
    communicator->inside = nullptr;
  } else {
    group::must_outlive([known = std::weak_ptr<Communicator>(communicator)] {
      Shared communicator = known.lock();
      return !communicator || communicator->ended() || communicator->state() != in_progress;
    });
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
  communicator->wait_all_done();
  faults::hang([&] { return faults::destroy_hang_ms(communicator->id); });
  if (!take_back(comm, call)) return done(call, communicator, ncclInvalidUsage);  // it was aborted meanwhile
  communicator->end();
  communicator->release();
  return done(call, communicator, ncclSuccess);
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const char* call = "ncclCommAbort";
  if (!comm) return ncclSuccess;
  int result;
  Shared communicator = find(comm, call, &result);
  if (!communicator) return done(call, nullptr, result);
  bed::count("aborts");
  no_use_after_free(*communicator);
  hang(*communicator, true);
  communicator->end();
  hang(*communicator, false);
  if (take_back(comm, call)) communicator->release();
  return done(call, communicator, faults::abort_result(communicator->id));
}

#ifdef NCCL_REVOKE_DEFAULT
ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  const char* call = "ncclCommRevoke";
  int result;
  Shared communicator = find(comm, call, &result);
  if (!communicator) return done(call, nullptr, result);
  if (flags != NCCL_REVOKE_DEFAULT) return done(call, communicator, ncclInvalidArgument);
  communicator->interrupt();
  return done(call, communicator, ncclSuccess);
}
#endif

}  // extern "C"
