#include "nccl_faults.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "bed.h"
#include "nccl_results.h"

namespace bed::nccl::faults {
namespace {

long number(uint64_t id, const char* knob, long otherwise = 0) {
  return concerns(id) ? knob_number(knob, otherwise) : otherwise;
}

From& enqueues() {
  static auto* from = new From("ENQUEUE_FAIL_FROM");
  return *from;
}

From& launches() {
  static auto* from = new From("HANG_FROM_OP");
  return *from;
}

}  // namespace

bool concerns(uint64_t id) {
  std::string only = knob("COMM");
  return only.empty() || only == "0" || strtoull(only.c_str(), nullptr, 16) == id;
}

int enqueue_result(uint64_t id, const char* kind) {
  std::string only = knob("ENQUEUE_FAIL_KIND");
  if (!concerns(id) || (!only.empty() && only != kind)) return success;
  // Without a start the result alone makes all fail; a start without a result means the usual one.
  bool from_start = knob_number("ENQUEUE_FAIL_FROM") == 0;
  if (!from_start && !enqueues().hit()) return success;
  return static_cast<int>(knob_number("ENQUEUE_RESULT", from_start ? success : remote_error));
}

int group_end_result(uint64_t id) { return static_cast<int>(number(id, "GROUPEND_RESULT")); }

bool launch_hangs(uint64_t id) { return concerns(id) && launches().hit(); }

long launch_hang_ms(uint64_t id) { return number(id, "LAUNCH_HANG_MS"); }

int init_result(uint64_t id) { return static_cast<int>(number(id, "INIT_RESULT")); }

long init_hang_ms(uint64_t id) { return number(id, "INIT_HANG_MS"); }

int async_error(uint64_t id) { return static_cast<int>(number(id, "ASYNC_ERROR")); }

int abort_result(uint64_t id) { return static_cast<int>(number(id, "ABORT_RESULT")); }

long abort_lock_ms(uint64_t id) { return number(id, "ABORT_LOCK_MS"); }

long graphs_alive(uint64_t id) { return number(id, "GRAPHS_ALIVE"); }

bool abort_writes(uint64_t id) { return number(id, "ABORT_WRITES") != 0; }

long abort_hang_ms(uint64_t id, bool before) {
  return (knob("ABORT_HANG_PHASE") != "after") == before ? number(id, "ABORT_HANG_MS") : 0;
}

bool lazy_connect(uint64_t id) { return number(id, "LAZY_CONNECT") != 0; }

long destroy_hang_ms(uint64_t id) { return number(id, "DESTROY_HANG_MS"); }

bool death_unseen(uint64_t id) { return number(id, "NO_DETECT") != 0; }

long detect_delay_ms(uint64_t id) { return number(id, "DETECT_DELAY_MS"); }

int remote_result(uint64_t id) { return static_cast<int>(number(id, "REMOTE_RESULT", remote_error)); }

long nonblocking_ms(uint64_t id) { return number(id, "NONBLOCKING_MS"); }

void hang(const std::function<long()>& told, const std::function<void()>& meanwhile) {
  long ms = told();
  auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
  while (std::chrono::steady_clock::now() < end && told() == ms) {
    meanwhile();
    std::this_thread::sleep_for(std::chrono::milliseconds(std::min(ms, 5L)));
  }
}

}  // namespace bed::nccl::faults
