"""A real etcd server, started and stopped by tests."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request

import pytest

STARTS = 60.0


class Etcd:
    """The distribution's etcd on an address of this process's own, so that its ports are free when it comes back.

    The kernel gives out ports of 127.0.0.1 to whoever asks; nobody asks for those of 127.77.x.y.
    """

    def __init__(self, folder):
        if shutil.which("etcd") is None:
            pytest.skip("there is no etcd server here (Debian: etcd-server)")
        if importlib.util.find_spec("etcd") is None:
            pytest.skip("torch's etcd rendezvous needs python-etcd")
        pid = os.getpid()
        self.host = f"127.77.{(pid >> 8) & 255}.{pid & 255 or 1}"
        self.endpoint = f"{self.host}:2379"
        self.folder = folder
        self.process = None

    def start(self):
        client, peer = f"http://{self.host}:2379", f"http://{self.host}:2380"
        with (self.folder / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    "etcd", "--enable-v2", "--name", "one", "--data-dir", str(self.folder / "data"),
                    "--listen-client-urls", client, "--advertise-client-urls", client,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", f"one={peer}",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + STARTS
        while not self._healthy():
            assert self.process.poll() is None, (self.folder / "etcd.log").read_text()[-2000:]
            assert time.monotonic() < deadline, (self.folder / "etcd.log").read_text()[-2000:]
            time.sleep(0.1)

    def _healthy(self):
        try:
            with urllib.request.urlopen(f"http://{self.endpoint}/health", timeout=5) as answer:
                return json.load(answer)["health"] == "true"
        except (OSError, ValueError):
            return False

    def delete(self, key):
        """Delete a key of version 2, as the end of its time to live does."""
        with contextlib.closing(http.client.HTTPConnection(self.endpoint, timeout=30)) as etcd:
            etcd.request("DELETE", f"/v2/keys{key}")
            assert etcd.getresponse().status == 200

    def kill(self):
        self.process.kill()
        self.process.wait(30)

    def stop(self):
        self.process.terminate()
        self.process.wait(60)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.kill()
