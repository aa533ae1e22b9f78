"""Run programs side by side, each bounded in time, and write how each of them ended.

usage: supervise.py PLAN.json RESULT.json

PLAN:   {"parallel": N, "jobs": [{"name": .., "programs": [[argv], ..], "env": {..}, "timeout": seconds}, ..]}
RESULT: {"jobs": {name: [{"returncode": .., "timed_out": .., "seconds": .., "stdout": .., "stderr": ..}, ..]}}

The first job runs alone: what it imports is compiled once, not by everyone. A job's programs run at the same time. A
program's end is what is looked at, so a signal is no failure here. Nothing of our environment that steers torch, NCCL,
CUDA, Python or the loader reaches a program; it gets what its job says.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

DROPPED = (
    "C10_",
    "CUDA_",
    "GLOO_",
    "LD_",
    "LOCAL_",
    "MASTER_",
    "NCCL_",
    "PYTHON",
    "PYTORCH_",
    "RANK",
    "TORCH",
    "WORLD_",
)
KEPT_BYTES = 1 << 16  # of each output, from its end


def base_environment():
    env = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    env["OMP_NUM_THREADS"] = "2"  # several programs share the machine
    env["CUDA_VISIBLE_DEVICES"] = ""  # the same outcome on a machine with GPUs and on one without
    return env


def tail(file):
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - KEPT_BYTES))
    return file.read().decode(errors="replace")


def run_job(job):
    started = time.monotonic()
    deadline = started + job["timeout"]
    running = []
    ends = []
    try:
        for argv in job["programs"]:
            out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
            env = {**base_environment(), **job["env"]}
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env)
            running.append((process, out, err))
        for process, out, err in running:
            timed_out = False
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                timed_out = True
                process.kill()
                process.wait()
            ends.append(
                {
                    "returncode": process.returncode,
                    "timed_out": timed_out,
                    "seconds": round(time.monotonic() - started, 3),
                    "stdout": tail(out),
                    "stderr": tail(err),
                }
            )
    finally:
        for process, out, err in running:
            if process.poll() is None:
                process.kill()
                process.wait()
            out.close()
            err.close()
    return ends


def main(plan_path, result_path):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # programs that end by SIGABRT leave no core file
    with open(plan_path, encoding="utf-8") as file:
        plan = json.load(file)
    first, *others = plan["jobs"]
    ends = {first["name"]: run_job(first)}
    with ThreadPoolExecutor(plan["parallel"]) as pool:
        results = {job["name"]: pool.submit(run_job, job) for job in others}
        ends.update((name, future.result()) for name, future in results.items())
    with open(result_path + ".part", "w", encoding="utf-8") as file:
        json.dump({"jobs": ends}, file)
    os.replace(result_path + ".part", result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
