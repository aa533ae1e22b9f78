// nccl.h includes <cuda_fp8.h>, but uses nothing of it in C++ host code; the double has its own 8-bit float arithmetic.
#pragma once
