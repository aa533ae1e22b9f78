"""CUDA of the test bed without torch: checks that call the C functions through ctypes, each in a process of its own.

``python -m rawcuda LIBRARY CHECK`` runs one; test_cuda.py runs them all, so that a crash or a hang is one test's.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import sys
import threading
import time
from pathlib import Path

INVALID_VALUE, OUT_OF_MEMORY, INITIALIZATION, INVALID_DEVICE, INVALID_HANDLE = 1, 2, 3, 101, 400
NOT_READY, NOT_SUPPORTED, CAPTURE_UNSUPPORTED = 600, 801, 900
TO_DEVICE, TO_HOST = 1, 2
NON_BLOCKING = 1
PATIENCE = 45.0  # seconds; nothing here takes one
HostFunction = c.CFUNCTYPE(None, c.c_void_p)


class Cuda:
    """The functions, with results checked: ``ok`` raises unless the result is the expected one."""

    def __init__(self, library: str) -> None:
        self.lib = c.CDLL(library)
        self.lib.m8d_bed_count.restype = c.c_long
        self._kept: list[object] = []  # ctypes callbacks must outlive their calls

    def ok(self, name: str, *arguments: object, gives: int = 0) -> None:
        got = getattr(self.lib, name)(*arguments)
        assert got == gives, f"{name} returned {got}, not {gives}"

    def stream(self) -> c.c_void_p:
        handle = c.c_void_p()
        self.ok("cudaStreamCreateWithFlags", c.byref(handle), NON_BLOCKING)
        return handle

    def event(self) -> c.c_void_p:
        handle = c.c_void_p()
        self.ok("cudaEventCreateWithFlags", c.byref(handle), 0)
        return handle

    def memory(self, size: int) -> c.c_void_p:
        pointer = c.c_void_p()
        self.ok("cudaMalloc", c.byref(pointer), c.c_size_t(size))
        return pointer

    def copy(self, to: object, source: object, size: int, kind: int, stream: object) -> None:
        self.ok("cudaMemcpyAsync", to, source, c.c_size_t(size), kind, stream)

    def then(self, stream: c.c_void_p, work) -> None:
        """Call a Python function in stream order."""
        function = HostFunction(lambda _: work())
        self._kept.append(function)
        self.ok("cudaLaunchHostFunc", stream, function, None)

    def hold(self, stream: c.c_void_p) -> threading.Event:
        """Keep a stream busy until the event is set."""
        gate = threading.Event()
        self.then(stream, lambda: gate.wait(PATIENCE))
        return gate

    def count(self, name: str) -> int:
        return self.lib.m8d_bed_count(name.encode())

    def set(self, knob: str, value: str) -> int:
        return self.lib.m8d_bed_set(knob.encode(), value.encode())

    def text(self, function: str, *arguments: object) -> str:
        out = c.create_string_buffer(1 << 16)
        getattr(self.lib, function)(*arguments, out, 1 << 16)
        return out.value.decode()


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def a_stream_is_a_queue(cuda: Cuda) -> None:
    stream, done = cuda.stream(), []
    gate = cuda.hold(stream)
    for number in range(100):
        cuda.then(stream, lambda number=number: done.append(number))
    cuda.ok("cudaStreamQuery", stream, gives=NOT_READY)
    cuda.ok("cudaGetLastError", gives=NOT_READY)
    cuda.ok("cudaGetLastError")
    assert not done
    gate.set()
    cuda.ok("cudaStreamSynchronize", stream)
    assert done == list(range(100))
    cuda.ok("cudaStreamQuery", stream)


def one_stream_waits_for_another(cuda: Cuda) -> None:
    first, second, event, done = cuda.stream(), cuda.stream(), cuda.event(), []
    cuda.ok("cudaEventQuery", event)  # never recorded: nothing to wait for
    cuda.ok("cudaStreamWaitEvent", second, event, 0)
    cuda.ok("cudaStreamQuery", second)
    gate = cuda.hold(first)
    cuda.then(first, lambda: done.append("first"))
    cuda.ok("cudaEventRecord", event, first)
    cuda.ok("cudaEventQuery", event, gives=NOT_READY)
    cuda.ok("cudaStreamWaitEvent", second, event, 0)
    cuda.then(second, lambda: done.append("second"))
    cuda.ok("cudaEventDestroy", event)  # while it is pending
    cuda.ok("cudaEventDestroy", event, gives=INVALID_HANDLE)
    cuda.ok("cudaStreamQuery", second, gives=NOT_READY)
    gate.set()
    cuda.ok("cudaStreamSynchronize", second)
    assert done == ["first", "second"]


def an_event_is_that_of_its_last_record(cuda: Cuda) -> None:
    stream, begin, end = cuda.stream(), cuda.event(), cuda.event()
    milliseconds = c.c_float()
    cuda.ok("cudaEventElapsedTime", c.byref(milliseconds), begin, end, gives=INVALID_HANDLE)
    cuda.ok("cudaEventRecord", begin, stream)
    cuda.ok("cudaEventSynchronize", begin)
    gate = cuda.hold(stream)
    cuda.ok("cudaEventRecord", end, stream)
    cuda.ok("cudaEventElapsedTime", c.byref(milliseconds), begin, end, gives=NOT_READY)
    threading.Timer(0.1, gate.set).start()
    cuda.ok("cudaEventSynchronize", end)
    cuda.ok("cudaEventElapsedTime", c.byref(milliseconds), begin, end)
    assert 90 < milliseconds.value < PATIENCE * 1000
    gate = cuda.hold(stream)
    cuda.ok("cudaEventRecord", end, stream)
    cuda.ok("cudaEventQuery", end, gives=NOT_READY)
    gate.set()


def copies_block_where_cuda_says(cuda: Cuda) -> None:
    size = 1 << 16
    stream, device = cuda.stream(), cuda.memory(size)
    pinned = c.c_void_p()
    cuda.ok("cudaHostAlloc", c.byref(pinned), c.c_size_t(size), 0)
    source = c.create_string_buffer(b"A" * size, size)
    gate = cuda.hold(stream)
    cuda.copy(device, source, size, TO_DEVICE, stream)  # the stream is busy, and yet it returns
    c.memset(source, ord("B"), size)  # and the source may change
    cuda.copy(pinned, device, size, TO_HOST, stream)  # into pinned memory: returns too
    assert c.string_at(pinned, size) == bytes(size)
    threading.Timer(0.1, gate.set).start()
    pageable = c.create_string_buffer(size)
    cuda.copy(pageable, device, size, TO_HOST, stream)  # into pageable memory: when the bytes are there
    assert pageable.raw == c.string_at(pinned, size) == b"A" * size


def memory_is_counted_by_device(cuda: Cuda) -> None:
    free, total = c.c_size_t(), c.c_size_t()
    assert cuda.set("MEM_MB", "64") == 0
    half = cuda.memory(32 << 20)
    cuda.ok("cudaMemGetInfo", c.byref(free), c.byref(total))
    assert (free.value, total.value) == (32 << 20, 64 << 20)
    pointer = c.c_void_p()
    cuda.ok("cudaMalloc", c.byref(pointer), c.c_size_t(33 << 20), gives=OUT_OF_MEMORY)
    assert pointer.value is None
    cuda.ok("cudaSetDevice", 1)
    cuda.ok("cudaFree", cuda.memory(64 << 20))
    cuda.ok("cudaFree", half)
    cuda.ok("cudaFree", half, gives=INVALID_VALUE)
    cuda.ok("cudaFree", None)
    assert cuda.count("allocations") == 0


def freeing_waits_for_the_device(cuda: Cuda) -> None:
    stream, memory, done = cuda.stream(), cuda.memory(4096), []
    gate = cuda.hold(stream)
    cuda.then(stream, lambda: done.append(True))
    threading.Timer(0.1, gate.set).start()
    cuda.ok("cudaFree", memory)
    assert done


def a_destroyed_stream_finishes_its_work(cuda: Cuda) -> None:
    stream, done = cuda.stream(), []
    gate = cuda.hold(stream)
    cuda.then(stream, lambda: done.append(True))
    cuda.ok("cudaStreamDestroy", stream)
    for name in ("cudaStreamQuery", "cudaStreamSynchronize", "cudaStreamDestroy"):
        cuda.ok(name, stream, gives=INVALID_HANDLE)
    assert cuda.count("streams") == 0
    threading.Timer(0.1, gate.set).start()
    cuda.ok("cudaDeviceSynchronize")
    assert done


def threads_come_with_work_and_go(cuda: Cuda) -> None:
    def hammer() -> None:
        streams, events = [cuda.stream() for _ in range(4)], [cuda.event() for _ in range(4)]
        for turn in range(1000):
            this, following = turn % 4, (turn + 1) % 4
            cuda.then(streams[this], lambda: None)
            cuda.ok("cudaEventRecord", events[this], streams[this])
            cuda.ok("cudaStreamWaitEvent", streams[following], events[this], 0)
            if not turn % 50:
                cuda.ok("cudaEventSynchronize", events[this])
        for stream, event in zip(streams, events, strict=True):
            cuda.ok("cudaStreamSynchronize", stream)
            cuda.ok("cudaStreamDestroy", stream)
            cuda.ok("cudaEventDestroy", event)

    before = threads()
    failed = []
    threading.excepthook = failed.append
    callers = [threading.Thread(target=hammer) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(PATIENCE)
    assert not failed
    assert cuda.count("streams") == cuda.count("events") == 0
    until(lambda: cuda.count("stream_workers") == 0 and threads() == before)
    assert cuda.count("stream_workers_started") > 0


def nothing_starts_before_a_stream_is_used(cuda: Cuda) -> None:
    devices = c.c_int()
    cuda.ok("cudaGetDeviceCount", c.byref(devices))
    assert devices.value == 8
    cuda.memory(4096)
    assert threads() == 1
    child = os.fork()
    if not child:  # it may use the device, and it reads the environment anew
        os.putenv("M8D_BED_DEVICES", "3")
        os._exit(0 if cuda.lib.cudaGetDeviceCount(c.byref(devices)) == 0 and devices.value == 3 else 1)
    assert os.waitpid(child, 0)[1] == 0


def a_fork_after_use_has_lost_the_device(cuda: Cuda) -> None:
    stream = cuda.stream()
    cuda.then(stream, lambda: None)
    cuda.ok("cudaStreamSynchronize", stream)
    child = os.fork()
    if not child:
        os._exit(0 if cuda.lib.cudaGetDeviceCount(c.byref(c.c_int())) == INITIALIZATION else 1)
    assert os.waitpid(child, 0)[1] == 0
    cuda.ok("cudaGetDeviceCount", c.byref(c.c_int()))


def a_stub_says_its_name(cuda: Cuda) -> None:
    for _ in range(2):
        cuda.ok("cudaIpcGetMemHandle", None, None, gives=NOT_SUPPORTED)
    cuda.ok("cuMemCreate", gives=NOT_SUPPORTED)
    assert cuda.text("m8d_bed_stubs").splitlines() == ["cudaIpcGetMemHandle", "cuMemCreate"]
    assert cuda.count("stubs") == 3


def a_capture_is_refused(cuda: Cuda) -> None:
    cuda.ok("cudaStreamBeginCapture", cuda.stream(), 0, gives=CAPTURE_UNSUPPORTED)
    status = c.c_int(-1)
    cuda.ok("cudaStreamIsCapturing", None, c.byref(status))
    assert status.value == 0


def knobs_are_checked(cuda: Cuda) -> None:
    assert cuda.set("NO_SUCH_KNOB", "1") == -1
    assert cuda.set("MEM_MB", "much") == -2
    assert cuda.set("KERNELS", "maybe") == -2
    assert cuda.set("KERNELS", "ignore") == 0
    assert cuda.text("m8d_bed_get", b"KERNELS") == "ignore"
    assert cuda.set("KERNELS", "") == 0
    assert cuda.text("m8d_bed_get", b"KERNELS") == "error"
    assert cuda.lib.m8d_bed_get(b"NO_SUCH_KNOB", None, 0) == -1
    assert cuda.count("no such counter") == -1
    cuda.ok("cudaSetDevice", 8, gives=INVALID_DEVICE)
    info = json.loads(cuda.text("m8d_bed_info"))
    assert info["usable"]
    assert {"DEVICES", "ABORT_HANG_MS"} <= set(info["knobs"])
    assert {"streams", "stubs", "launches"} <= set(info["counters"])


def the_environment_is_wrong(cuda: Cuda) -> None:
    for _ in range(2):
        cuda.ok("cudaGetDeviceCount", c.byref(c.c_int()), gives=INITIALIZATION)
    cuda.ok("cudaStreamCreate", c.byref(c.c_void_p()), gives=INITIALIZATION)
    assert not json.loads(cuda.text("m8d_bed_info"))["usable"]


CHECKS = (
    a_stream_is_a_queue,
    one_stream_waits_for_another,
    an_event_is_that_of_its_last_record,
    copies_block_where_cuda_says,
    memory_is_counted_by_device,
    freeing_waits_for_the_device,
    a_destroyed_stream_finishes_its_work,
    threads_come_with_work_and_go,
    nothing_starts_before_a_stream_is_used,
    a_fork_after_use_has_lost_the_device,
    a_stub_says_its_name,
    a_capture_is_refused,
    knobs_are_checked,
)

if __name__ == "__main__":
    made = Cuda(sys.argv[1])
    globals()[sys.argv[2]](made)
    made.lib.cudaDeviceSynchronize()  # no callback into an interpreter that is ending
