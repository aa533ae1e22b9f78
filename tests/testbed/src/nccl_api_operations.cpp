// The C functions that queue operations.
#include <nccl.h>

#include "bed.h"
#include "nccl_collectives.h"
#include "nccl_faults.h"
#include "nccl_group.h"

namespace bed::nccl {
namespace {

const Counters names({"enqueues"});

struct Call {
  Kind kind;
  const void* send;
  void* receive;
  size_t count;
  ncclDataType_t dtype;
  int reduction, root;
  cudaStream_t stream;
};

int check_state(const Communicator& communicator) {
  if (communicator.ended()) {
    complain(&communicator, "an operation on a communicator that was aborted or revoked");
    return invalid_usage;
  }
  if (communicator.finalized()) {
    complain(&communicator, "an operation after ncclCommFinalize");
    return invalid_usage;
  }
  int state = communicator.state();
  if (state == success) return success;
  complain(&communicator, "Attempt to use communicator before the previous operation returned ncclSuccess");
  return state == in_progress ? invalid_argument : state;
}

int check_arguments(const Communicator& communicator, const Call& call, Operation* operation) {
  *operation = {call.kind,      static_cast<const char*>(call.send), static_cast<char*>(call.receive),
                call.count,     static_cast<Dtype>(call.dtype),      static_cast<Reduction>(call.reduction),
                call.root,      nullptr};
  const char* wrong = nullptr;
  if (call.root < 0 || call.root >= communicator.size) wrong = "root or peer";
  if (!size_of(operation->dtype)) wrong = "data type";
  if (call.reduction >= static_cast<int>(Reduction::premul)) {
    operation->factor = communicator.factor(call.reduction);
    operation->reduction = Reduction::premul;
    if (!operation->factor || operation->factor->dtype != call.dtype) wrong = "reduction (not made here)";
  } else if (call.reduction < 0) {
    wrong = "reduction";
  }
  if (!wrong) return success;
  complain(&communicator, "%s: invalid %s", name_of(call.kind), wrong);
  return invalid_argument;
}

int admit(const Shared& communicator, const Call& call) {
  lifetime::join_job(*communicator, name_of(call.kind));
  int result = check_state(*communicator);
  Operation operation;
  if (result == success) result = check_arguments(*communicator, call, &operation);
  if (result == success && capturing(call.stream)) result = invalid_usage;
  if (result == success && (result = faults::enqueue_result(communicator->id, name_of(call.kind))) != success)
    complain(communicator.get(), "nccl%s fails, as told", name_of(call.kind));
  if (result == success) group::queue(communicator, call.stream, operation);
  return result;
}

ncclResult_t submit(ncclComm_t handle, const Call& call) {
  if (!usable()) return ncclSystemError;
  count("enqueues");
  std::string name = std::string("nccl") + name_of(call.kind);
  group::start();
  int result;
  Shared communicator = find(handle, name.c_str(), &result);
  if (communicator) result = admit(communicator, call);
  group::note_error(result);
  if (communicator && !communicator->blocking && result != success) communicator->fail(result, name + " failed");
  int ended = group::end(false);
  if (result == success) result = ended;
  if (result == success && communicator && !communicator->blocking) result = communicator->state();
  trace("%s: %zu elements of type %d, root or peer %d", name.c_str(), call.count, call.dtype, call.root);
  return static_cast<ncclResult_t>(traced(name.c_str(), communicator.get(), result));
}

}  // namespace
}  // namespace bed::nccl

using bed::nccl::Kind;
using bed::nccl::submit;

extern "C" {

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return submit(comm, {Kind::Send, send, nullptr, count, dtype, 0, peer, stream});
}

ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return submit(comm, {Kind::Recv, nullptr, receive, count, dtype, 0, peer, stream});
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, {Kind::AllReduce, send, receive, count, dtype, op, 0, stream});
}

ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, {Kind::Reduce, send, receive, count, dtype, op, root, stream});
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t dtype, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, {Kind::Broadcast, send, receive, count, dtype, 0, root, stream});
}

ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return submit(comm, {Kind::Broadcast, data, data, count, dtype, 0, root, stream});
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                           cudaStream_t stream) {
  return submit(comm, {Kind::AllGather, send, receive, count, dtype, 0, 0, stream});
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, {Kind::ReduceScatter, send, receive, count, dtype, op, 0, stream});
}

// The next three came with NCCL 2.28; a torch that was built for an older one does not call them.
ncclResult_t ncclAlltoAll(const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                          cudaStream_t stream) {
  return submit(comm, {Kind::AlltoAll, send, receive, count, dtype, 0, 0, stream});
}

ncclResult_t ncclGather(const void* send, void* receive, size_t count, ncclDataType_t dtype, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, {Kind::Gather, send, receive, count, dtype, 0, root, stream});
}

ncclResult_t ncclScatter(const void* send, void* receive, size_t count, ncclDataType_t dtype, int root,
                         ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, {Kind::Scatter, send, receive, count, dtype, 0, root, stream});
}

ncclResult_t ncclGroupStart() {
  if (!bed::usable()) return ncclSystemError;
  bed::nccl::group::start();
  return static_cast<ncclResult_t>(bed::nccl::traced("ncclGroupStart", nullptr, ncclSuccess));
}

ncclResult_t ncclGroupEnd() {
  if (!bed::usable()) return ncclSystemError;
  return static_cast<ncclResult_t>(bed::nccl::traced("ncclGroupEnd", nullptr, bed::nccl::group::end(true)));
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t dtype,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  using namespace bed::nccl;
  int result;
  Shared communicator = find(comm, "ncclRedOpCreatePreMulSum", &result);
  if (!communicator) return static_cast<ncclResult_t>(result);
  lifetime::join_job(*communicator, "ncclRedOpCreatePreMulSum");
  size_t size = size_of(static_cast<Dtype>(dtype));
  if (!op || !scalar || !size) return ncclInvalidArgument;
  auto factor = std::make_shared<Factor>();
  factor->dtype = dtype;
  factor->device = residence == ncclScalarDevice ? scalar : nullptr;
  if (!factor->device) std::copy_n(static_cast<const char*>(scalar), size, factor->value);
  *op = static_cast<ncclRedOp_t>(communicator->add_factor(std::move(factor)));
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  int result;
  auto communicator = bed::nccl::find(comm, "ncclRedOpDestroy", &result);
  if (!communicator) return static_cast<ncclResult_t>(result);
  return communicator->remove_factor(op) ? ncclSuccess : ncclInvalidArgument;
}

}  // extern "C"
