// The C functions that ask, name and register.
#include <nccl.h>

#include <cstdio>
#include <string>

#include "bed.h"
#include "nccl_comm.h"
#include "nccl_reduce.h"

namespace bed::nccl {
namespace {

constexpr bool same(int ours, int nccls) { return ours == nccls; }
static_assert(same(success, ncclSuccess) && same(unhandled_cuda, ncclUnhandledCudaError));
static_assert(same(system_error, ncclSystemError) && same(internal_error, ncclInternalError));
static_assert(same(invalid_argument, ncclInvalidArgument) && same(invalid_usage, ncclInvalidUsage));
static_assert(same(remote_error, ncclRemoteError) && same(in_progress, ncclInProgress));
static_assert(static_cast<int>(Dtype::float64) == ncclFloat64 && static_cast<int>(Reduction::avg) == ncclAvg);
static_assert(static_cast<int>(Reduction::premul) == ncclNumOps);

template <class Value>
ncclResult_t ask(const ncclComm* comm, const char* call, Value* out, Value (*answer)(const Communicator&),
                 bool joins = true) {
  int result;
  Shared communicator = find(comm, call, &result);
  if (!communicator) return static_cast<ncclResult_t>(traced(call, nullptr, result));
  if (joins) lifetime::join_job(*communicator, call);
  if (!out) return ncclInvalidArgument;
  *out = answer(*communicator);
  return ncclSuccess;
}

}  // namespace
}  // namespace bed::nccl

using namespace bed::nccl;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  if (!version) return ncclInvalidArgument;
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t) {
  static thread_local std::string text;
  text = last_complaint();
  return text.c_str();
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  return ask<ncclResult_t>(comm, "ncclCommGetAsyncError", error,
                           [](const Communicator& one) { return static_cast<ncclResult_t>(one.state()); },
                           /*joins=*/false);
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return ask<int>(comm, "ncclCommCount", count, [](const Communicator& one) { return one.size; });
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return ask<int>(comm, "ncclCommUserRank", rank, [](const Communicator& one) { return one.rank; });
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return ask<int>(comm, "ncclCommCuDevice", device, [](const Communicator& one) { return one.device; });
}

ncclResult_t ncclMemAlloc(void** pointer, size_t size) {
  return bed::device_allocate(pointer, size) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void* pointer) {
  return bed::device_release(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

// Registration makes nothing faster here: a handle is the address.
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* data, size_t, void** handle) {
  int result;
  if (find(comm, "ncclCommRegister", &result)) *handle = data;
  return static_cast<ncclResult_t>(result);
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void*) {
  int result;
  find(comm, "ncclCommDeregister", &result);
  return static_cast<ncclResult_t>(result);
}

#ifdef NCCL_WIN_DEFAULT
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* data, size_t, ncclWindow_t* window, int) {
  int result;
  if (find(comm, "ncclCommWindowRegister", &result)) *window = reinterpret_cast<ncclWindow_t>(data);
  return static_cast<ncclResult_t>(result);
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t) {
  int result;
  find(comm, "ncclCommWindowDeregister", &result);
  return static_cast<ncclResult_t>(result);
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void** pointer) {
  int result;
  if (find(comm, "ncclWinGetUserPtr", &result)) *pointer = reinterpret_cast<void*>(window);
  return static_cast<ncclResult_t>(result);
}
#endif

// For tests: one line "id rank size device state pending" for each living communicator of this process. Returns how
// many there are, or -1 if they do not fit.
int m8d_bed_nccl_communicators(char* out, int size) {
  std::string text;
  auto all = alive();
  for (auto& one : all) {
    char line[120];
    snprintf(line, sizeof line, "%016llx %d %d %d %d %ld\n", static_cast<unsigned long long>(one->id), one->rank,
             one->size, one->device, one->state(), one->pending());
    text += line;
  }
  if (snprintf(out, size, "%s", text.c_str()) >= size) return -1;
  return static_cast<int>(all.size());
}

}  // extern "C"
