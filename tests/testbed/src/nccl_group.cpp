#include "nccl_group.h"

#include <nccl.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <system_error>
#include <thread>
#include <utility>

#include "bed.h"
#include "nccl_faults.h"

namespace bed::nccl::group {
namespace {

struct Batch {
  Shared communicator;
  cudaStream_t stream;
  std::vector<Operation> operations;
};

struct Group {
  int depth = 0, error = success;
  std::vector<Batch> batches;
  std::vector<Job> jobs;
};

Group& mine() {
  static thread_local Group group;
  return group;
}

const Counters names({"launches"});
const bool counter_registered = [] {
  register_counter("group_depth", [] { return static_cast<long>(mine().depth); });
  return true;
}();

int run_now(const Job& job) {
  int result = job.work();
  job.communicator->end_job();
  return result;
}

bool run_in_thread(const Job& job, std::function<void()> work, std::vector<std::thread>* threads) {
  try {
    std::thread thread(std::move(work));
    if (threads)
      threads->push_back(std::move(thread));
    else
      thread.detach();
    return true;
  } catch (const std::system_error& error) {
    complain(job.communicator.get(), "no thread: %s", error.what());
    job.communicator->end_job();
    return false;
  }
}

int run_in_background(const Job& job) {
  job.communicator->stay_busy(faults::nonblocking_ms(job.communicator->id));
  auto over = std::make_shared<std::atomic<bool>>(false);
  lifetime::non_blocking(*job.communicator, [over] { return over->load(); });
  auto work = [job, over] {
    run_now(job);
    over->store(true);
  };
  if (run_in_thread(job, work, nullptr)) return in_progress;
  over->store(true);
  return system_error;
}

// The inits of a group need each other: all at the same time.
int run_all(const std::vector<Job>& jobs) {
  if (jobs.size() == 1 && jobs[0].communicator->blocking) return run_now(jobs[0]);
  std::vector<int> results(jobs.size(), success);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < jobs.size(); i++) {
    const Job& job = jobs[i];
    if (!job.communicator->blocking)
      results[i] = run_in_background(job);
    else if (!run_in_thread(job, [&job, result = &results[i]] { *result = run_now(job); }, &threads))
      results[i] = system_error;
  }
  for (auto& thread : threads) thread.join();
  int progress = success;
  for (int result : results) {
    if (result != success && result != in_progress) return result;
    if (result == in_progress) progress = in_progress;
  }
  return progress;
}

// A kernel that is at work writes until the abort has waited for it, a peer's kernel that writes here directly, or a
// network card, until the abort has stopped them. Memory that was given back meanwhile is left alone; the caller's own
// (a test's without CUDA) is there as long as the abort lasts.
std::function<void()> scribble(uint64_t id, const std::vector<Operation>& operations) {
  std::vector<std::pair<void*, size_t>> ours, others;
  for (const Operation& each : operations)
    if (each.receive)
      (allocated_here(each.receive) ? ours : others).emplace_back(each.receive, each.count * size_of(each.dtype));
  return [id, ours, others] {
    if (!faults::abort_writes(id)) return;
    for (auto& [memory, bytes] : ours) overwrite(memory, 0xa5, bytes);
    for (auto& [memory, bytes] : others) std::memset(memory, 0xa5, bytes);
  };
}

// The first send to a peer, and the first receive from it, has a job that connects them. (In a group with no such job
// NCCL up to 2.26 launches in the caller, though the communicator is non-blocking: src/group.cc, ncclGroupEndInternal,
// ncclGroupCommPreconnectHead: v2.21.5-1, v2.22.3-1, v2.26.6-1.)
bool meets_a_peer(const Shared& communicator, const std::vector<Operation>& operations) {
  bool first = false;
  for (const Operation& each : operations)
    if (each.kind == Kind::Send || each.kind == Kind::Recv)
      first |= communicator->first_time(each.root, each.kind == Kind::Send);
  return first;
}

int launch(const Batch& batch) {
  const Shared& communicator = batch.communicator;
  if (use_context() != cudaSuccess) return unhandled_cuda;
  count("launches");
  bool breaks = launch_breaks_context();
  bool hangs = faults::launch_hangs(communicator->id);
  auto work = [communicator, hangs, operations = batch.operations]() -> Outcome {
    if (!hangs) return run(*communicator, operations);
    trace("communicator %016llx: an operation hangs, as told", static_cast<unsigned long long>(communicator->id));
    return {Outcome::ended, -1, ""};  // perform waits until it is true
  };
  uint64_t turn = communicator->issue();
  auto kernel = [communicator, turn, work, breaks, writes = scribble(communicator->id, batch.operations)] {
    if (breaks) return break_context();
    communicator->perform(turn, work, writes);
  };
  if (!enqueue(batch.stream, kernel, false)) {
    communicator->retire();
    complain(communicator.get(), "unknown stream %p", static_cast<void*>(batch.stream));
    return unhandled_cuda;
  }
  if (communicator->blocking) return success;
  communicator->stay_busy(faults::nonblocking_ms(communicator->id));
  if (meets_a_peer(communicator, batch.operations)) lifetime::non_blocking(*communicator, while_busy(communicator));
  return communicator->state();
}

void drop(const Group& group, int error) {
  auto words = "dropped with its group: " + std::to_string(error);
  for (auto& batch : group.batches)
    if (!batch.communicator->blocking) batch.communicator->fail(error, words);
  for (auto& job : group.jobs) {
    job.communicator->fail(error, words);
    job.communicator->end_job();
  }
}

}  // namespace

