// nccl.h includes <cuda_fp16.h>, but uses nothing of it in C++ host code; the double has its own half arithmetic.
#pragma once
