// The knobs that make NCCL fail, as questions. `id`: the communicator in question (knob COMM).
#pragma once

#include <cstdint>
#include <functional>

namespace bed::nccl::faults {

bool concerns(uint64_t id);
int enqueue_result(uint64_t id, const char* kind);  // 0: do not fail. Counts.
int group_end_result(uint64_t id);
bool launch_hangs(uint64_t id);                     // Counts.
long launch_hang_ms(uint64_t id);
int init_result(uint64_t id);
long init_hang_ms(uint64_t id);
int async_error(uint64_t id);
int abort_result(uint64_t id);
long abort_lock_ms(uint64_t id);
long graphs_alive(uint64_t id);
bool abort_writes(uint64_t id);
long abort_hang_ms(uint64_t id, bool before);       // before, or after ending the pending operations
bool lazy_connect(uint64_t id);
long destroy_hang_ms(uint64_t id);
bool death_unseen(uint64_t id);
long detect_delay_ms(uint64_t id);
int remote_result(uint64_t id);
long nonblocking_ms(uint64_t id);

// Lasts for as many milliseconds as `told` says, or until that changes. `meanwhile` is done again and again.
void hang(const std::function<long()>& told, const std::function<void()>& meanwhile = [] {});

}  // namespace bed::nccl::faults
