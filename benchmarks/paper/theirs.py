"""Figures that pymultiworld's authors measured themselves, and published in their repository.

Seconds for 100,000 messages of float32 from one sender to one leader, over torch as it is ("single") and in a
world ("multi"), on gloo and NCCL, within a host and between two. From github.com/cisco-open/pymultiworld,
commit c4a2e0433cae of 2024-03-31, examples/experiments/varying_tensor_sizes (removed later). The
paper is of 2024-07-12.
"""

from __future__ import annotations

MESSAGES = 100_000
ELEMENTS = (1, 3, 9, 27, 81, 243, 729, 2187, 6561, 19683, 59049, 177147)
SECONDS: dict[tuple[str, str], dict[str, tuple[float, ...]]] = {
    ("gloo", "one host"): {
        "single": (9.338, 9.333, 9.168, 9.351, 9.302, 9.350, 9.308, 9.588, 9.711, 11.615, 14.116, 22.195),
        "multi": (9.355, 9.623, 9.422, 9.494, 9.400, 9.218, 10.971, 9.743, 9.752, 12.490, 14.482, 21.845),
    },
    ("gloo", "two hosts"): {
        "single": (
            19.181, 20.000, 20.294, 20.223, 19.578, 19.096, 20.828, 23.107, 24.734, 30.371, 46.385, 114.140
        ),
        "multi": (
            20.863, 20.505, 19.784, 19.264, 19.417, 20.356, 19.428, 20.611, 25.382, 28.931, 45.348, 114.200
        ),
    },
    ("NCCL", "one host"): {
        "single": (7.570, 7.608, 7.662, 7.578, 7.673, 7.738, 8.052, 7.353, 7.746, 7.508, 8.011, 7.272),
        "multi": (7.578, 8.250, 7.547, 7.637, 7.999, 7.597, 7.691, 8.020, 7.425, 7.563, 8.243, 7.549),
    },
    ("NCCL", "two hosts"): {
        "single": (9.682, 9.628, 10.066, 9.727, 9.788, 9.821, 9.346, 9.552, 8.459, 8.963, 18.323, 47.763),
        "multi": (9.692, 9.538, 10.660, 9.540, 9.415, 10.029, 11.762, 9.805, 9.326, 9.342, 18.206, 47.752),
    },
}  # fmt: skip


def mb_per_s(elements: int, seconds: float) -> float:
    """Megabytes (10^6) a second."""
    return MESSAGES * 4 * elements / seconds / 1e6


def lost(single: float, multi: float) -> float:
    """Percent of throughput that the world costs; less than 0: it gains."""
    return 100 * (1 - single / multi)
