#include "nccl_comm.h"

#include <cstdarg>
#include <cstdio>
#include <numeric>
#include <set>

#include "bed.h"
#include "nccl_faults.h"

namespace bed::nccl {
namespace {

const Counters names({"comms_made", "aborts"});

std::mutex& registry_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
std::set<Communicator*>& registry() {
  static auto* set = new std::set<Communicator*>;
  return *set;
}
std::string& complaint() {
  static auto* text = new std::string;
  return *text;
}

const bool counters_registered = [] {
  register_counter("comms", [] { return static_cast<long>(alive().size()); });
  register_counter("busy", [] {
    long sum = 0;
    for (auto& communicator : alive()) sum += communicator->busy();
    return sum;
  });
  register_counter("ops_pending", [] {
    long sum = 0;
    for (auto& communicator : alive()) sum += communicator->pending();
    return sum;
  });
  return true;
}();

}  // namespace

Communicator::Communicator(int rank, int size, int device, bool blocking, uint64_t id)
    : rank(rank), size(size), device(device), blocking(blocking), id(id), next_factor_(5) {}

Communicator::~Communicator() = default;

Result Communicator::connect(Meeting& meeting, const std::vector<Introduction>& members, Socket own_listener,
                             const Bell& bell) {
  Result result = meeting.connect(members, rank, own_listener, bell, &peers);
  if (result == success) {
    std::lock_guard<std::mutex> lock(mutex_);
    connected_ = true;
  }
  if (result == success) result = meeting.confirm(bell);
  for (auto& member : members) ports.push_back(member.port);
  listener = std::move(own_listener);
  return result;
}

Communicator::Use::Use(Communicator& communicator, bool even_ended) {
  std::lock_guard<std::mutex> lock(communicator.mutex_);
  if (communicator.released_ || (communicator.ended_ && !even_ended)) return;
  communicator.users_++;
  communicator_ = &communicator;
}

Communicator::Use::~Use() {
  if (!communicator_) return;
  std::lock_guard<std::mutex> lock(communicator_->mutex_);
  communicator_->users_--;
  communicator_->changed_.notify_all();
}

uint64_t Communicator::issue() {
  std::lock_guard<std::mutex> lock(mutex_);
  return issued_++;
}

void Communicator::perform(uint64_t turn, const std::function<Outcome()>& work, const std::function<void()>& writes) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_ == turn || ended_; });
  }
  if (Use use(*this); use) {
    Outcome outcome = work();
    if (outcome.what == Outcome::lost) {
      long delay = faults::detect_delay_ms(id);
      if (!faults::death_unseen(id) && !(delay && wait_ended_for(std::chrono::milliseconds(delay))))
        fail(faults::remote_result(id), "socketProgress: Connection closed by remote peer rank " +
                                            std::to_string(outcome.peer));
    } else if (outcome.what == Outcome::mismatched) {
      fail(invalid_usage, "mismatch with rank " + std::to_string(outcome.peer) + ": " + outcome.detail);
    }
    // Like a kernel whose peer does not answer: it spins until the communicator is aborted.
    if (!outcome) {
      {
        std::lock_guard<std::mutex> lock(writing_);
        writes_.push_back(writes);
      }
      wait_ended();
      writes();
    }
  }
  retire();
}

void Communicator::overwrite() {
  std::lock_guard<std::mutex> lock(writing_);
  for (auto& write : writes_) write();
}

void Communicator::retire() {
  std::lock_guard<std::mutex> lock(mutex_);
  done_++;
  changed_.notify_all();
}

void Communicator::wait_all_done() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return done_ == issued_ || ended_; });
}

long Communicator::pending() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<long>(issued_ - done_);
}

void Communicator::wait_ended() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return ended_; });
}

bool Communicator::wait_ended_for(std::chrono::milliseconds time) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, time, [&] { return ended_; });
}

void Communicator::fail(int result, const std::string& why) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_ != success) return;
  }
  complain(this, "%s", why.c_str());  // first, so that who sees the error finds the message
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_ == success) error_ = result;
}

int Communicator::state() const {
  int injected = faults::async_error(id);
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_ != success) return error_;
  if (injected != success) return injected;
  bool finishing = finalized_ && !blocking && done_ != issued_ && !ended_;
  bool busy = jobs_ > 0 || finishing || std::chrono::steady_clock::now() < busy_until_;
  return busy ? in_progress : success;
}

void Communicator::begin_job() {
  std::lock_guard<std::mutex> lock(mutex_);
  jobs_++;
}

