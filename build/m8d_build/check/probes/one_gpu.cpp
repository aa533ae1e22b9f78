// Preloaded under a probe: one GPU that is not there, and a watchdog that can be made to hang.
//
// With a device count of one, ProcessGroupNCCL can be constructed and starts its watchdog and its heartbeat monitor;
// neither calls CUDA or NCCL as long as no work is enqueued. A held watchdog makes no progress, as when a CUDA call
// inside it never returns.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <atomic>
#include <cstring>
#include <ctime>
#include <initializer_list>

namespace {
std::atomic<bool> hold{false};
std::atomic<long> held{0};

using TimedWait = int (*)(pthread_cond_t*, pthread_mutex_t*, const timespec*);
using ClockWait = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);

void hold_watchdog() {
  if (!hold.load()) {
    return;
  }
  char name[16 + 1] = {};
  prctl(PR_GET_NAME, name, 0, 0, 0);
  if (std::strcmp(name, "pt_nccl_watchdg") != 0) {
    return;
  }
  held.fetch_add(1);
  while (hold.load()) {
    const timespec pause{0, 10'000'000};
    nanosleep(&pause, nullptr);
  }
}

void* next(const char* name) {
  // dlsym alone may find the form of glibc 2.2, whose condition variables look different.
  for (const char* version : {"GLIBC_2.3.2", "GLIBC_2.17"}) {
    if (void* found = dlvsym(RTLD_NEXT, name, version)) {
      return found;
    }
  }
  return dlsym(RTLD_NEXT, name);
}
} // namespace

#define M8D_EXPORT extern "C" __attribute__((visibility("default")))

M8D_EXPORT int cudaGetDeviceCount(int* count) {
  *count = 1;
  return 0;
}

M8D_EXPORT void m8d_hold_watchdog(int on) {
  hold.store(on != 0);
}

M8D_EXPORT long m8d_times_held() {
  return held.load();
}

M8D_EXPORT int pthread_cond_timedwait(pthread_cond_t* cond, pthread_mutex_t* mutex, const timespec* until) {
  static const auto real = reinterpret_cast<TimedWait>(next("pthread_cond_timedwait"));
  hold_watchdog();
  return real(cond, mutex, until);
}

M8D_EXPORT int pthread_cond_clockwait(pthread_cond_t* cond, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  static const auto real = reinterpret_cast<ClockWait>(dlsym(RTLD_NEXT, "pthread_cond_clockwait"));
  hold_watchdog();
  return real(cond, mutex, clock, until);
}
