// What each operation does, in messages and arithmetic. Data goes round a ring as NCCL's does, so that a rank
// exchanges data with its two neighbours only (except in all-to-all, gather, scatter and point-to-point).
#pragma once

#include <memory>
#include <vector>

#include "nccl_comm.h"
#include "nccl_reduce.h"

namespace bed::nccl {

enum class Kind : int {
  Send, Recv, AllReduce, Broadcast, AllGather, Reduce, ReduceScatter, AlltoAll, Gather, Scatter
};
const char* name_of(Kind kind);

struct Operation {
  Kind kind;
  const char* send;
  char* receive;
  size_t count;
  Dtype dtype;
  Reduction reduction;
  int root;                              // of a Send or Recv: the peer
  std::shared_ptr<const Factor> factor;  // of a pre-multiplied sum
};

// All operations that one group queued on one communicator and stream: sends and receives first, all at once.
Outcome run(const Communicator& communicator, const std::vector<Operation>& operations);

}  // namespace bed::nccl
