#include "nccl_collectives.h"

#include <algorithm>
#include <cstring>

namespace bed::nccl {
namespace {

using Buffer = std::unique_ptr<char[]>;
Buffer buffer(size_t size) { return Buffer(new char[size]); }

struct Piece {
  size_t first, count;  // elements
};

// One collective on one rank.
class Run {
 public:
  Run(const Communicator& communicator, const Operation& operation)
      : comm_(communicator), op_(operation), size_(communicator.size), rank_(communicator.rank),
        element_(size_of(operation.dtype)), bytes_(operation.count * element_) {
    label_ = {static_cast<int32_t>(op_.kind), static_cast<int32_t>(op_.dtype), static_cast<int32_t>(op_.reduction),
              op_.root, op_.count};
  }

  Outcome run() {
    switch (op_.kind) {
      case Kind::AllReduce:
        return all_reduce();
      case Kind::Reduce:
        return reduce();
      case Kind::ReduceScatter:
        return reduce_scatter();
      case Kind::AllGather:
        copy(op_.receive + rank_ * bytes_, op_.send, bytes_);
        return ring_gather(equal_pieces());
      case Kind::Broadcast:
        return broadcast();
      default:
        return direct();
    }
  }

 private:
  int behind(int steps) const { return ((rank_ - steps) % size_ + size_) % size_; }
  int next() const { return (rank_ + 1) % size_; }
  int previous() const { return behind(1); }
  Outcome exchange(const std::vector<Message>& messages) const {
    return nccl::exchange(comm_.peers, comm_.bell(), label_, messages);
  }
  static void copy(char* to, const char* from, size_t bytes) {
    if (bytes && to != from) memmove(to, from, bytes);
  }

  std::vector<Piece> equal_pieces() const {
    std::vector<Piece> pieces;
    for (int i = 0; i < size_; i++) pieces.push_back({i * op_.count, op_.count});
    return pieces;
  }
  std::vector<Piece> split_pieces() const {
    std::vector<Piece> pieces;
    size_t first = 0;
    for (int i = 0; i < size_; i++) {
      size_t count = op_.count / size_ + (static_cast<size_t>(i) < op_.count % size_);
      pieces.push_back({first, count});
      first += count;
    }
    return pieces;
  }

  // What this rank has to contribute of a piece, in a buffer of its own if it must be changed.
  const char* contribution(const Piece& piece, Buffer& own) const {
    const char* data = op_.send + piece.first * element_;
    if (op_.reduction != Reduction::premul) return data;
    own = buffer(piece.count * element_);
    memcpy(own.get(), data, piece.count * element_);
    scale(own.get(), piece.count, op_.dtype, op_.factor->device ? op_.factor->device : op_.factor->value);
    return own.get();
  }
  void finish(char* data, size_t count) const {
    if (op_.reduction == Reduction::avg) divide(data, count, op_.dtype, size_);
  }

  // Each piece goes round once and collects what everybody contributes; at the end a rank has its own piece.
  Outcome ring_reduce(const std::vector<Piece>& pieces, Buffer& result) const {
    size_t largest = 0;
    for (auto& piece : pieces) largest = std::max(largest, piece.count * element_);
    Buffer own, outgoing = buffer(largest), incoming = buffer(largest);
    const Piece& first = pieces[behind(1)];
    copy(outgoing.get(), contribution(first, own), first.count * element_);
    for (int step = 1; step < size_; step++) {
      const Piece &sent = pieces[behind(step)], &received = pieces[behind(step + 1)];
      Outcome outcome = exchange({{next(), true, outgoing.get(), sent.count * element_},
                                  {previous(), false, incoming.get(), received.count * element_}});
      if (!outcome) return outcome;
      combine(incoming.get(), contribution(received, own), received.count, op_.dtype, op_.reduction);
      std::swap(incoming, outgoing);
    }
    finish(outgoing.get(), pieces[rank_].count);
    result = std::move(outgoing);
    return {};
  }

  // Each piece goes round once, from its rank to all others, in the place where it is to be.
  Outcome ring_gather(const std::vector<Piece>& pieces) const {
    auto at = [&](const Piece& piece) { return op_.receive + piece.first * element_; };
    for (int step = 0; step < size_ - 1; step++) {
      const Piece &sent = pieces[behind(step)], &received = pieces[behind(step + 1)];
      Outcome outcome = exchange({{next(), true, at(sent), sent.count * element_},
                                  {previous(), false, at(received), received.count * element_}});
      if (!outcome) return outcome;
    }
    return {};
  }

  Outcome all_reduce() const {
    auto pieces = split_pieces();
    Buffer result;
    if (Outcome outcome = ring_reduce(pieces, result); !outcome) return outcome;
    copy(op_.receive + pieces[rank_].first * element_, result.get(), pieces[rank_].count * element_);
    return ring_gather(pieces);
  }

