// Which uses NCCL's communicators survive while they end, and after: by version, from its sources. What they do not
// survive ends the process, with a line that starts with LIFETIME; what they survive by luck is said and counted.
#pragma once

#include <functional>

namespace bed::nccl {

class Communicator;

namespace lifetime {

// Of which NCCL (as NCCL_VERSION_CODE): the header's, or what the knob NCCL_RULES says.
long version();

[[noreturn]] void broken(const Communicator* communicator, const char* format, ...)
    __attribute__((format(printf, 2, 3)));
void lucky(const Communicator* communicator, const char* format, ...) __attribute__((format(printf, 2, 3)));

// A call with a handle whose communicator was freed. Most look at the first and the last word of the memory
// (src/misc/argcheck.cc, CommCheck: v2.21.5-1, v2.30.7-1) or at its rank (src/init.cc, ncclCommDestroy), which commFree
// has overwritten (commPoison), and give ncclInvalidArgument: as long as the memory was not used again, nor given back
// to the system. Torch 2.14.1's nccl2 does so, with ncclCommGetAsyncError after an abort. This is luck: the line starts
// with LUCK. ncclCommAbort, ncclCommFinalize and ncclCommRevoke do not look: they follow abortFlag, which is freed, too,
// and the process ends. The knob AFTER_END makes all calls the one or the other.
void used_after(const void* handle, const char* call, const char* ended_by);

// Up to 2.26 NCCL keeps the job of a non-blocking call in the calling thread's own memory (src/group.cc,
// ncclGroupJobMain and ncclAsyncJobs: v2.18.1-1, v2.21.5-1 lines 18 to 23, v2.22.3-1, v2.26.6-1), and the communicator
// points there (groupJob) until a later call joins the job (src/init.cc, ncclCommEnsureReady). From 2.27 on a job has
// memory of its own (v2.27.3-1 src/group.cc, ncclGroupEndInternal). Such calls are an init, a split, a shrink, a
// finalize, and the first send to, or receive from, a peer. An abort and a destroy are none: they are through when they
// return, in the calling thread (v2.21.5-1 src/init.cc, ncclCommAbort calls commReclaim) or as a blocking group
// (v2.22.3-1 src/group.cc, ncclAsyncLaunch: destroyFlag).
// A thread that ends before `over` takes the job's memory along: the process ends. On an H100 2.21.5 died of it by
// SIGSEGV. The main thread's memory stays until the process is gone.
void non_blocking(Communicator& communicator, std::function<bool()> over);
// A call that joins the job. The process ends if its memory has gone with its thread. Of a communicator with an error
// only an abort joins it (`even_failed`).
void join_job(Communicator& communicator, const char* call, bool even_failed = false);

// What a thread is inside of. `derive`: a split, shrink or grow, as the parent.
enum Use { init, derive, finalize, group_end, destroy, abort, uses };

// A blocking call that uses the communicator's memory until it returns. The process ends here if NCCL would use what
// another thread frees.
class Inside {
 public:
  Inside(Communicator& communicator, Use use, const char* call);
  ~Inside();
  Inside(const Inside&) = delete;
  // Of two threads that end a communicator one frees it.
  bool frees() const { return frees_; }

 private:
  Communicator& communicator_;
  const Use use_;
  bool frees_ = false;
};

}  // namespace lifetime
}  // namespace bed::nccl
