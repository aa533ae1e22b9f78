// Events. Each record makes a ticket that the stream finishes when it gets there; who waits, waits for the ticket.
#include <map>

#include "runtime.h"

namespace bed {
namespace {

struct Event {
  std::shared_ptr<Ticket> last;  // null: never recorded
};

// Handles are numbers that are never used twice, nor for a stream: a stale one is recognised.
struct Registry {
  std::mutex mutex;
  uintptr_t next = 0x10008;
  std::map<uintptr_t, std::shared_ptr<Event>> events;
};
Registry& registry() {
  static auto* it = new Registry;
  return *it;
}

std::shared_ptr<Event> event_of(cudaEvent_t handle) {
  auto& r = registry();
  std::lock_guard<std::mutex> hold(r.mutex);
  auto it = r.events.find(reinterpret_cast<uintptr_t>(handle));
  return it == r.events.end() ? nullptr : it->second;
}

std::shared_ptr<Ticket> last_of(const Event& event) {
  std::lock_guard<std::mutex> hold(registry().mutex);
  return event.last;
}

__attribute__((constructor)) void register_counters() {
  register_counter("events", [] {
    std::lock_guard<std::mutex> hold(registry().mutex);
    return static_cast<long>(registry().events.size());
  });
}

}  // namespace

void Ticket::finish() {
  std::lock_guard<std::mutex> hold(mutex_);
  done_ = true;
  when_ = Clock::now();
  changed_.notify_all();
}

bool Ticket::finished() const {
  std::lock_guard<std::mutex> hold(mutex_);
  return done_;
}

void Ticket::wait() const {
  std::unique_lock<std::mutex> hold(mutex_);
  while (!changed_.wait_for(hold, LOOK, [this] { return done_ || context_error() != cudaSuccess; })) {
  }
}

Ticket::Clock::time_point Ticket::when() const {
  std::lock_guard<std::mutex> hold(mutex_);
  return when_;
}

}  // namespace bed

using namespace bed;

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
  M8D_USE_DEVICE();
  auto& r = registry();
  std::lock_guard<std::mutex> hold(r.mutex);
  auto number = r.next += 16;
  r.events[number] = std::make_shared<Event>();
  *handle = reinterpret_cast<cudaEvent_t>(number);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  M8D_USE_DEVICE();
  auto& r = registry();
  std::lock_guard<std::mutex> hold(r.mutex);
  // What waits for it holds the ticket: destroying a pending event is fine.
  return r.events.erase(reinterpret_cast<uintptr_t>(handle)) ? cudaSuccess : fail(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  M8D_USE_DEVICE();
  auto event = event_of(handle);
  auto stream = stream_of(stream_handle);
  if (!event || !stream) return fail(cudaErrorInvalidResourceHandle);
  auto ticket = std::make_shared<Ticket>();
  {
    std::lock_guard<std::mutex> hold(registry().mutex);
    event->last = ticket;
  }
  stream->push([ticket] { ticket->finish(); }, true);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned) {
  return cudaEventRecord(handle, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  M8D_USE_DEVICE();
  auto event = event_of(handle);
  if (!event) return fail(cudaErrorInvalidResourceHandle);
  auto ticket = last_of(*event);
  return !ticket || ticket->finished() ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  M8D_USE_DEVICE();
  auto event = event_of(handle);
  if (!event) return fail(cudaErrorInvalidResourceHandle);
  if (auto ticket = last_of(*event)) ticket->wait();
  return fail(context_error());
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  M8D_USE_DEVICE();
  auto first = event_of(from), second = event_of(to);
  if (!first || !second) return fail(cudaErrorInvalidResourceHandle);
  auto begin = last_of(*first), end = last_of(*second);
  if (!begin || !end) return fail(cudaErrorInvalidResourceHandle);
  if (!begin->finished() || !end->finished()) return fail(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(end->when() - begin->when()).count();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned) {
  M8D_USE_DEVICE();
  auto event = event_of(handle);
  auto stream = stream_of(stream_handle);
  if (!event || !stream) return fail(cudaErrorInvalidResourceHandle);
  auto ticket = last_of(*event);
  if (ticket && !ticket->finished()) stream->push([ticket] { ticket->wait(); }, false);
  return cudaSuccess;
}
}
