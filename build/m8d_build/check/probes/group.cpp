// A third-party extension around torch::cuda::nccl::AutoNcclGroup, linked with -z defs against libtorch_cuda.so and
// the real libnccl, which needs no GPU to refuse a null communicator inside a group.
//
// The class is declared here, not included: its header needs CUDA headers that the wheel's packages do not bring.
// Only names matter to the linker, and the object has more room than any version of the class takes.
#include <dlfcn.h>
#include <cstddef>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

namespace torch::cuda::nccl {
struct AutoNcclGroup {
  AutoNcclGroup();
  ~AutoNcclGroup() noexcept(false);
  void* room[16];
};
} // namespace torch::cuda::nccl

extern "C" {
int ncclAllReduce(const void*, void*, size_t, int type, int op, void* comm, void* stream);
int ncclGroupEnd();
// The constructor under its linker name, so that its address can be asked for.
void m8d_constructor() __asm__("_ZN5torch4cuda4nccl13AutoNcclGroupC1Ev");
__attribute__((weak)) const char* m8d_patch_info();
}

namespace {
using torch::cuda::nccl::AutoNcclGroup;
constexpr int kFloat = 7, kSum = 0, kInvalidUsage = 5;
std::string text;

bool nccl_refuses() {
  float value = 0;
  return ncclAllReduce(&value, &value, 1, kFloat, kSum, nullptr, nullptr) != 0;
}

const char* told(std::string what) {
  // Outside a group, ncclGroupEnd() is invalid usage.
  text = std::move(what) + (ncclGroupEnd() == kInvalidUsage ? ", group closed" : ", group left open");
  return text.c_str();
}
} // namespace

extern "C" const char* m8d_unwind() {
  try {
    AutoNcclGroup group;
    if (!nccl_refuses()) {
      return "NCCL took a null communicator";
    }
    throw std::runtime_error("the first error");
  } catch (const std::exception& e) {
    return told(std::strcmp(e.what(), "the first error") == 0 ? "first error arrives" : "another error arrives");
  }
}

extern "C" const char* m8d_plain() {
  try {
    AutoNcclGroup group;
    if (!nccl_refuses()) {
      return "NCCL took a null communicator";
    }
  } catch (const std::exception& e) {
    return told(std::strstr(e.what(), "NCCL Error") ? "its own error arrives" : "another error arrives");
  }
  return told("no error arrives");
}

extern "C" const char* m8d_empty() {
  try {
    AutoNcclGroup group;
  } catch (const std::exception&) {
    return told("an error arrives");
  }
  return told("no error arrives");
}

extern "C" const char* m8d_bound_to() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&m8d_constructor), &info) == 0) {
    return "unknown";
  }
  const char* slash = std::strrchr(info.dli_fname, '/');
  text = slash ? slash + 1 : info.dli_fname;
  text += m8d_patch_info ? ", patch info found" : ", no patch info";
  return text.c_str();
}
