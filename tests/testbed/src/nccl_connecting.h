// Knob LAZY_CONNECT: the first operation with a peer connects with it, inside the call, and waits for the peer there
// (NCCL 2.29.7: src/group.cc, groupLaunch; src/transport.cc, ncclTransportP2pSetup).
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "nccl_results.h"
#include "nccl_sockets.h"

namespace bed::nccl {

class Communicator;
struct Operation;

// The connections that a communicator has begun: a name that the peer looks for, for as long as it lives.
struct Connecting {
  std::mutex mutex;
  std::map<std::string, Socket> begun;
};

// Returns when each peer that these operations need has come to its end of the connection, however late that is; an
// abort ends the wait (internal_error, as ncclSocket's waits return).
Result connect(Communicator& communicator, const std::vector<Operation>& operations);

}  // namespace bed::nccl
