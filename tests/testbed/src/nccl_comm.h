// One rank's end of a communicator: its connections, the order of its operations, its errors, its end.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "nccl_lifetime.h"
#include "nccl_connecting.h"
#include "nccl_meeting.h"
#include "nccl_results.h"
#include "nccl_sockets.h"
#include "nccl_transfer.h"

namespace bed::nccl {

struct Factor;  // of a pre-multiplied sum

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(int rank, int size, int device, bool blocking, uint64_t id);
  ~Communicator();

  const int rank, size, device;
  const bool blocking;
  uint64_t id;  // the same on every rank; of a split one it is known when it is connected

  // ---- Connections. Only for whoever has a Use or runs an operation.
  std::vector<Socket> peers;   // by rank
  std::vector<uint16_t> ports;  // where each rank listens: to split, or to shrink
  Socket listener;
  Connecting connecting;
  const Bell& bell() const { return bell_; }
  // bell: what ends the wait, this communicator's or its parent's.
  Result connect(Meeting& meeting, const std::vector<Introduction>& members, Socket listener, const Bell& bell);

  // Keeps the connections open for as long as it lives. Empty if the communicator has ended, unless `even_ended`.
  class Use {
   public:
    explicit Use(Communicator& communicator, bool even_ended = false);
    ~Use();
    Use(const Use&) = delete;
    explicit operator bool() const { return communicator_ != nullptr; }

   private:
    Communicator* communicator_ = nullptr;
  };

  // ---- Operations: numbered when they are issued, performed in that order, on whatever thread.
  uint64_t issue();
  // `writes`: what one that was begun and is ended by an abort does to its output, until that abort has returned.
  void perform(uint64_t turn, const std::function<Outcome()>& work, const std::function<void()>& writes);
  void overwrite();  // let all of those write
  void retire();  // one that was issued will never be performed
  void wait_all_done();
  long pending() const;
  void wait_ended();
  bool wait_ended_for(std::chrono::milliseconds time);  // true: it has ended

  // ---- State.
  void fail(int result, const std::string& why);  // the first error stays
  int state() const;                              // success, in_progress, or the error
  void begin_job();                               // an init, split, … under way: in_progress until end_job
  void end_job();
  void stay_busy(long ms);
  bool finalize();   // false: it was already
  bool finalized() const;
  bool connected() const;  // its peers were met
  // How many threads are inside of a use, before this one: lifetime::Inside judges them.
  using Busy = std::array<int, lifetime::uses>;
  Busy enter(lifetime::Use use);
  void leave(lifetime::Use use);
  long busy() const;  // in all uses
  // Whether the thread lives that made the last non-blocking call, in whose memory its job is: until that is joined.
  using Lives = std::shared_ptr<const std::atomic<bool>>;
  void link(Lives lives);
  Lives take_link();
  bool first_time(int peer, bool sends);

  // Ends all operations, now and later; wakes everybody.
  void end();
  bool ended() const;
  void interrupt();          // as end, but it can still be split or shrunk
  void release();            // waits for those who use the connections, and closes them

  // ---- Pre-multiplied sums.
  int add_factor(std::shared_ptr<const Factor> factor);
  std::shared_ptr<const Factor> factor(int op) const;
  bool remove_factor(int op);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Bell bell_;
  bool ended_ = false, released_ = false, finalized_ = false, connected_ = false;
  uint64_t issued_ = 0, done_ = 0;
  int users_ = 0, jobs_ = 0, error_ = success;
  Busy busy_{};
  Lives link_;
  std::set<std::pair<int, bool>> met_;
  std::chrono::steady_clock::time_point busy_until_{};
  std::mutex writing_;
  std::vector<std::function<void()>> writes_;
  std::map<int, std::shared_ptr<const Factor>> factors_;
  int next_factor_;
};
using Shared = std::shared_ptr<Communicator>;

struct Factor {
  int dtype;
  const void* device;  // read when the operation runs, or null
  char value[8];
};

// ---- What a user holds. It is never freed, so that a use after its end is recognised: lifetime::used_after.

// Sets ncclGetLastError, and says it (knob WARN). communicator may be null.
void complain(const Communicator* communicator, const char* format, ...) __attribute__((format(printf, 2, 3)));
std::string last_complaint();

}  // namespace bed::nccl

struct ncclComm {
  static constexpr uint64_t MAGIC = 0x6d38642d636f6d6d;
  const uint64_t magic = MAGIC;
  mutable std::mutex mutex;
  bed::nccl::Shared communicator;
  const char* ended_by = nullptr;
  bool freed = false;  // NCCL frees none that has not met its peers (src/init.cc, commReclaim: intraComm0)
};

namespace bed::nccl {

ncclComm* hand_out(Shared communicator);
// Null, with *result set and said why: no communicator, or one that was ended.
Shared find(const ncclComm* handle, const char* call, int* result);
// No later call finds it. False: another thread did so since it was found. `freed`: and its memory is gone.
bool take_back(ncclComm* handle, const char* call, bool freed = true);
std::vector<Shared> alive();

int traced(const char* call, const Communicator* communicator, int result);

}  // namespace bed::nccl
