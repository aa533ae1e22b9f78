// The kernels that are done on the host, by name.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

namespace bed {

// The work of a launch, with its arguments copied; empty: not modelled.
std::function<void()> modelled(const std::string& name, dim3 grid, void** arguments);

}  // namespace bed
