// Moves messages between one rank and its peers, all at once, until they are through, or somebody is lost, or the
// communicator is ended. Each message carries a label, so that ranks that do different things notice it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "nccl_sockets.h"

namespace bed::nccl {

// What a rank believes to be doing. Both ends of a message must believe the same.
struct Label {
  int32_t kind = 0, dtype = 0, reduction = 0, root = 0;
  uint64_t count = 0;
};

struct Message {
  int peer;
  bool outgoing;
  char* data;
  size_t size;
};

struct Outcome {
  enum What { done, ended, lost, mismatched } what = done;
  int peer = -1;       // who was lost, or does something else
  std::string detail;  // of a mismatch
  explicit operator bool() const { return what == done; }
};

// Messages of one peer and direction go one after the other, all others at the same time. No message to oneself.
Outcome exchange(const std::vector<Socket>& peers, const Bell& bell, const Label& label,
                 const std::vector<Message>& messages);

}  // namespace bed::nccl
