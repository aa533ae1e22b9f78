// Which uses NCCL's communicators survive while they end, and after: by version, from its sources. What they do not
// survive ends the process, with a line that starts with LIFETIME; what they survive by luck is said and counted.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace bed::nccl {

class Communicator;

namespace lifetime {

// Of which NCCL (as NCCL_VERSION_CODE): the header's, or what the knob NCCL_RULES says.
long version();

[[noreturn]] void broken(const Communicator* communicator, const char* format, ...)
    __attribute__((format(printf, 2, 3)));
void lucky(const Communicator* communicator, const char* format, ...) __attribute__((format(printf, 2, 3)));

// A call with a handle whose communicator was freed. NCCL looks at the first and the last word of the memory
// (src/misc/argcheck.cc, CommCheck: v2.21.5-1, v2.30.7-1) or at its rank (src/init.cc, ncclCommDestroy), which commFree
// has overwritten (commPoison), and gives ncclInvalidArgument: as long as the memory was not used again, nor given back
// to the system. ncclCommAbort and ncclCommFinalize do not look: they follow abortFlag, which is freed, too. So the
// process ends, or with the knob AFTER_END=say goes on by luck.
void used_after(const void* handle, const char* call, const char* ended_by);

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