void Communicator::end_job() {
  std::lock_guard<std::mutex> lock(mutex_);
  jobs_--;
}

void Communicator::stay_busy(long ms) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (ms > 0) busy_until_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
}

bool Communicator::finalize() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !std::exchange(finalized_, true);
}

bool Communicator::finalized() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return finalized_;
}

Communicator::Busy Communicator::enter(lifetime::Use use) {
  std::lock_guard<std::mutex> lock(mutex_);
  Busy before = busy_;
  busy_[use]++;
  return before;
}

void Communicator::leave(lifetime::Use use) {
  std::lock_guard<std::mutex> lock(mutex_);
  busy_[use]--;
}

long Communicator::busy() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::accumulate(busy_.begin(), busy_.end(), 0L);
}

void Communicator::link(Lives lives) {
  std::lock_guard<std::mutex> lock(mutex_);
  link_ = std::move(lives);
}

Communicator::Lives Communicator::take_link() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(link_, nullptr);
}

bool Communicator::first_time(int peer, bool sends) {
  std::lock_guard<std::mutex> lock(mutex_);
  return met_.emplace(peer, sends).second;
}

bool Communicator::connected() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return connected_;
}

void Communicator::end() {
  std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  bell_.ring();
  changed_.notify_all();
}

bool Communicator::ended() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return ended_;
}

void Communicator::interrupt() {
  end();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return users_ == 0; });
  bell_ = Bell();  // silent again: a split waits with it
}

void Communicator::release() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return users_ == 0; });
  released_ = true;
  peers.clear();
  listener = Socket();
}

int Communicator::add_factor(std::shared_ptr<const Factor> factor) {
  std::lock_guard<std::mutex> lock(mutex_);
  factors_[next_factor_] = std::move(factor);
  return next_factor_++;
}

std::shared_ptr<const Factor> Communicator::factor(int op) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = factors_.find(op);
  return found == factors_.end() ? nullptr : found->second;
}

bool Communicator::remove_factor(int op) {
  std::lock_guard<std::mutex> lock(mutex_);
  return factors_.erase(op) > 0;
}

void complain(const Communicator* communicator, const char* format, ...) {
  char text[600];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  {
    std::lock_guard<std::mutex> lock(registry_mutex());
    complaint() = text;
  }
  if (!knob_number("WARN", 1)) return;
  if (communicator)
    say("NCCL communicator %016llx rank %d: %s", static_cast<unsigned long long>(communicator->id),
        communicator->rank, text);
  else
    say("NCCL: %s", text);
}

std::string last_complaint() {
  std::lock_guard<std::mutex> lock(registry_mutex());
  return complaint();
}

ncclComm* hand_out(Shared communicator) {
  count("comms_made");
  {
    std::lock_guard<std::mutex> lock(registry_mutex());
    registry().insert(communicator.get());
  }
  auto* handle = new ncclComm;
  handle->communicator = std::move(communicator);
  return handle;
}

Shared find(const ncclComm* handle, const char* call, int* result) {
  *result = invalid_argument;
  if (!handle || handle->magic != ncclComm::MAGIC) {
    complain(nullptr, "%s: %p is no communicator", call, static_cast<const void*>(handle));
    return nullptr;
  }
  std::lock_guard<std::mutex> lock(handle->mutex);
  if (handle->ended_by) {
    if (handle->freed)
      lifetime::used_after(handle, call, handle->ended_by);
    else
      complain(nullptr, "%s: %p was ended by %s", call, static_cast<const void*>(handle), handle->ended_by);
    return nullptr;
  }
  *result = success;
  return handle->communicator;
}

bool take_back(ncclComm* handle, const char* call, bool freed) {
  Shared communicator;
  {
    std::lock_guard<std::mutex> lock(handle->mutex);
    if (handle->ended_by) return false;
    handle->ended_by = call;
    communicator = std::move(handle->communicator);
    handle->freed = freed && communicator->connected();
  }
  std::lock_guard<std::mutex> lock(registry_mutex());
  registry().erase(communicator.get());
  return true;
}

std::vector<Shared> alive() {
  std::lock_guard<std::mutex> lock(registry_mutex());
  std::vector<Shared> all;
  for (auto* communicator : registry())
    if (auto shared = communicator->weak_from_this().lock()) all.push_back(std::move(shared));
  return all;
}

int traced(const char* call, const Communicator* communicator, int result) {
  trace("%s(%016llx) -> %d", call, static_cast<unsigned long long>(communicator ? communicator->id : 0), result);
  return result;
}

}  // namespace bed::nccl
