// nccl.h includes <cuda_runtime.h> for the runtime's types; the C++ templates and device code of the real one need
// crt/, which the wheels do not carry.
#pragma once
#include <cuda_runtime_api.h>
