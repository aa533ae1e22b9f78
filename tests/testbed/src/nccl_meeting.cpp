#include "nccl_meeting.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <system_error>
#include <thread>

#include "bed.h"

namespace bed::nccl {
namespace {

const Counters names({"introduced"});

struct Verdict {
  int32_t result = success, count = 0;
};

Result result_of(Io io) { return io == Io::done ? success : io == Io::ended ? internal_error : remote_error; }

struct Guest {
  Socket socket;
  Introduction introduction;
  bool ready = false;
};

class Host {
 public:
  Host(const Socket& listener, int size, const std::vector<int>& absentees, const Bell& bell)
      : listener_(listener), size_(size), absentees_(absentees), bell_(bell) {}

  void run() {
    Result result = gather();
    tell_all(result);
    if (result == success) tell_all(wait_ready());
  }

 private:
  enum class Waited { newcomer, word, loss, bell };

  // Guests say nothing until they are ready: `word` in *who is the index of one that does, or that has left.
  Waited wait(bool gathering, size_t* who) {
    std::vector<pollfd> fds{{bell_.fd(), POLLIN, 0}, {gathering ? listener_.fd() : -1, POLLIN, 0}};
    for (auto& guest : guests_)
      fds.push_back({guest.ready ? -1 : guest.socket.fd(), static_cast<short>(POLLIN | POLLRDHUP), 0});
    if (gathering)
      for (int fd : absentees_) fds.push_back({fd, POLLRDHUP, 0});
    while (poll(fds.data(), fds.size(), -1) < 0 && errno == EINTR) {
    }
    if (fds[0].revents) return Waited::bell;
    for (size_t i = 0; i < guests_.size(); i++)
      if (fds[2 + i].revents) {
        *who = i;
        return Waited::word;
      }
    return fds[1].revents ? Waited::newcomer : Waited::loss;
  }

  Result gather() {
    while (size_ == 0 || static_cast<int>(guests_.size()) < size_) {
      size_t who = 0;
      Waited waited = wait(true, &who);
      if (waited == Waited::bell) return internal_error;
      if (waited != Waited::newcomer) return remote_error;
      Guest guest;
      Result result = result_of(accept_local(listener_, Socket(), bell_, &guest.socket));
      if (result == success)
        result = result_of(receive(guest.socket, &guest.introduction, sizeof guest.introduction, bell_));
      if (result != success) return result;
      if (guest.introduction.magic != Introduction().magic) continue;  // a stranger
      if (size_ == 0) size_ = guest.introduction.size;
      if (size_ == 0) return success;  // the invitation was cancelled
      bool fits = guest.introduction.size == size_;
      for (auto& other : guests_) fits = fits && other.introduction.rank != guest.introduction.rank;
      guests_.push_back(std::move(guest));
      if (!fits) return invalid_argument;
    }
    std::sort(guests_.begin(), guests_.end(),
              [](auto& a, auto& b) { return a.introduction.rank < b.introduction.rank; });
    return success;
  }

  Result wait_ready() {
    for (size_t ready = 0; ready < guests_.size(); ready++) {
      size_t who = 0;
      if (wait(false, &who) != Waited::word) return internal_error;
      char word;
      Result result = result_of(receive(guests_[who].socket, &word, sizeof word, bell_));
      if (result != success) return result;
      guests_[who].ready = true;
    }
    return success;
  }

  // Who does not hear it has left, and learns it in another way.
  void tell_all(Result result) {
    Verdict verdict{result, result == success && !told_ ? static_cast<int32_t>(guests_.size()) : 0};
    std::vector<Introduction> table;
    for (auto& guest : guests_) table.push_back(guest.introduction);
    for (auto& guest : guests_) {
      transmit(guest.socket, &verdict, sizeof verdict, silent_);
      if (verdict.count) transmit(guest.socket, table.data(), table.size() * sizeof table[0], silent_);
    }
    told_ = true;
  }

  const Socket& listener_;
  int size_;
  const std::vector<int>& absentees_;
  const Bell& bell_;
  const Bell silent_;
  bool told_ = false;
  std::vector<Guest> guests_;
};

}  // namespace

uint64_t random_number() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

void host_meeting(const Socket& listener, int size, const std::vector<int>& absentees, const Bell& bell) {
  Host(listener, size, absentees, bell).run();
}

Result invite(Invitation* invitation) {
  *invitation = Invitation();
  invitation->nonce = random_number();
  Socket listener = listen_local(&invitation->port);
  if (!listener) return system_error;
  try {
    std::thread([listener = std::move(listener)] { host_meeting(listener, 0, {}, Bell()); }).detach();
  } catch (const std::system_error&) {
    return system_error;
  }
  return success;
}

void cancel(const Invitation& invitation) {
  Introduction nobody;
  if (Socket host = dial_local(invitation.port)) transmit(host, &nobody, sizeof nobody, Bell());
}

Result Meeting::join(uint16_t host, const Introduction& me, const Bell& bell) {
  host_ = dial_local(host);
  if (!host_) return remote_error;
  Result result = result_of(transmit(host_, &me, sizeof me, bell));
  count("introduced");
  Verdict verdict;
  if (result == success) result = result_of(receive(host_, &verdict, sizeof verdict, bell));
  if (result == success) result = static_cast<Result>(verdict.result);
  if (result != success) return result;
  table_.resize(verdict.count);
  return result_of(receive(host_, table_.data(), table_.size() * sizeof table_[0], bell));
}

Result Meeting::connect(const std::vector<Introduction>& members, int me, const Socket& listener, const Bell& bell,
                        std::vector<Socket>* peers) {
  *peers = std::vector<Socket>(members.size());
  for (int32_t i = 0; i < me; i++) {
    Socket peer = dial_local(members[i].port);
    if (!peer) return remote_error;
    Result result = result_of(transmit(peer, &me, sizeof me, bell));
    if (result != success) return result;
    (*peers)[i] = std::move(peer);
  }
  for (size_t missing = members.size() - me - 1; missing > 0;) {
    Socket peer;
    int32_t who = -1;
    Io io = accept_local(listener, host_, bell, &peer);
    if (io == Io::closed) return refusal(bell);
    if (io == Io::done) io = receive(peer, &who, sizeof who, bell);
    if (io == Io::ended) return internal_error;
    if (io == Io::closed) continue;  // a stranger, or a peer that died: the host will tell
    if (who <= me || who >= static_cast<int>(members.size()) || (*peers)[who]) continue;
    (*peers)[who] = std::move(peer);
    missing--;
  }
  return success;
}

Result Meeting::confirm(const Bell& bell) {
  char word = 'r';
  Result result = result_of(transmit(host_, &word, sizeof word, bell));
  return result == success ? refusal(bell) : result;
}

// Not always one: the host's last word is also that all are ready.
Result Meeting::refusal(const Bell& bell) {
  Verdict verdict;
  Result result = result_of(receive(host_, &verdict, sizeof verdict, bell));
  return result == success ? static_cast<Result>(verdict.result) : result;
}

}  // namespace bed::nccl
