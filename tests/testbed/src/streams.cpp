// Streams. A stream is a queue that a thread of its own works off; the thread ends when it has had
// nothing to do for a while. No thread exists before a stream is first used, so a fork server may load the library.
#include <pthread.h>

#include <atomic>
#include <map>
#include <thread>
#include <vector>

#include "runtime.h"

namespace bed {
namespace {

constexpr std::chrono::milliseconds LINGER{300};

// Handles are numbers that are never used twice: a stale one is recognised.
struct Registry {
  std::mutex mutex;
  uintptr_t next = 0x10000;
  std::map<uintptr_t, std::shared_ptr<Stream>> streams;
  std::map<int, std::shared_ptr<Stream>> defaults;  // by device
  std::vector<std::shared_ptr<Stream>> destroyed;   // with work still in them
};
Registry& registry() {
  static auto* it = new Registry;
  return *it;
}
std::atomic<long> stream_ids{1}, workers{0}, workers_started{0};

bool is_default(cudaStream_t handle) { return !handle || handle == cudaStreamLegacy || handle == cudaStreamPerThread; }

__attribute__((constructor)) void register_counters() {
  register_counter("stream_workers", [] { return workers.load(); });
  register_counter("stream_workers_started", [] { return workers_started.load(); });
  register_counter("streams", [] {
    std::lock_guard<std::mutex> hold(registry().mutex);
    return static_cast<long>(registry().streams.size());
  });
}

}  // namespace

void Stream::push(std::function<void()> work, bool may_inline) {
  std::unique_lock<std::mutex> hold(mutex_);
  pushed_++;
  if (context_error() != cudaSuccess) return;
  if (may_inline && queue_.empty() && !busy_) {
    busy_ = true;
    hold.unlock();
    work();
    hold.lock();
    busy_ = false;
    finished_++;
    changed_.notify_all();
    return;
  }
  queue_.push_back(std::move(work));
  if (!has_worker_) {
    has_worker_ = true;
    workers++;
    workers_started++;
    note_used();
    std::thread worker([self = shared_from_this()] { self->run(); });
    pthread_setname_np(worker.native_handle(), "m8d-stream");
    worker.detach();
  }
  changed_.notify_all();
}

void Stream::run() {
  std::unique_lock<std::mutex> hold(mutex_);
  auto work_is_due = [this] { return !busy_ && !queue_.empty(); };
  // A caller that runs a piece of work itself (busy_) may be followed by others in the queue: then no leaving.
  while (changed_.wait_for(hold, LINGER, work_is_due) || !queue_.empty()) {
    if (!work_is_due()) continue;
    if (context_error() != cudaSuccess) break;  // nothing runs any more, and the stream is never idle
    auto work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    hold.unlock();
    work();
    work = nullptr;
    hold.lock();
    busy_ = false;
    finished_++;
    changed_.notify_all();
  }
  has_worker_ = false;
  workers--;
}

bool Stream::idle() const {
  std::lock_guard<std::mutex> hold(mutex_);
  return finished_ == pushed_;
}

void Stream::wait() const {
  std::unique_lock<std::mutex> hold(mutex_);
  auto over = [this, until = pushed_] { return finished_ >= until || context_error() != cudaSuccess; };
  while (!changed_.wait_for(hold, LOOK, over)) {
  }
}

std::shared_ptr<Stream> stream_of(cudaStream_t handle) {
  auto& r = registry();
  std::lock_guard<std::mutex> hold(r.mutex);
  if (is_default(handle)) {
    auto& stream = r.defaults[current_device()];
    if (!stream) stream = std::make_shared<Stream>(current_device(), 0, 0, 0);
    return stream;
  }
  auto it = r.streams.find(reinterpret_cast<uintptr_t>(handle));
  return it == r.streams.end() ? nullptr : it->second;
}

void wait_for_device(int device) {
  auto& r = registry();
  std::vector<std::shared_ptr<Stream>> of_device;
  {
    std::lock_guard<std::mutex> hold(r.mutex);
    for (auto& entry : r.streams) of_device.push_back(entry.second);
    for (auto& entry : r.defaults) of_device.push_back(entry.second);
    of_device.insert(of_device.end(), r.destroyed.begin(), r.destroyed.end());
  }
  for (auto& stream : of_device)
    if (stream->device == device) stream->wait();
}

bool enqueue(cudaStream_t handle, std::function<void()> work, bool may_inline) {
  auto stream = stream_of(handle);
  if (!stream) return false;
  stream->push(std::move(work), may_inline);
  return true;
}

bool capturing(cudaStream_t) { return false; }

}  // namespace bed

using namespace bed;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  M8D_USE_DEVICE();
  auto& r = registry();
  std::lock_guard<std::mutex> hold(r.mutex);
  auto number = r.next += 16;
  r.streams[number] = std::make_shared<Stream>(current_device(), flags, priority, stream_ids++);
  *handle = reinterpret_cast<cudaStream_t>(number);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  M8D_USE_DEVICE();
  auto& r = registry();
  std::lock_guard<std::mutex> hold(r.mutex);
  auto it = r.streams.find(reinterpret_cast<uintptr_t>(handle));
  if (it == r.streams.end()) return fail(cudaErrorInvalidResourceHandle);
  std::vector<std::shared_ptr<Stream>> still_busy;
  for (auto& stream : r.destroyed)
    if (!stream->idle()) still_busy.push_back(stream);
  if (!it->second->idle()) still_busy.push_back(it->second);
  r.destroyed = std::move(still_busy);
  r.streams.erase(it);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  M8D_USE_DEVICE();
  auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  return stream->idle() ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  M8D_USE_DEVICE();
  auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  stream->wait();
  return fail(context_error());
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  M8D_ENTER();
  auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  *priority = stream->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  M8D_ENTER();
  auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  *flags = stream->flags;
  return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  M8D_ENTER();
  auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  *id = stream->id;
  return cudaSuccess;
}

#if CUDART_VERSION >= 12080
cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  M8D_ENTER();
  auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  *device = stream->device;
  return cudaSuccess;
}
#endif

cudaError_t cudaDeviceSynchronize() {
  M8D_USE_DEVICE();
  wait_for_device(current_device());
  return fail(context_error());
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  M8D_USE_DEVICE();
  return enqueue(handle, [=] { function(data); }, false) ? cudaSuccess : fail(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data, unsigned) {
  M8D_USE_DEVICE();
  bool known = enqueue(handle, [=] { function(handle, cudaSuccess, data); }, false);
  return known ? cudaSuccess : fail(cudaErrorInvalidResourceHandle);
}
}
