// Memory. "Device" memory is host memory of this process that is only said to be on a device; copies are real, in
// stream order, and block where CUDA says they block.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "runtime.h"

namespace bed {
namespace {

struct Block {
  size_t bytes;
  int device;  // the current one when it was made
  Place place;
  bool ours;   // false: registered by cudaHostRegister
};

struct Registry {
  std::mutex mutex;
  std::map<char*, Block> blocks;
  std::map<int, size_t> used;  // by device
  long device_blocks = 0;
};
Registry& registry() {
  static auto* it = new Registry;
  return *it;
}

constexpr size_t PAGE = 4096;

size_t capacity() { return static_cast<size_t>(knob_number("MEM_MB")) << 20; }

std::map<char*, Block>::iterator find(const void* pointer) {  // the mutex is held
  auto& blocks = registry().blocks;
  auto* at = static_cast<char*>(const_cast<void*>(pointer));
  auto it = blocks.upper_bound(at);
  if (it == blocks.begin()) return blocks.end();
  --it;
  return at < it->first + it->second.bytes ? it : blocks.end();
}

cudaError_t allocate(void** pointer, size_t bytes, Place place) {
  *pointer = nullptr;
  if (!bytes) return cudaSuccess;
  bytes = (bytes + PAGE - 1) / PAGE * PAGE;
  int device = current_device();
  auto& r = registry();
  size_t limit = capacity();
  std::lock_guard<std::mutex> hold(r.mutex);
  if (place == Place::device && r.used[device] + bytes > limit) return fail(cudaErrorMemoryAllocation);
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  r.blocks[static_cast<char*>(made)] = {bytes, device, place, true};
  if (place == Place::device) {
    r.used[device] += bytes;
    r.device_blocks++;
  }
  *pointer = made;
  return cudaSuccess;
}

// Like CUDA, waits for the device: what still runs may use the block.
cudaError_t release(void* pointer, Place place) {
  if (!pointer) return cudaSuccess;
  auto& r = registry();
  Block block;
  {
    std::lock_guard<std::mutex> hold(r.mutex);
    auto it = r.blocks.find(static_cast<char*>(pointer));
    if (it == r.blocks.end() || it->second.place != place || !it->second.ours) return fail(cudaErrorInvalidValue);
    block = it->second;
  }
  wait_for_device(block.device);
  std::lock_guard<std::mutex> hold(r.mutex);
  if (!r.blocks.erase(static_cast<char*>(pointer))) return fail(cudaErrorInvalidValue);
  if (place == Place::device) {
    r.used[block.device] -= block.bytes;
    r.device_blocks--;
  }
  munmap(pointer, block.bytes);
  return cudaSuccess;
}

// A copy in stream order. From pageable memory: the source may change once this returns, so it is copied aside if
// the stream is busy. To pageable memory: this returns when the bytes are there.
cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t handle) {
  auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (!bytes) return cudaSuccess;
  if (!to || !from) return fail(cudaErrorInvalidValue);
  bool from_pageable = place_of(from) == Place::unknown, to_pageable = place_of(to) == Place::unknown;
  if (from_pageable && !to_pageable && !stream->idle()) {
    auto* bytes_at = static_cast<const char*>(from);
    auto aside = std::make_shared<std::vector<char>>(bytes_at, bytes_at + bytes);
    stream->push([=] { memcpy(to, aside->data(), bytes); }, true);
    return cudaSuccess;
  }
  stream->push([=] { memmove(to, from, bytes); }, true);
  if (from_pageable || to_pageable) stream->wait();
  return fail(context_error());
}

cudaError_t set(void* to, int value, size_t bytes, cudaStream_t handle) {
  bool known = enqueue(handle, [=] { memset(to, value, bytes); }, true);
  return known ? cudaSuccess : fail(cudaErrorInvalidResourceHandle);
}

__attribute__((constructor)) void register_counters() {
  register_counter("allocations", [] {
    std::lock_guard<std::mutex> hold(registry().mutex);
    return registry().device_blocks;
  });
}

}  // namespace

