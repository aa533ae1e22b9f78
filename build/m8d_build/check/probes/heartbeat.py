"""A ProcessGroupNCCL whose heartbeat monitor is given a reason to act; says whether the process goes on.

usage: heartbeat.py none|dump|stuck WATCH_SECONDS DUMP_FILE_STEM

dump:  the key by which a peer asks for a flight-recorder dump appears in the store.
stuck: the watchdog makes no progress any more.

Runs with one_gpu preloaded. The mode and the monitor's times come from TORCH_NCCL_* variables.
"""

import ctypes
import datetime
import json
import os
import struct
import sys
import time

import torch  # noqa: F401  (loaded for what it does to the process)
import torch.distributed as dist

trigger, watch, stem = sys.argv[1], float(sys.argv[2]), sys.argv[3]
double = ctypes.CDLL(None)  # the preloaded library
double.m8d_times_held.restype = ctypes.c_long

limit = datetime.timedelta(seconds=30)
store = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=limit)
options = dist.ProcessGroupNCCL.Options()
options._timeout = limit
world = dist.PrefixStore("probe", store)
group = dist.ProcessGroupNCCL(world, 0, 1, options)

began = time.monotonic()
if trigger == "dump":
    # An official build listens below all prefixes, a patched one in its own world.
    for each in (store, world):
        each.set("exception_dump", struct.pack("i", 0))
elif trigger == "stuck":
    double.m8d_hold_watchdog(1)
print(f"{trigger}: begun", flush=True)
while time.monotonic() - began < watch:
    time.sleep(0.1)
    store.set("alive", str(time.monotonic()))
print(f"{trigger}: still here {time.monotonic() - began:.1f} s later", flush=True)

held = double.m8d_times_held()
double.m8d_hold_watchdog(0)
end = group._shutdown if hasattr(group, "_shutdown") else group.shutdown  # the first is torch 2.6's name
end()
del group
outcome = "goes on"
if trigger == "stuck" and not held:
    outcome = "watchdog was not held"
if trigger == "dump":
    outcome += ", dump written" if os.path.exists(stem + "0") else ", no dump"
print("M8D " + json.dumps({"outcome": outcome, "watched": watch}))