std::function<bool()> while_busy(const Shared& communicator) {
  return [known = std::weak_ptr<Communicator>(communicator)] {
    Shared communicator = known.lock();
    return !communicator || communicator->ended() || communicator->state() != in_progress;
  };
}

void start() { mine().depth++; }

int end(bool by_user) {
  if (mine().depth == 0) {
    complain(nullptr, "ncclGroupEnd: not in a group call.");
    return invalid_usage;
  }
  if (--mine().depth > 0) return success;
  Group group = std::exchange(mine(), Group());
  int result = group.error;
  for (auto& batch : group.batches)
    if (by_user && result == success && (result = faults::group_end_result(batch.communicator->id)) != success)
      complain(batch.communicator.get(), "ncclGroupEnd fails, as told");
  if (result != success) {
    drop(group, result);
    return result;
  }
  std::deque<lifetime::Inside> inside;
  for (auto& job : group.jobs)
    if (job.communicator->blocking) inside.emplace_back(*job.communicator, job.use, "ncclGroupEnd");
  for (auto& batch : group.batches) inside.emplace_back(*batch.communicator, lifetime::group_end, "ncclGroupEnd");
  // What one peer keeps waiting is launched with nothing else: not even what is for others.
  for (auto& batch : group.batches)
    if (result == success) result = connect(*batch.communicator, batch.operations);
  if (result != success) {
    drop(group, result);
    return result;
  }
  result = group.jobs.empty() ? success : run_all(group.jobs);
  for (auto& batch : group.batches) {
    int launched = launch(batch);
    if (result == success || (result == in_progress && launched != success)) result = launched;
    faults::hang([&] { return faults::launch_hang_ms(batch.communicator->id); });
  }
  return result;
}

void note_error(int result) {
  if (result != success && result != in_progress) mine().error = result;
}

void queue(const Shared& communicator, cudaStream_t stream, const Operation& operation) {
  for (auto& batch : mine().batches)
    if (batch.communicator == communicator && batch.stream == stream) {
      batch.operations.push_back(operation);
      return;
    }
  mine().batches.push_back({communicator, stream, {operation}});
}

int submit(Job job) {
  job.communicator->begin_job();
  if (mine().depth > 0) {
    bool blocking = job.communicator->blocking;
    mine().jobs.push_back(std::move(job));
    return blocking ? success : in_progress;
  }
  return job.communicator->blocking ? run_now(job) : run_in_background(job);
}

}  // namespace bed::nccl::group

extern "C" int m8d_bed_nccl_abandon_group() {
  using namespace bed::nccl;
  auto abandoned = std::exchange(group::mine(), group::Group());
  if (abandoned.depth > 0) group::drop(abandoned, invalid_usage);
  return abandoned.depth;
}
