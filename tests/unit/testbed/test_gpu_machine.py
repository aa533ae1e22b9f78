"""What a machine must have, and what is said when it has not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bed.errors import BedError
from hardware.machine import Machine, NoGpu, _loaded, look, told
from kits.gpukit import FACTS, answering, interpreter

PYTHON = Path("/there/python")
DRIVER = ("570.1", "")
NO_DRIVER = ("", "nvidia-smi is not installed")


def test_a_machine_in_words():
    found = told({**FACTS, "gpus": ["A", "B", "A"]}, python=PYTHON, driver=DRIVER)
    assert found == Machine(("A", "B", "A"), "570.1", "9.8.7+cu999", "99.9", "2.34.56")
    assert found.gpu == "2 x A, B"
    assert told({**FACTS, "nccl": 0}, python=PYTHON, driver=DRIVER).nccl == ""


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x)\nGCC version:\n",
         "580.159.04"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n", "535.54.03"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_drivers_version_and_not_the_machines(text, version):
    assert _loaded(text) == version


@pytest.mark.parametrize(
    ("facts", "driver", "kind", "words"),
    [
        ({"found": False}, DRIVER, BedError, ["/there/python has no torch", "pip install torch"]),
        ({"cuda": ""}, DRIVER, BedError, ["9.8.7+cu999", "without CUDA", "--gpu NAME=PYTHON"]),
        ({"gpus": [], "why": "Found no NVIDIA driver\n on your system"}, NO_DRIVER, NoGpu,
         ["no GPU here: nvidia-smi is not installed", "Found no NVIDIA driver on your system", "nox -s testbed"]),
        ({"gpus": []}, DRIVER, NoGpu, ["nvidia-smi names driver 570.1", "none is visible"]),
        ({"gpus": ["m8d test bed (no hardware)"]}, DRIVER, NoGpu, ["no GPU here: m8d test bed", "LD_PRELOAD"]),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(facts, driver, kind, words):
    with pytest.raises(kind) as caught:
        told({**FACTS, **facts}, python=PYTHON, driver=driver)
    assert type(caught.value) is kind
    for each in words:
        assert each in str(caught.value)


def test_the_test_bed_may_stand_in_for_a_test():
    found = told({**FACTS, "gpus": ["m8d test bed"]}, python=PYTHON, driver=NO_DRIVER, stand_in=True)
    assert found.gpus == ("m8d test bed",)


def test_an_interpreter_is_asked(tmp_path):
    found = look(answering(tmp_path))
    assert (found.gpus, found.torch, found.nccl) == (("Toy GPU",), "9.8.7+cu999", "2.34.56")


def test_an_interpreter_without_torch_is_asked_for_real(tmp_path):
    bare = interpreter(tmp_path, f'exec {sys.executable} -I -S "$@"')
    with pytest.raises(BedError, match="has no torch"):
        look(bare)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo broken >&2; exit 3", "could not be asked for its GPUs: broken"),
        ("exit 3", "it ended with 3"),
        ("kill -9 $$", "it ended with -9"),
        ("exec sleep 60", "did not tell what GPUs it sees within 0.3 s"),
    ],
)
def test_an_interpreter_that_does_not_answer(tmp_path, body, words):
    with pytest.raises(BedError, match="python") as caught:
        look(interpreter(tmp_path, body), timeout=0.3 if "sleep" in body else 60)
    assert words in str(caught.value)


def test_an_interpreter_that_is_none(tmp_path):
    with pytest.raises(BedError, match="cannot be started"):
        look(tmp_path)
