// Who belongs to a communicator that is made from another one, or anew; and the work of making it.
#pragma once

#include "nccl_comm.h"

namespace bed::nccl {

// A new one: everybody comes to the host of the invitation.
Result make_new(Communicator& communicator, const Invitation& invitation);

// From a parent. ranks: those of the parent who take part (sorted); the lowest one hosts. A rank without a color
// takes part and gets nothing (*child stays empty).
struct Split {
  std::vector<int> ranks;
  int color, key;
  bool blocking;
};
Result make_split(Communicator& parent, const Split& split, Shared* child);

// A larger one. The root has the invitation, the other ranks of the parent learn of it.
Result make_grown(Communicator& parent, int size, const Invitation* invitation, bool blocking, Shared* child);

// Init faults: hangs, then fails, as told.
Result suffer(Communicator& communicator, uint64_t id);

}  // namespace bed::nccl