Place place_of(const void* pointer) {
  std::lock_guard<std::mutex> hold(registry().mutex);
  auto it = find(pointer);
  return it == registry().blocks.end() ? Place::unknown : it->second.place;
}

bool range_of(const void* pointer, void** base, size_t* bytes) {
  std::lock_guard<std::mutex> hold(registry().mutex);
  auto it = find(pointer);
  if (it == registry().blocks.end()) return false;
  if (base) *base = it->first;
  if (bytes) *bytes = it->second.bytes;
  return true;
}

void memory_info(int device, size_t* free, size_t* total) {
  size_t limit = capacity();
  std::lock_guard<std::mutex> hold(registry().mutex);
  size_t used = registry().used[device];
  *total = limit;
  *free = used < limit ? limit - used : 0;
}

cudaError_t device_allocate(void** pointer, size_t bytes) { return allocate(pointer, bytes, Place::device); }
cudaError_t device_release(void* pointer) { return release(pointer, Place::device); }

bool allocated_here(const void* pointer) { return range_of(pointer, nullptr, nullptr); }

void overwrite(void* pointer, int value, size_t bytes) {
  std::lock_guard<std::mutex> hold(registry().mutex);
  auto it = find(pointer);
  if (it == registry().blocks.end()) return;
  auto left = static_cast<size_t>(it->first + it->second.bytes - static_cast<char*>(pointer));
  memset(pointer, value, std::min(bytes, left));
}

}  // namespace bed

using namespace bed;

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  M8D_USE_DEVICE();
  return allocate(pointer, bytes, Place::device);
}

cudaError_t cudaFree(void* pointer) {
  M8D_USE_DEVICE();
  return release(pointer, Place::device);
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  M8D_USE_DEVICE();
  return allocate(pointer, bytes, Place::host);
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  M8D_USE_DEVICE();
  return allocate(pointer, bytes, Place::host);
}

cudaError_t cudaFreeHost(void* pointer) {
  M8D_USE_DEVICE();
  return release(pointer, Place::host);
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  M8D_USE_DEVICE();
  if (!pointer || !bytes) return fail(cudaErrorInvalidValue);
  std::lock_guard<std::mutex> hold(registry().mutex);
  if (find(pointer) != registry().blocks.end()) return fail(cudaErrorHostMemoryAlreadyRegistered);
  registry().blocks[static_cast<char*>(pointer)] = {bytes, current_device(), Place::host, false};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
  M8D_USE_DEVICE();
  std::lock_guard<std::mutex> hold(registry().mutex);
  auto it = registry().blocks.find(static_cast<char*>(pointer));
  if (it == registry().blocks.end() || it->second.ours) return fail(cudaErrorHostMemoryNotRegistered);
  registry().blocks.erase(it);
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  M8D_USE_DEVICE();
  if (place_of(host) != Place::host) return fail(cudaErrorInvalidValue);
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  M8D_USE_DEVICE();
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -1;
  std::lock_guard<std::mutex> hold(registry().mutex);
  auto it = find(pointer);
  if (it == registry().blocks.end()) return cudaSuccess;
  bool on_device = it->second.place == Place::device;
  attributes->type = on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->device = it->second.device;
  attributes->devicePointer = const_cast<void*>(pointer);
  attributes->hostPointer = on_device ? nullptr : const_cast<void*>(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  M8D_USE_DEVICE();
  memory_info(current_device(), free, total);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  M8D_USE_DEVICE();
  return copy(to, from, bytes, stream);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  M8D_USE_DEVICE();
  return copy(to, from, bytes, stream);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  M8D_USE_DEVICE();
  auto error = copy(to, from, bytes, nullptr);
  if (error == cudaSuccess) stream_of(nullptr)->wait();
  return error;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t handle) {
  M8D_USE_DEVICE();
  auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  auto copy_rows = [=] {
    for (size_t row = 0; row < height; row++)
      memmove(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  };
  stream->push(copy_rows, true);
  if (place_of(from) == Place::unknown || place_of(to) == Place::unknown) stream->wait();
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  M8D_USE_DEVICE();
  return set(to, value, bytes, stream);
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  M8D_USE_DEVICE();
  return set(to, value, bytes, nullptr);
}
}