  Outcome reduce_scatter() const {
    Buffer result;
    if (Outcome outcome = ring_reduce(equal_pieces(), result); !outcome) return outcome;
    copy(op_.receive, result.get(), bytes_);
    return {};
  }

  // Along the ring, from the one after the root to the root.
  Outcome reduce() const {
    Buffer own, sum = buffer(bytes_);
    const char* mine = contribution({0, op_.count}, own);
    if (previous() == op_.root || size_ == 1) {
      copy(sum.get(), mine, bytes_);
    } else {
      if (Outcome outcome = exchange({{previous(), false, sum.get(), bytes_}}); !outcome) return outcome;
      combine(sum.get(), mine, op_.count, op_.dtype, op_.reduction);
    }
    if (rank_ != op_.root) return exchange({{next(), true, sum.get(), bytes_}});
    finish(sum.get(), op_.count);
    copy(op_.receive, sum.get(), bytes_);
    return {};
  }

  // Along the ring, from the root to the one before it.
  Outcome broadcast() const {
    if (rank_ == op_.root) {
      copy(op_.receive, op_.send, bytes_);
    } else if (Outcome outcome = exchange({{previous(), false, op_.receive, bytes_}}); !outcome) {
      return outcome;
    }
    if (next() == op_.root) return {};
    return exchange({{next(), true, op_.receive, bytes_}});
  }

  // All-to-all, gather and scatter: each message from its source to its destination, all at once.
  Outcome direct() const {
    bool to_all = op_.kind == Kind::AlltoAll || (op_.kind == Kind::Scatter && rank_ == op_.root);
    bool from_all = op_.kind == Kind::AlltoAll || (op_.kind == Kind::Gather && rank_ == op_.root);
    auto part_to = [&](int peer) { return const_cast<char*>(op_.send) + (to_all ? peer * bytes_ : 0); };
    auto part_from = [&](int peer) { return op_.receive + (from_all ? peer * bytes_ : 0); };
    std::vector<Message> messages;
    for (int peer = 0; peer < size_; peer++) {
      bool to = to_all || (op_.kind == Kind::Gather && peer == op_.root);
      bool from = from_all || (op_.kind == Kind::Scatter && peer == op_.root);
      if (peer == rank_) {
        if (to && from) copy(part_from(peer), part_to(peer), bytes_);
        continue;
      }
      if (to) messages.push_back({peer, true, part_to(peer), bytes_});
      if (from) messages.push_back({peer, false, part_from(peer), bytes_});
    }
    return exchange(messages);
  }

  const Communicator& comm_;
  const Operation& op_;
  const int size_, rank_;
  const size_t element_, bytes_;
  Label label_;
};

Outcome run_sends_and_receives(const Communicator& communicator, const std::vector<Operation>& operations) {
  std::vector<Message> messages;
  std::vector<const Operation*> to_self, from_self;
  for (auto& op : operations) {
    if ((op.kind != Kind::Send && op.kind != Kind::Recv) || op.count == 0) continue;
    bool outgoing = op.kind == Kind::Send;
    if (op.root == communicator.rank)
      (outgoing ? to_self : from_self).push_back(&op);
    else
      messages.push_back({op.root, outgoing, outgoing ? const_cast<char*>(op.send) : op.receive,
                          op.count * size_of(op.dtype)});
  }
  for (size_t i = 0; i < to_self.size() && i < from_self.size(); i++)
    memmove(from_self[i]->receive, to_self[i]->send, from_self[i]->count * size_of(from_self[i]->dtype));
  if (messages.empty()) return {};
  // What kind of numbers they are is not compared: torch itself sends some as bytes.
  return exchange(communicator.peers, communicator.bell(), {static_cast<int32_t>(Kind::Send), 0, 0, 0, 0}, messages);
}

}  // namespace

const char* name_of(Kind kind) {
  static const char* const names[] = {"Send",   "Recv",          "AllReduce", "Broadcast", "AllGather",
                                      "Reduce", "ReduceScatter", "AlltoAll",  "Gather",    "Scatter"};
  return names[static_cast<int>(kind)];
}

Outcome run(const Communicator& communicator, const std::vector<Operation>& operations) {
  if (Outcome outcome = run_sends_and_receives(communicator, operations); !outcome) return outcome;
  for (auto& operation : operations) {
    if (operation.kind == Kind::Send || operation.kind == Kind::Recv || operation.count == 0) continue;
    if (Outcome outcome = Run(communicator, operation).run(); !outcome) return outcome;
  }
  return {};
}

}  // namespace bed::nccl
