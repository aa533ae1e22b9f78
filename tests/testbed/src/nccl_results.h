// NCCL's result codes, for the files that need nothing else of nccl.h (nccl_queries.cpp checks that they agree).
#pragma once

namespace bed::nccl {

enum Result : int {
  success = 0,
  unhandled_cuda = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7,
};

}  // namespace bed::nccl
