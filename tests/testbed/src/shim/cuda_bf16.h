// nccl.h includes <cuda_bf16.h>, but uses nothing of it in C++ host code; the double has its own bfloat16 arithmetic.
#pragma once
