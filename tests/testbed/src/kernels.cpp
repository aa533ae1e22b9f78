// Kernels. Their code is for GPUs, so a launch cannot run it. A few that torch's own collectives launch are done
// here in its place, known by their names; every other launch is refused, because doing nothing would be a lie.
#include <cxxabi.h>

#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "kernels.h"
#include "runtime.h"

namespace bed {
namespace {

struct Registered {
  const void* function;
  const char* name;
};

// torch registers some 100 000 kernels while it is loaded and launches a handful: all are noted, and the few are
// looked for.
struct Registry {
  std::mutex mutex;
  std::vector<Registered> noted;
  std::unordered_map<const void*, std::string> launched;  // demangled
};
Registry& registry() {
  static auto* it = new Registry;
  return *it;
}

std::string demangled(const char* name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string result = status == 0 && text ? text : name;
  free(text);
  return result;
}

std::string name_of(const void* function) {
  auto& r = registry();
  std::lock_guard<std::mutex> hold(r.mutex);
  auto& name = r.launched[function];
  if (name.empty()) {
    name = "(never registered)";
    for (auto& kernel : r.noted)
      if (kernel.function == function) name = demangled(kernel.name);
  }
  return name;
}

cudaError_t launch(const void* function, dim3 grid, void** arguments, cudaStream_t handle) {
  M8D_USE_DEVICE();
  auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  std::string name = name_of(function);
  if (auto work = modelled(name, grid, arguments)) {
    trace("kernel %s", name.c_str());
    count("kernels_filled");
    stream->push(launch_breaks_context() ? break_context : std::move(work), true);
    return cudaSuccess;
  }
  say("KERNEL %s", name.c_str());
  count("kernels_refused");
  return knob("KERNELS") == "ignore" ? cudaSuccess : fail(cudaErrorNotSupported);
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;  // between <<<…>>> and the launch

}  // namespace
}  // namespace bed

using namespace bed;

// What the compiler puts around kernels and their launches. None of it is in a header.
extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
  auto& r = registry();
  std::lock_guard<std::mutex> hold(r.mutex);
  r.noted.push_back({function, name});
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (configurations.empty()) return fail(cudaErrorInvalidConfiguration);
  auto last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(void* kernel, dim3 grid, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(kernel, grid, arguments, stream);
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(function, grid, arguments, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return launch(function, config->gridDim, arguments, config->stream);
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = COMPUTE_MAJOR * 10 + COMPUTE_MINOR;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}
}
