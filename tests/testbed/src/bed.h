// What the two halves of the test bed (CUDA runtime, NCCL) share: knobs, counters, messages, streams.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

namespace bed {

// ---- Knobs. A value comes from m8d_bed_set, else from the environment (M8D_BED_<NAME>), else it is "".
// The environment is read when this process first asks for a knob; a forked child reads it again.

std::string knob(const char* name);
long knob_number(const char* name, long otherwise = 0);  // otherwise: the knob is empty or no number

// False if the environment names a knob that does not exist (said once on stderr), or if this process was forked
// from one that had used the bed. Entry points that return a result fail then.
bool usable();
void note_used();  // a thread exists: a child forked from here on is lost

// "From the n-th on" knobs. hit() is true at the n-th call since the knob was set, and at all later ones; n is the
// knob's value, and nothing is hit while that is empty or 0. Setting the knob again starts again at 1.
class From {
 public:
  explicit From(const char* knob) : knob_(knob) {}
  bool hit();

 private:
  const char* knob_;
  long generation_ = -1, calls_ = 0;
};

// ---- Counters, read by tests with m8d_bed_count. A name exists once it was counted or registered.

void count(const char* counter, long by = 1);
long counted(const char* counter);                                      // -1: no such counter
void register_counter(const char* name, std::function<long()> reading);  // computed when it is asked for

// Creates its counters when the library is loaded: `static Counters names({"launches", "aborts"});`
struct Counters {
  Counters(std::initializer_list<const char*> names) {
    for (auto* name : names) count(name, 0);
  }
};

// ---- Messages: "m8d-bed[pid]: …\n" on stderr, one write(2) each.

void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
void trace(const char* format, ...) __attribute__((format(printf, 1, 2)));  // only with TRACE=1

// ---- Streams. Work of one stream runs one piece after the other, on a thread of that stream.

// may_inline: it never blocks, so it may run in the calling thread when the stream is idle. Unknown stream: false.
bool enqueue(cudaStream_t stream, std::function<void()> work, bool may_inline);
bool capturing(cudaStream_t stream);  // never: the bed refuses to capture
int current_device();

// ---- The CUDA context of this process, of all devices.

// What a call does that uses the device: it waits while another thread holds the context, and gets the error that has
// made it useless (cudaSuccess: none has).
cudaError_t use_context();
cudaError_t context_error();  // without waiting
struct ContextHeld {
  ContextHeld();
  ~ContextHeld();
};
// Whether this launch, which it counts, is to end with a device error: its work is then break_context().
bool launch_breaks_context();
void break_context();

// Allocates like cudaMalloc/cudaFree (ncclMemAlloc).
cudaError_t device_allocate(void** pointer, size_t bytes);
cudaError_t device_release(void* pointer);
// Memory that CUDA knows is written only while it is allocated.
bool allocated_here(const void* pointer);
void overwrite(void* pointer, int value, size_t bytes);

// ---- What a generated stub calls: says its name, counts it, returns the error the caller gets.

extern "C" long m8d_bed_cuda_stub(const char* name);
extern "C" long m8d_bed_nccl_stub(const char* name);

}  // namespace bed
