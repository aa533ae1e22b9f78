// Devices and errors: a few made-up GPUs that call themselves what they are.
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "runtime.h"

namespace bed {
namespace {

thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;

constexpr int THREADS_PER_BLOCK = 1024, THREADS_PER_PROCESSOR = 2048, PROCESSORS = 4, WARP = 32, REGISTERS = 65536;
constexpr int SHARED = 48 << 10, SHARED_OPTIN = 227 << 10, SHARED_PER_PROCESSOR = 228 << 10;
constexpr int PRIORITY_HIGHEST = -5;

bool exists(int device) { return device >= 0 && device < device_count(); }

int attribute_of(cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: return COMPUTE_MAJOR;
    case cudaDevAttrComputeCapabilityMinor: return COMPUTE_MINOR;
    case cudaDevAttrMultiProcessorCount: return PROCESSORS;
    case cudaDevAttrWarpSize: return WARP;
    case cudaDevAttrMaxThreadsPerBlock: return THREADS_PER_BLOCK;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return THREADS_PER_PROCESSOR;
    case cudaDevAttrMaxSharedMemoryPerBlock: return SHARED;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return SHARED_OPTIN;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return SHARED_PER_PROCESSOR;
    case cudaDevAttrMaxRegistersPerBlock: return REGISTERS;
    case cudaDevAttrMaxGridDimX: return 0x7fffffff;
    case cudaDevAttrUnifiedAddressing: return 1;
    case cudaDevAttrPciBusId: return device + 1;
    default: return 0;
  }
}

}  // namespace

cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

int device_count() { return static_cast<int>(knob_number("DEVICES")); }
int current_device() { return current; }
void set_current_device(int device) { current = device; }

}  // namespace bed

using namespace bed;

extern "C" {

cudaError_t cudaGetDeviceCount(int* devices) {
  M8D_ENTER();
  *devices = device_count();
  return *devices > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
  M8D_ENTER();
  *device = current_device();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  M8D_ENTER();
  if (!exists(device)) return fail(cudaErrorInvalidDevice);
  set_current_device(device);
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  M8D_ENTER();
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  M8D_ENTER();
  *version = CUDART_VERSION;
  return cudaSuccess;
}

// In CUDA 12's headers this name is a macro for cudaGetDeviceProperties_v2.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  M8D_ENTER();
  if (!exists(device)) return fail(cudaErrorInvalidDevice);
  auto& p = *properties;
  memset(&p, 0, sizeof p);
  snprintf(p.name, sizeof p.name, "m8d test bed (no hardware)");
  size_t free;
  memory_info(device, &free, &p.totalGlobalMem);
  p.major = COMPUTE_MAJOR;
  p.minor = COMPUTE_MINOR;
  p.multiProcessorCount = PROCESSORS;
  p.warpSize = WARP;
  p.maxThreadsPerBlock = THREADS_PER_BLOCK;
  p.maxThreadsPerMultiProcessor = THREADS_PER_PROCESSOR;
  p.sharedMemPerBlock = SHARED;
  p.sharedMemPerBlockOptin = SHARED_OPTIN;
  p.sharedMemPerMultiprocessor = SHARED_PER_PROCESSOR;
  p.regsPerBlock = p.regsPerMultiprocessor = REGISTERS;
  p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = 0x7fffffff;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.l2CacheSize = 50 << 20;
  p.textureAlignment = 512;
  p.concurrentKernels = p.unifiedAddressing = 1;
  p.pciBusID = device + 1;
  p.uuid.bytes[0] = static_cast<char>(device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  M8D_ENTER();
  if (!exists(device)) return fail(cudaErrorInvalidDevice);
  *value = attribute_of(attribute, device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  M8D_ENTER();
  if (!exists(device)) return fail(cudaErrorInvalidDevice);
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  M8D_ENTER();
  if (!exists(device) || !exists(peer)) return fail(cudaErrorInvalidDevice);
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  M8D_ENTER();
  if (least) *least = 0;
  if (greatest) *greatest = PRIORITY_HIGHEST;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  if (context_error() != cudaSuccess) return context_error();
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return context_error() != cudaSuccess ? context_error() : last_error; }

static const struct {
  cudaError_t error;
  const char *name, *text;
} ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported", "peer access is not supported"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
};

const char* cudaGetErrorName(cudaError_t error) {
  for (auto& entry : ERRORS)
    if (entry.error == error) return entry.name;
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  for (auto& entry : ERRORS)
    if (entry.error == error) return entry.text;
  return "unrecognized error code";
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
}
