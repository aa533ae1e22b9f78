// The C functions that make communicators.
#include <nccl.h>

#include <algorithm>
#include <cstring>

#include "bed.h"
#include "nccl_group.h"
#include "nccl_members.h"

namespace bed::nccl {
namespace {

static_assert(sizeof(Invitation) <= sizeof(ncclUniqueId));

ncclResult_t done(const char* call, const Communicator* communicator, int result) {
  return static_cast<ncclResult_t>(traced(call, communicator, result));
}

Invitation read(const ncclUniqueId& id) {
  Invitation invitation;
  memcpy(static_cast<void*>(&invitation), id.internal, sizeof invitation);
  return invitation;
}

ncclResult_t write(Result result, const Invitation& invitation, ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  memcpy(id->internal, &invitation, sizeof invitation);
  return static_cast<ncclResult_t>(result);
}

// Of the configuration only this is modelled.
bool blocking_of(const ncclConfig_t* config, bool otherwise) {
  return config && config->blocking != NCCL_CONFIG_UNDEF_INT ? config->blocking != 0 : otherwise;
}

// Another thread may look at the user's pointer while it is set.
void publish(ncclComm_t* out, ncclComm_t handle) { __atomic_store_n(out, handle, __ATOMIC_RELEASE); }

struct New {
  int rank, size, device;
  Invitation invitation;
  bool blocking;
};

// As in NCCL the handle is there before the work is done, so that another thread can abort it.
int init(ncclComm_t* out, const New& wanted, const char* call) {
  if (!usable()) return system_error;
  if (use_context() != cudaSuccess) return unhandled_cuda;
  if (!out) return invalid_argument;
  *out = nullptr;
  if (wanted.rank < 0 || wanted.rank >= wanted.size || memcmp(wanted.invitation.magic, Invitation().magic, 8)) {
    complain(nullptr, "%s: invalid rank %d of %d, or an id that is none", call, wanted.rank, wanted.size);
    return invalid_argument;
  }
  auto communicator = std::make_shared<Communicator>(wanted.rank, wanted.size, wanted.device, wanted.blocking,
                                                     wanted.invitation.nonce);
  ncclComm_t handle = hand_out(communicator);
  publish(out, handle);
  auto work = [=]() -> int {
    Result result = make_new(*communicator, wanted.invitation);
    if (result == success) return success;
    communicator->fail(result, "init failed: a peer was lost or does something else, or it was aborted");
    if (!communicator->blocking) return result;
    // A blocking caller gets no handle to end it with. If it has ended, another thread is about to.
    if (!communicator->ended() && take_back(handle, call)) {
      communicator->end();
      publish(out, nullptr);
    }
    return result;
  };
  lifetime::Inside inside(*communicator, lifetime::init, call);
  return traced(call, communicator.get(), group::submit({communicator, work, lifetime::init}));
}

// A communicator from a parent: the pointer is set when it is ready; until then the parent is in progress.
using Make = std::function<Result(Communicator& parent, Shared* child)>;
int derive(const Shared& parent, ncclComm_t* out, const char* call, const Make& make) {
  *out = nullptr;
  auto work = [=]() -> int {
    Shared child;
    Result result = make(*parent, &child);
    if (child) publish(out, hand_out(child));
    if (result != success) {
      complain(parent.get(), "%s failed (%d)", call, result);
      if (!parent->blocking) parent->fail(result, std::string(call) + " failed");
    }
    return result;
  };
  lifetime::Inside inside(*parent, lifetime::derive, call);
  return traced(call, parent.get(), group::submit({parent, work, lifetime::derive}));
}

Shared ready_parent(ncclComm_t handle, const char* call, int* result, bool any_state = false) {
  Shared parent = usable() ? find(handle, call, result) : nullptr;
  if (!parent || any_state) return parent;
  *result = parent->state();
  if (*result == in_progress) *result = invalid_argument;
  if (*result != success) return nullptr;
  lifetime::join_job(*parent, call);
  return parent;
}

}  // namespace
}  // namespace bed::nccl

using namespace bed::nccl;

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (!id) return ncclInvalidArgument;
  if (!bed::usable()) return ncclSystemError;
  Invitation invitation;
  Result result = invite(&invitation);
  return done("ncclGetUniqueId", nullptr, write(result, invitation, id));
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return static_cast<ncclResult_t>(init(
      comm, {rank, size, bed::current_device(), read(id), blocking_of(config, true)}, "ncclCommInitRankConfig"));
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return static_cast<ncclResult_t>(
      init(comm, {rank, size, bed::current_device(), read(id), true}, "ncclCommInitRank"));
}

