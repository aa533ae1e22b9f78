#include "nccl_transfer.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

namespace bed::nccl {
namespace {

struct Header {
  uint32_t magic = MESSAGE, unused = 0;
  Label label;
  uint64_t size = 0;
  static constexpr uint32_t MESSAGE = 0x6d386401, MISMATCH = 0x6d3864ff;
};
// Headers are compared and sent as bytes.
static_assert(sizeof(Header) == 40, "no padding");

// The messages of one peer in one direction.
class Lane {
 public:
  Lane(int peer, bool outgoing, int fd, const Label& label) : peer(peer), outgoing(outgoing), fd(fd) {
    expected_.label = label;
  }
  void add(const Message& message) { queue_.push_back(&message); }
  bool finished() const { return at_ == queue_.size(); }
  bool between_messages() const { return moved_ == 0; }

  // Moves what can be moved without waiting.
  Outcome advance() {
    while (!finished()) {
      const Message& message = *queue_[at_];
      if (moved_ == 0) {
        expected_.size = message.size;
        header_ = outgoing ? expected_ : Header{};
      }
      ssize_t moved = move(message);
      if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return {};
      if (moved < 0 && errno == EINTR) continue;
      if (moved <= 0) return {Outcome::lost, peer, ""};
      bool header_was_open = moved_ < sizeof header_;
      moved_ += moved;
      if (!outgoing && header_was_open && moved_ >= sizeof header_ && memcmp(&header_, &expected_, sizeof header_))
        return {Outcome::mismatched, peer, difference()};
      if (moved_ == sizeof header_ + message.size) {
        moved_ = 0;
        at_++;
      }
    }
    return {};
  }

  const int peer;
  const bool outgoing;
  const int fd;

 private:
  // The rest of the header and the rest of the data, in one call.
  ssize_t move(const Message& message) {
    size_t of_header = moved_ < sizeof header_ ? moved_ : sizeof header_, of_data = moved_ - of_header;
    iovec parts[2] = {{reinterpret_cast<char*>(&header_) + of_header, sizeof header_ - of_header},
                      {message.data + of_data, message.size - of_data}};
    msghdr call{};
    call.msg_iov = parts;
    call.msg_iovlen = 2;
    return outgoing ? sendmsg(fd, &call, MSG_DONTWAIT | MSG_NOSIGNAL) : recvmsg(fd, &call, MSG_DONTWAIT);
  }

  std::string difference() const {
    if (header_.magic == Header::MISMATCH) return "it says that the ranks do not do the same";
    auto words = [](const Header& header) {
      return "kind " + std::to_string(header.label.kind) + " dtype " + std::to_string(header.label.dtype) +
             " reduction " + std::to_string(header.label.reduction) + " root " + std::to_string(header.label.root) +
             " count " + std::to_string(header.label.count) + " (" + std::to_string(header.size) + " bytes)";
    };
    return "it does " + words(header_) + ", this rank " + words(expected_);
  }

  std::vector<const Message*> queue_;
  size_t at_ = 0, moved_ = 0;  // the message under way; how much of its header and data is through
  Header header_, expected_;
};

// Peers that wait for this rank learn that they wait in vain, as far as their stream is between two messages.
void tell_mismatch(const std::vector<Socket>& peers, const std::vector<Lane>& lanes) {
  Header header;
  header.magic = Header::MISMATCH;
  for (auto& peer : peers) {
    bool clean = static_cast<bool>(peer);
    for (auto& lane : lanes) clean = clean && (lane.fd != peer.fd() || !lane.outgoing || lane.between_messages());
    if (clean) send(peer.fd(), &header, sizeof header, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
}

Lane& lane_of(std::vector<Lane>& lanes, const Message& message, int fd, const Label& label) {
  for (auto& lane : lanes)
    if (lane.peer == message.peer && lane.outgoing == message.outgoing) return lane;
  return lanes.emplace_back(message.peer, message.outgoing, fd, label);
}

}  // namespace

Outcome exchange(const std::vector<Socket>& peers, const Bell& bell, const Label& label,
                 const std::vector<Message>& messages) {
  std::vector<Lane> lanes;
  for (auto& message : messages) lane_of(lanes, message, peers[message.peer].fd(), label).add(message);
  for (;;) {
    std::vector<pollfd> fds{{bell.fd(), POLLIN, 0}};
    bool finished = true;
    for (auto& lane : lanes) {
      short events = lane.outgoing ? POLLOUT | POLLRDHUP : POLLIN;
      fds.push_back({lane.finished() ? -1 : lane.fd, events, 0});
      finished = finished && lane.finished();
    }
    if (finished) return {};
    if (poll(fds.data(), fds.size(), -1) < 0) continue;
    if (fds[0].revents) return {Outcome::ended, -1, ""};
    for (size_t i = 0; i < lanes.size(); i++) {
      short seen = fds[1 + i].revents;
      if (!seen) continue;
      // What a peer sent before it went may still be read, but nothing can be sent to it any more.
      if (lanes[i].outgoing && seen & (POLLRDHUP | POLLHUP | POLLERR)) return {Outcome::lost, lanes[i].peer, ""};
      Outcome outcome = lanes[i].advance();
      if (outcome.what == Outcome::mismatched) tell_mismatch(peers, lanes);
      if (!outcome) return outcome;
    }
  }
}

}  // namespace bed::nccl
