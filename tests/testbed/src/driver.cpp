// The little of the driver API that torch asks for: the library calls itself libcuda.so.1. Everything else that
// cuda.h names is a generated stub.
#include <cuda.h>
#include <dlfcn.h>

#include <string>

#include "runtime.h"

namespace {

auto* const CONTEXT = reinterpret_cast<CUcontext>(0x1);  // one for all devices; nobody looks inside

long unknown_entry() { return bed::m8d_bed_cuda_stub("a driver function that cuda.h does not name"); }

void* entry_point(const std::string& name) {
  static void* self = [] {
    Dl_info info;
    bool found = dladdr(reinterpret_cast<void*>(&unknown_entry), &info);
    return found ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : nullptr;
  }();
  // Newest first, as the headers' macros choose.
  for (auto* version : {"_v4", "_v3", "_v2", ""})
    if (void* found = self ? dlsym(self, (name + version).c_str()) : nullptr) return found;
  bed::say("asked for a driver function that cuda.h does not name: %s", name.c_str());
  return reinterpret_cast<void*>(&unknown_entry);  // torch resolves dozens at once, and takes no null for an answer
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return bed::usable() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED; }

CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* devices) {
  *devices = bed::device_count();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < bed::device_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  // The driver numbers its attributes like the runtime does.
  return static_cast<CUresult>(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = CONTEXT;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = CONTEXT;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

// A macro in cuda.h for cuMemGetAddressRange_v2.
CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
  void* start = nullptr;
  if (!bed::range_of(reinterpret_cast<void*>(pointer), &start, bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (base) *base = reinterpret_cast<CUdeviceptr>(start);
  return CUDA_SUCCESS;
}

#if CUDA_VERSION >= 12090
// The driver's log: there is none to tell of.
CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle* handle) {
  if (handle) *handle = nullptr;
  return CUDA_SUCCESS;
}

CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }
#endif

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  M8D_ENTER();
  *function = entry_point(name);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, 0, result);
}
#endif
}
