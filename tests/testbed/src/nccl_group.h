// ncclGroupStart/ncclGroupEnd: what a thread has queued, and what happens to it when its group ends.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "nccl_collectives.h"
#include "nccl_comm.h"

namespace bed::nccl::group {

// An init, a split, …: `communicator` is in progress until the work is done.
struct Job {
  Shared communicator;
  std::function<int()> work;
  lifetime::Use use;
};

// Whether what a non-blocking call began is over: the communicator is not in progress any more.
std::function<bool()> while_busy(const Shared& communicator);

void start();
// by_user: by ncclGroupEnd, not by the end of a single call.
int end(bool by_user);
// The error of a call: ncclGroupEnd repeats it, and drops what is queued.
void note_error(int result);

void queue(const Shared& communicator, cudaStream_t stream, const Operation& operation);
// At once, in the background (non-blocking), or when the group of this thread ends.
int submit(Job job);

}  // namespace bed::nccl::group
