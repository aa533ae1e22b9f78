// How the ranks of a communicator find each other: they introduce themselves to a host, which tells everybody about
// everybody; they connect pairwise; and nobody goes on before all have done so. The host of a new communicator is a
// thread of the process that made the unique id, the host of a split one is a thread of a rank of the parent.
#pragma once

#include <cstdint>
#include <vector>

#include "nccl_results.h"
#include "nccl_sockets.h"

namespace bed::nccl {

struct Introduction {
  uint64_t magic = 0x6d38642d62656421;
  uint64_t nonce = 0;  // whoever comes first in the table names the communicator with it
  int32_t rank = 0, size = 0;  // size 0: nobody needs this host, it may go home
  int32_t color = 0, key = 0;
  uint16_t port = 0;  // where this rank listens
};

// What goes into ncclUniqueId.
struct Invitation {
  char magic[8] = {'m', '8', 'd', '-', 'b', 'e', 'd', 0};
  uint64_t nonce = 0;
  uint16_t port = 0;
};

// Makes an invitation and leaves a thread behind that hosts the one meeting it is for.
Result invite(Invitation* invitation);
// Sends home the host of an invitation that is not used.
void cancel(const Invitation& invitation);

// Hosts one meeting. size: how many come (0: as many as the first one says). absentees: connections to those who are
// expected; one that closes tells that they never come.
void host_meeting(const Socket& listener, int size, const std::vector<int>& absentees, const Bell& bell);

class Meeting {
 public:
  // Introduces a rank to the host and waits for the table: it is sorted by rank.
  Result join(uint16_t host, const Introduction& me, const Bell& bell);
  const std::vector<Introduction>& table() const { return table_; }
  // Connects `me` with all others of `members`: peers[i] is the socket to members[i], nothing for i == me.
  Result connect(const std::vector<Introduction>& members, int me, const Socket& listener, const Bell& bell,
                 std::vector<Socket>* peers);
  // Waits until all have connected.
  Result confirm(const Bell& bell);

 private:
  Result refusal(const Bell& bell);
  Socket host_;
  std::vector<Introduction> table_;
};

uint64_t random_number();

}  // namespace bed::nccl
