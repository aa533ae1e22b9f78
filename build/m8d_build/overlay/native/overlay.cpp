// Part of every overlay library, beside the patched units.
//
// An overlay holds second copies of units that stay in libtorch_cuda.so. What such a unit does once per process
// when it is loaded must not happen twice: libtorch_cuda's copy registers the handlers of the control plane, so
// the overlay's copy is compiled with other names for the function and the class (targets.toml), and ends here.
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/control_plane/Handlers.hpp>

namespace c10d::control_plane {
void m8d_already_registered(const std::string& /*name*/, HandlerFunc /*f*/) {}
} // namespace c10d::control_plane
