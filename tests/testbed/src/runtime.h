// Inside the CUDA half: errors, streams and memory as the entry points see them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "bed.h"

namespace bed {

// Remembers an error for this thread's cudaGetLastError, and returns it.
cudaError_t fail(cudaError_t error);

// The first line of an entry point: leaves it where the process must not use the device, and traces the call.
#define M8D_ENTER()                                                       \
  do {                                                                    \
    if (!bed::usable()) return bed::fail(cudaErrorInitializationError);   \
    bed::trace("%s", __func__);                                           \
  } while (0)

// The same of a call that uses the device.
#define M8D_USE_DEVICE()                                                                \
  do {                                                                                  \
    M8D_ENTER();                                                                        \
    if (auto broken = bed::use_context(); broken != cudaSuccess) return bed::fail(broken); \
  } while (0)

// How often a wait looks whether the context has become useless: what it waits for does not come then.
constexpr std::chrono::milliseconds LOOK{20};

constexpr int COMPUTE_MAJOR = 9, COMPUTE_MINOR = 0;  // every target's wheel has kernels for it
int device_count();
void set_current_device(int device);

// Something to happen later, once.
class Ticket {
 public:
  using Clock = std::chrono::steady_clock;
  void finish();
  bool finished() const;
  void wait() const;
  Clock::time_point when() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;
  Clock::time_point when_;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(int device, unsigned flags, int priority, long id)
      : device(device), flags(flags), priority(priority), id(id) {}
  void push(std::function<void()> work, bool may_inline);
  bool idle() const;
  void wait() const;  // for what was pushed until now

  const int device;
  const unsigned flags;
  const int priority;
  const long id;

 private:
  void run();

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  long pushed_ = 0, finished_ = 0;
  bool busy_ = false, has_worker_ = false;
};

std::shared_ptr<Stream> stream_of(cudaStream_t handle);  // null: no such stream
void wait_for_device(int device);

enum class Place { unknown, host, device };  // unknown: pageable memory that CUDA never heard of
Place place_of(const void* pointer);
bool range_of(const void* pointer, void** base, size_t* bytes);  // false: not allocated here
void memory_info(int device, size_t* free, size_t* total);

}  // namespace bed
