"""The double's CUDA half, called without torch (rawcuda.py) and by torch (programs/device.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import rawcuda


def check(library, name, **environment):
    """Run one check in a process of its own; return what it wrote to stderr."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("M8D_BED_")}
    ended = subprocess.run(
        [sys.executable, rawcuda.__file__, library, name],
        env={**clean, **environment, "PYTHONPATH": str(Path(rawcuda.__file__).parent)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


@pytest.mark.parametrize("name", [each.__name__ for each in rawcuda.CHECKS])
def test_the_runtime(library, name):
    said = check(library, name)
    if name == "a_stub_says_its_name":
        assert said.count("STUB cudaIpcGetMemHandle\n") == 2
        assert "STUB cuMemCreate\n" in said
    elif name == "a_capture_is_refused":
        assert "CUDA graphs (stream capture) are not modelled" in said
    elif name == "a_fork_after_use_has_lost_the_device":
        assert "forked from one that had used the device" in said
    else:
        assert said == ""


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("M8D_BED_ABORT_HANGS", "1", "a knob that does not exist: M8D_BED_ABORT_HANGS."),
        ("M8D_BED_MEM_MB", "much", "M8D_BED_MEM_MB is 'much'; it takes a whole number."),
        ("M8D_BED_KERNELS", "maybe", "M8D_BED_KERNELS is 'maybe'; it takes |error|ignore|."),
    ],
)
def test_an_environment_that_is_wrong(library, name, value, message):
    said = check(library, "the_environment_is_wrong", **{name: value})
    assert message in said
    assert said.count("Every CUDA and NCCL call of this process fails.") == 1


def test_a_trace_says_what_it_is(library):
    said = check(library, "a_stream_is_a_queue", M8D_BED_TRACE="1")
    assert "this is a test bed: CUDA" in said
    assert said.count("this is a test bed") == 1
    assert "cudaStreamSynchronize" in said


def test_torch_on_the_device(launch):
    with launch("device:everyday", 1) as ranks:
        ranks.wait("done")
        assert ranks.join()[0].code == 0


def test_torch_does_what_object_collectives_need(launch):
    with launch("device:integers", 1) as ranks:
        ranks.wait("done")
        assert ranks.join()[0].code == 0


def test_what_is_not_modelled_is_refused(launch):
    with launch("device:refusals", 1, allow_refused=True) as ranks:
        (event,) = ranks.wait("done")
        assert ranks.join()[0].code == 0
        said = ranks.stderr(0)
    assert event.fields["refused"] > 0
    assert said.count("KERNEL ") == event.fields["refused"]
    assert "AbsFunctor" in said
