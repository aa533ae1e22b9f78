// Arithmetic on NCCL's data types.
#pragma once

#include <cstddef>

namespace bed::nccl {

// The numbers of ncclDataType_t; the last three are not in every version of nccl.h.
enum class Dtype : int {
  int8 = 0,
  uint8 = 1,
  int32 = 2,
  uint32 = 3,
  int64 = 4,
  uint64 = 5,
  float16 = 6,
  float32 = 7,
  float64 = 8,
  bfloat16 = 9,
  float8e4m3 = 10,
  float8e5m2 = 11,
};

// The numbers of ncclRedOp_t; higher ones are pre-multiplied sums.
enum class Reduction : int { sum = 0, prod = 1, max = 2, min = 3, avg = 4, premul = 5 };

size_t size_of(Dtype dtype);  // 0: no such type

void combine(char* into, const char* from, size_t count, Dtype dtype, Reduction reduction);  // into = into ∘ from
void scale(char* data, size_t count, Dtype dtype, const void* factor);                       // factor: one element
void divide(char* data, size_t count, Dtype dtype, int divisor);

}  // namespace bed::nccl
