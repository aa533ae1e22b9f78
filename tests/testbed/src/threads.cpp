// The knob NO_THREADS: the process can have no more threads. The double's own are started all the same.
#include <dlfcn.h>
#include <pthread.h>

#include <cerrno>

#include "bed.h"

namespace {

const void* base_of(const void* address) {
  Dl_info found{};
  return dladdr(address, &found) ? found.dli_fbase : nullptr;
}

}  // namespace

// Python, libstdc++ and torch find this one, as the library is preloaded.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  static const auto real = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  static const void* own = base_of(reinterpret_cast<const void*>(&base_of));
  if (bed::knob_number("NO_THREADS") && base_of(__builtin_return_address(0)) != own) return EAGAIN;
  return real(thread, attributes, run, argument);
}