// All ids but the first are superfluous here: the rank of the same number sends their hosts home.
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int ids, ncclUniqueId* id,
                                      ncclConfig_t* config) {
  if (ids < 1 || !id) return ncclInvalidArgument;
  if (rank > 0 && rank < ids) cancel(read(id[rank]));
  return static_cast<ncclResult_t>(init(
      comm, {rank, size, bed::current_device(), read(id[0]), blocking_of(config, true)}, "ncclCommInitRankScalable"));
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int size, const int* devices) {
  if (!comms || size < 1) return ncclInvalidArgument;
  ncclUniqueId id;
  ncclResult_t result = ncclGetUniqueId(&id);
  if (result != ncclSuccess) return result;
  group::start();
  for (int rank = 0; rank < size; rank++) {
    int one = init(&comms[rank], {rank, size, devices ? devices[rank] : rank, read(id), true}, "ncclCommInitAll");
    group::note_error(one);
  }
  return done("ncclCommInitAll", nullptr, group::end(false));
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* child, ncclConfig_t* config) {
  const char* call = "ncclCommSplit";
  int result = ncclSystemError;
  Shared parent = ready_parent(comm, call, &result);
  if (!parent) return done(call, nullptr, result);
  if (!child || (color < 0 && color != NCCL_SPLIT_NOCOLOR)) return ncclInvalidArgument;
  Split split{{}, color, key, blocking_of(config, parent->blocking)};
  for (int rank = 0; rank < parent->size; rank++) split.ranks.push_back(rank);
  return static_cast<ncclResult_t>(derive(
      parent, child, call, [split](Communicator& from, Shared* made) { return make_split(from, split, made); }));
}

#ifdef NCCL_SHRINK_DEFAULT
ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int count, ncclComm_t* child, ncclConfig_t* config,
                            int flags) {
  const char* call = "ncclCommShrink";
  int result = ncclSystemError;
  Shared parent = ready_parent(comm, call, &result, flags & NCCL_SHRINK_ABORT);
  if (!parent) return done(call, nullptr, result);
  if (!child || !excluded || count < 1) return ncclInvalidArgument;
  Split split{{}, 0, parent->rank, blocking_of(config, parent->blocking)};
  for (int rank = 0; rank < parent->size; rank++)
    if (std::find(excluded, excluded + count, rank) == excluded + count) split.ranks.push_back(rank);
  if (std::find(split.ranks.begin(), split.ranks.end(), parent->rank) == split.ranks.end()) return ncclInvalidUsage;
  if (flags & NCCL_SHRINK_ABORT) parent->interrupt();
  return static_cast<ncclResult_t>(derive(
      parent, child, call, [split](Communicator& from, Shared* made) { return make_split(from, split, made); }));
}
#endif

ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* id) {
  int result = ncclSystemError;
  Shared parent = ready_parent(comm, "ncclCommGetUniqueId", &result);
  return parent ? ncclGetUniqueId(id) : static_cast<ncclResult_t>(result);
}

ncclResult_t ncclCommGrow(ncclComm_t comm, int size, const ncclUniqueId* id, int rank, ncclComm_t* child,
                          ncclConfig_t* config) {
  const char* call = "ncclCommGrow";
  if (!child) return ncclInvalidArgument;
  if (!comm) {
    if (!id) return ncclInvalidArgument;
    return static_cast<ncclResult_t>(
        init(child, {rank, size, bed::current_device(), read(*id), blocking_of(config, true)}, call));
  }
  int result = ncclSystemError;
  Shared parent = ready_parent(comm, call, &result);
  if (!parent) return done(call, nullptr, result);
  if (size <= parent->size || rank != -1) return ncclInvalidArgument;
  bool root = id != nullptr, blocking = blocking_of(config, parent->blocking);
  Invitation invitation = root ? read(*id) : Invitation();
  return static_cast<ncclResult_t>(derive(parent, child, call, [=](Communicator& from, Shared* made) {
    return make_grown(from, size, root ? &invitation : nullptr, blocking, made);
  }));
}

}  // extern "C"
