#include "nccl_members.h"

#include <algorithm>
#include <thread>

#include "nccl_faults.h"

namespace bed::nccl {
namespace {

// A meeting of ranks that know each other already.
class Reunion {
 public:
  Reunion(Communicator& parent, const std::vector<int>& ranks) : parent_(parent), ranks_(ranks) {}
  ~Reunion() {
    if (host_.joinable()) host_.join();
  }

  Result join(Introduction me, Meeting* meeting) {
    me.rank = parent_.rank;
    me.size = static_cast<int32_t>(ranks_.size());
    if (parent_.rank == ranks_.front()) {
      for (int rank : ranks_)
        if (rank != parent_.rank && !faults::death_unseen(parent_.id)) absentees_.push_back(parent_.peers[rank].fd());
      host_ = std::thread([this] {
        host_meeting(parent_.listener, static_cast<int>(ranks_.size()), absentees_, parent_.bell());
      });
    }
    return meeting->join(parent_.ports[ranks_.front()], me, parent_.bell());
  }

 private:
  Communicator& parent_;
  const std::vector<int>& ranks_;
  std::vector<int> absentees_;
  std::thread host_;
};

int position(const std::vector<Introduction>& members, int rank) {
  int at = 0;
  while (members[at].rank != rank) at++;
  return at;
}

uint64_t child_id(uint64_t nonce, int color) {
  return nonce ^ 0x9e3779b97f4a7c15 * (static_cast<uint64_t>(color) + 1);
}

}  // namespace

Result suffer(Communicator& communicator, uint64_t id) {
  if (long ms = faults::init_hang_ms(id)) {
    complain(&communicator, "init hangs for %ld ms, as told", ms);
    auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
    while (std::chrono::steady_clock::now() < end && faults::init_hang_ms(id) == ms)
      if (communicator.wait_ended_for(std::chrono::milliseconds(std::min(ms, 5L)))) return internal_error;
  }
  int result = faults::init_result(id);
  if (result != success) complain(&communicator, "init fails, as told");
  return static_cast<Result>(result);
}

Result make_new(Communicator& communicator, const Invitation& invitation) {
  Communicator::Use use(communicator);
  if (!use) return internal_error;
  Result result = suffer(communicator, communicator.id);
  if (result != success) return result;
  Introduction me;
  me.rank = communicator.rank;
  me.size = communicator.size;
  Socket listener = listen_local(&me.port);
  if (!listener) return system_error;
  Meeting meeting;
  result = meeting.join(invitation.port, me, communicator.bell());
  if (result != success) return result;
  return communicator.connect(meeting, meeting.table(), std::move(listener), communicator.bell());
}

Result make_split(Communicator& parent, const Split& split, Shared* child) {
  Communicator::Use use(parent, true);
  if (!use) return internal_error;
  Result result = suffer(parent, parent.id);
  if (result != success) return result;
  Introduction me;
  me.nonce = random_number();
  me.color = split.color;
  me.key = split.key;
  Socket listener = listen_local(&me.port);
  if (!listener) return system_error;
  Reunion reunion(parent, split.ranks);
  Meeting meeting;
  result = reunion.join(me, &meeting);
  if (result != success) return result;
  if (split.color < 0) return meeting.confirm(parent.bell());
  std::vector<Introduction> members;
  for (auto& one : meeting.table())
    if (one.color == split.color) members.push_back(one);
  std::stable_sort(members.begin(), members.end(), [](auto& a, auto& b) { return a.key < b.key; });
  auto made = std::make_shared<Communicator>(position(members, parent.rank), static_cast<int>(members.size()),
                                             parent.device, split.blocking,
                                             child_id(meeting.table().front().nonce, split.color));
  result = made->connect(meeting, members, std::move(listener), parent.bell());
  if (result == success) *child = std::move(made);
  return result;
}

Result make_grown(Communicator& parent, int size, const Invitation* invitation, bool blocking, Shared* child) {
  Communicator::Use use(parent, true);
  if (!use) return internal_error;
  std::vector<int> ranks(parent.size);
  for (int rank = 0; rank < parent.size; rank++) ranks[rank] = rank;
  Introduction me;
  me.color = invitation != nullptr;
  me.nonce = invitation ? invitation->nonce : 0;
  me.port = invitation ? invitation->port : 0;
  Invitation learned;
  {
    Reunion reunion(parent, ranks);
    Meeting meeting;
    Result result = reunion.join(me, &meeting);
    if (result == success) result = meeting.confirm(parent.bell());
    if (result != success) return result;
    int roots = 0;
    for (auto& one : meeting.table()) {
      roots += one.color;
      if (one.color) learned.nonce = one.nonce, learned.port = one.port;
    }
    if (roots != 1) return invalid_argument;
  }
  auto made = std::make_shared<Communicator>(parent.rank, size, parent.device, blocking, learned.nonce);
  Result result = make_new(*made, learned);
  if (result == success) *child = std::move(made);
  return result;
}

}  // namespace bed::nccl
