// Stream capture (CUDA graphs): nobody captures, and who wants to is refused.
#include <utility>

#include "runtime.h"

using namespace bed;

namespace {

cudaError_t refuse(const char* name) {
  say("%s: CUDA graphs (stream capture) are not modelled", name);
  return fail(cudaErrorStreamCaptureUnsupported);
}

cudaError_t not_capturing(cudaStreamCaptureStatus* status, unsigned long long* id) {
  M8D_ENTER();
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  M8D_ENTER();
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  M8D_ENTER();
  static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(current, *mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return refuse(__func__); }
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) { return refuse(__func__); }

// The same question has three signatures: one per generation of the ABI, told apart by the symbol's suffix.
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  return not_capturing(status, id);
}
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                        cudaGraph_t*, const cudaGraphNode_t**, size_t*) {
  return not_capturing(status, id);
}
cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                        cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  return not_capturing(status, id);
}
#endif
}
