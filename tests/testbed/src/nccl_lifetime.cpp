#include "nccl_lifetime.h"

#include <nccl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "bed.h"
#include "nccl_comm.h"

namespace bed::nccl::lifetime {
namespace {

const Counters names({"freed_uses"});

const char* const WORDS[uses] = {"an init", "ncclCommSplit, as the parent", "ncclCommFinalize", "ncclGroupEnd",
                                 "ncclCommDestroy", "ncclCommAbort"};

std::string text_of(const Communicator* communicator, const char* format, va_list arguments) {
  char text[600];
  vsnprintf(text, sizeof text, format, arguments);
  char head[80] = "";
  if (communicator)
    snprintf(head, sizeof head, "communicator %016llx rank %d: ", static_cast<unsigned long long>(communicator->id),
             communicator->rank);
  return std::string("LIFETIME ") + head + text;
}

// What becomes of a call that frees the communicator (`ending`: abort, destroy) beside a blocking one of another thread
// that uses it. The same in both orders: all of them pass ncclCommEnsureReady while an abort is under way, as that asks
// for nothing when the abort's flag is set (src/init.cc, ncclCommEnsureReady: v2.18.1-1, v2.21.5-1 from line 281,
// v2.22.3-1, v2.27.3-1, v2.30.7-1).
//
// Nothing in NCCL waits for a *blocking* call of another thread: abort and destroy join `groupJob` only, which is the
// job of a non-blocking call (src/group.cc, ncclGroupEndInternal sets it in its non-blocking branch; ncclGroupJobAbort
// joins it). So a non-blocking init, split or finalize may be aborted at any time, in every version.
enum class Verdict { supported, luck, ends };

Verdict verdict(Use ending, Use other) {
  switch (other) {
    case init:
      // commReclaim frees nothing until the ranks of this process are known (intraComm0, set in initTransportsRank after
      // the bootstrap): abort's flag releases who waits for peers, and the communicator is left as it is.
      // src/init.cc, commReclaim: v2.18.1-1, v2.21.5-1 line 2046, v2.22.3-1, v2.27.3-1, v2.30.7-1 (intraComm0: lines 784,
      // 1003, 1123 of the first, second and last). A later phase of an init is not modelled.
      return ending == abort ? Verdict::supported : Verdict::luck;
    case derive:
      // The job reads job->parent to its end (ncclCommInitRankFunc, bootstrapSplit), and groupLaunch reads the parent's
      // configuration after it (v2.21.5-1 src/group.cc, groupLaunch); abort and destroy free the parent beside it.
      // abort's childAbortFlag releases the job, it waits for nothing. Every version, v2.18.1-1 to v2.30.7-1.
      return Verdict::ends;
    case finalize:
      // From 2.22 on ncclCommFinalize sets finalizeCalled before its job runs (v2.22.3-1 src/init.cc line 1885,
      // v2.26.2-1, v2.27.3-1, v2.30.7-1 line 2801), so that commReclaim skips commDestroySync and frees at once what
      // the job still waits on. Up to 2.21 the job sets it when it is through (v2.21.5-1 src/init.cc line 1965,
      // v2.18.1-1): abort waits for the same streams itself, stops the proxy, then frees. The job has mostly left.
      return version() >= 22200 ? Verdict::ends : Verdict::luck;
    case group_end:
      // The flag is what ends its connecting jobs (src/group.cc, asyncJobLaunch, and the transports poll it), and abort
      // waits for the streams before it frees. ncclCommDestroy sets no flag.
      return ending == abort ? Verdict::supported : Verdict::luck;
    case destroy:
    case abort:
      // Each counts in finalizeRankCnt, the last of a process's ranks frees, and a second call is one too many: it
      // returns. Up to 2.21 destroy counts only after it has waited for the streams (v2.21.5-1 src/init.cc, commReclaim
      // calls commFinalize first); what it waits for is freed by the other. From 2.22 on it counts first (v2.22.3-1
      // src/init.cc, commReclaim).
      return version() >= 22200 || (other == abort && ending == abort) ? Verdict::supported : Verdict::luck;
    case uses:
      break;
  }
  return Verdict::supported;
}

bool is_main() { return getpid() == static_cast<pid_t>(syscall(SYS_gettid)); }

// The memory of a thread.
struct Jobs {
  std::vector<std::function<bool()>> calls;
  std::shared_ptr<std::atomic<bool>> lives = std::make_shared<std::atomic<bool>>(true);
  ~Jobs() {
    *lives = false;
    for (auto& over : calls)
      if (!over()) {
        say("LIFETIME a thread ended while a non-blocking call of its own was in progress; NCCL uses its memory");
        raise(SIGSEGV);
      }
  }
};

bool ends(Use use) { return use == abort || use == destroy; }

}  // namespace

long version() { return knob_number("NCCL_RULES", NCCL_VERSION_CODE); }

void broken(const Communicator* communicator, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  say("%s", text_of(communicator, format, arguments).c_str());
  va_end(arguments);
  std::abort();
}

void lucky(const Communicator* communicator, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  say("%s", text_of(communicator, format, arguments).c_str());
  va_end(arguments);
  count("freed_uses");
}

void used_after(const void* handle, const char* call, const char* ended_by) {
  const char* format = "%s: communicator %p used after %s";
  const std::string told = knob("AFTER_END"), name = call;
  const bool looks = name != "ncclCommAbort" && name != "ncclCommFinalize" && name != "ncclCommRevoke";
  if (told == "die" || (told != "say" && !looks)) broken(nullptr, format, call, handle, ended_by);
  say("LUCK %s: communicator %p used after %s", call, handle, ended_by);
  count("freed_uses");
}

void non_blocking(Communicator& communicator, std::function<bool()> over) {
  static thread_local Jobs jobs;
  if (version() >= 22700 || is_main()) return;
  jobs.calls.push_back(std::move(over));
  communicator.link(jobs.lives);
}

void join_job(Communicator& communicator, const char* call, bool even_failed) {
  if (!even_failed && communicator.state() != success) return;
  auto lives = communicator.take_link();
  if (lives && !*lives)
    broken(&communicator, "%s joins the job of a non-blocking call; NCCL %ld has it in memory of a thread that ended",
           call, version());
}

Inside::Inside(Communicator& communicator, Use use, const char* call) : communicator_(communicator), use_(use) {
  const auto before = communicator.enter(use);
  frees_ = ends(use) && !before[abort] && !before[destroy];
  for (int other = 0; other < uses; other++) {
    if (!before[other] || (!ends(use) && !ends(static_cast<Use>(other)))) continue;
    const Use ending = ends(use) ? use : static_cast<Use>(other), beside = ends(use) ? static_cast<Use>(other) : use;
    const Verdict found = verdict(ending, beside);
    if (found == Verdict::supported) continue;
    const char* format = "%s while another thread is inside %s: NCCL %ld frees what the other uses%s";
    if (found == Verdict::ends) broken(&communicator, format, call, WORDS[other], version(), "");
    lucky(&communicator, format, call, WORDS[other], version(), ", mostly a moment too late to be seen");
  }
}

Inside::~Inside() { communicator_.leave(use_); }

}  // namespace bed::nccl::lifetime
