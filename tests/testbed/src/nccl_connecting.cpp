#include "nccl_connecting.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstdio>
#include <set>
#include <tuple>

#include "nccl_collectives.h"
#include "nccl_comm.h"
#include "nccl_faults.h"

namespace bed::nccl {
namespace {

constexpr int LOOK_AGAIN_MS = 1;

struct Connection {
  int from, to;
  int graph;  // NCCL has connections of their own for each of a collective's algorithms; here for each collective
  bool operator<(const Connection& other) const {
    return std::tie(from, to, graph) < std::tie(other.from, other.to, other.graph);
  }
};

std::set<Connection> needed(const Communicator& communicator, const std::vector<Operation>& operations) {
  std::set<Connection> all;
  int me = communicator.rank, size = communicator.size;
  for (auto& op : operations)
    for (int peer = 0; peer < size; peer++) {
      if (peer == me) continue;
      bool root = op.root == me, of_root = op.root == peer, sends = false, receives = false;
      int graph = -1;
      switch (op.kind) {
        case Kind::Send: sends = of_root; break;
        case Kind::Recv: receives = of_root; break;
        case Kind::Gather: sends = of_root, receives = root; break;
        case Kind::Scatter: sends = root, receives = of_root; break;
        case Kind::AlltoAll: sends = receives = true; break;
        default: graph = static_cast<int>(op.kind), sends = peer == (me + 1) % size, receives = me == (peer + 1) % size;
      }
      if (sends) all.insert({me, peer, graph});
      if (receives) all.insert({peer, me, graph});
    }
  return all;
}

// An abstract name, which is gone with the process that has it.
struct End {
  sockaddr_un address{};
  socklen_t size;
  std::string text;
  End(const Communicator& communicator, const Connection& connection, bool of_sender) {
    char name[96];
    int length = snprintf(name, sizeof name, "m8d-bed-%016llx-%d-%d-%d%c",
                          static_cast<unsigned long long>(communicator.id), connection.from, connection.to,
                          connection.graph, of_sender ? 's' : 'r');
    text.assign(name, length);
    address.sun_family = AF_UNIX;
    text.copy(address.sun_path + 1, text.size());
    size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  }
  const sockaddr* at() const { return reinterpret_cast<const sockaddr*>(&address); }
};

Socket datagrams() { return Socket(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)); }

Result wait_for(const End& other, const Bell& bell) {
  Socket probe = datagrams();
  if (!probe) return system_error;
  while (::connect(probe.fd(), other.at(), other.size)) {
    pollfd fd{bell.fd(), POLLIN, 0};
    if (poll(&fd, 1, LOOK_AGAIN_MS) > 0) return internal_error;
  }
  return success;
}

}  // namespace

Result connect(Communicator& communicator, const std::vector<Operation>& operations) {
  if (!faults::lazy_connect(communicator.id) || !communicator.blocking) return success;
  Communicator::Use use(communicator);
  if (!use) return success;  // its operations end at once
  std::set<Connection> missing;
  for (auto& connection : needed(communicator, operations)) {
    End mine(communicator, connection, connection.from == communicator.rank);
    std::lock_guard<std::mutex> hold(communicator.connecting.mutex);
    if (communicator.connecting.begun.count(mine.text)) continue;
    Socket name = datagrams();
    if (!name || bind(name.fd(), mine.at(), mine.size)) return system_error;
    communicator.connecting.begun[mine.text] = std::move(name);
    missing.insert(connection);
  }
  for (auto& connection : missing) {
    Result result = wait_for(End(communicator, connection, connection.from != communicator.rank), communicator.bell());
    if (result == success) continue;
    complain(&communicator, "connecting rank %d with rank %d ended: %s", connection.from, connection.to,
             result == internal_error ? "aborted" : "no socket");
    return result;
  }
  return success;
}

}  // namespace bed::nccl
