// The CUDA context of this process: a lock that calls share with an ncclCommAbort (knob ABORT_LOCK_MS), and an error that
// makes it useless (DEVICE_ERROR_FROM).
#include <atomic>
#include <mutex>

#include "runtime.h"

namespace bed {
namespace {

// Never destroyed: threads may be at work when the process ends.
std::mutex& lock() {
  static auto* it = new std::mutex;
  return *it;
}
std::atomic<int> holders{0}, error{cudaSuccess};

From& launches() {
  static auto* from = new From("DEVICE_ERROR_FROM");
  return *from;
}

}  // namespace

cudaError_t use_context() {
  if (holders > 0) std::lock_guard<std::mutex> wait(lock());
  return context_error();
}

cudaError_t context_error() { return static_cast<cudaError_t>(error.load()); }

ContextHeld::ContextHeld() {
  holders++;
  lock().lock();
}
ContextHeld::~ContextHeld() {
  lock().unlock();
  holders--;
}

bool launch_breaks_context() {
  static std::mutex mutex;  // launches of several threads are counted one by one
  std::lock_guard<std::mutex> hold(mutex);
  return launches().hit();
}

void break_context() {
  int none = cudaSuccess;
  if (error.compare_exchange_strong(none, static_cast<int>(knob_number("DEVICE_ERROR", cudaErrorAssert))))
    say("a launch ends with CUDA error %d, as told: every call that uses the device fails from now on", error.load());
}

}  // namespace bed
