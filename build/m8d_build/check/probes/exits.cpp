// Preloaded under a probe: watches which objects libraries register to be destroyed when the process ends.
//
// Two libraries that define one global object, of which the loader takes one for both, each register its destructor:
// it is destroyed twice. Whether that crashes depends on what the object holds by then; that it was registered twice
// does not.
#include <dlfcn.h>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace {
using Register = int (*)(void (*)(void*), void*, void*);

struct Seen {
  std::mutex mutex;
  std::unordered_map<void*, void*> owner; // object -> library that registered it first
  std::string twice;
};

Seen& seen() {
  static Seen* const all = new Seen; // outlives every destructor
  return *all;
}

const char* file_of(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) {
    return "?";
  }
  const char* slash = std::strrchr(info.dli_fname, '/');
  return slash ? slash + 1 : info.dli_fname;
}
} // namespace

#define M8D_EXPORT extern "C" __attribute__((visibility("default")))

M8D_EXPORT int __cxa_atexit(void (*destroy)(void*), void* object, void* library) {
  static const auto real = reinterpret_cast<Register>(dlsym(RTLD_NEXT, "__cxa_atexit"));
  if (object != nullptr && library != nullptr) {
    std::lock_guard<std::mutex> lock(seen().mutex);
    const auto [known, added] = seen().owner.emplace(object, library);
    if (!added && known->second != library) {
      Dl_info info{};
      dladdr(object, &info);
      seen().twice += seen().twice.empty() ? "" : ", ";
      seen().twice += std::string(info.dli_sname ? info.dli_sname : "an object") + " by " + file_of(known->second) +
          " and " + file_of(library);
    }
  }
  return real(destroy, object, library);
}

M8D_EXPORT const char* m8d_destroyed_twice() {
  std::lock_guard<std::mutex> lock(seen().mutex);
  return seen().twice.c_str();
}

M8D_EXPORT long m8d_destructors() {
  std::lock_guard<std::mutex> lock(seen().mutex);
  return static_cast<long>(seen().owner.size());
}
