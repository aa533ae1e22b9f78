"""The bill of materials of a patched wheel, and that statement, bill and wheel are the same each time."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from cyclonedx.model.bom import Bom
from kits.provenancekit import DIST_INFO, OVERLAY, PATCH, patched_wheel

ROOT = Path(__file__).parents[4]


def bill(path):
    with zipfile.ZipFile(path) as archive:
        return archive.read(f"{DIST_INFO}/sboms/multiworld.cdx.json")


def test_it_names_what_the_wheel_is_made_from(tmp_path):
    made = patched_wheel(tmp_path)
    raw = json.loads(bill(made.path))
    assert (raw["bomFormat"], raw["specVersion"]) == ("CycloneDX", "1.6")
    torch = raw["metadata"]["component"]
    assert (torch["name"], torch["version"]) == ("torch", "2.6.0+cu124.m8d1")
    (ancestor,) = torch["pedigree"]["ancestors"]
    official = tmp_path / "official" / ancestor["bom-ref"]
    digest = hashlib.sha256(official.read_bytes()).hexdigest()
    assert ancestor["hashes"] == [{"alg": "SHA-256", "content": digest}]
    (patch,) = torch["pedigree"]["patches"]
    assert PATCH in patch["diff"]["url"]
    assert "0001-group-guard.patch" in patch["diff"]["url"]
    packages = {each["name"]: each for each in raw["components"]}
    assert packages["nvidia-nccl-cu12"]["purl"] == "pkg:pypi/nvidia-nccl-cu12@2.21.5"
    parts = {each["name"]: each for each in torch["components"]}
    assert parts[OVERLAY]["hashes"][0]["alg"] == "SHA-256"
    (depends,) = [each for each in raw["dependencies"] if each["ref"] == "torch@2.6.0+cu124.m8d1"]
    assert depends["dependsOn"] == ["nvidia-cuda-runtime-cu12@12.4.127", "nvidia-nccl-cu12@2.21.5"]


def test_a_reader_of_cyclonedx_takes_it(tmp_path):
    bom = Bom.from_json(json.loads(bill(patched_wheel(tmp_path).path)))
    assert bom.metadata.component.name == "torch"
    assert bom.validate()


def test_it_lies_beside_the_wheel_too(tmp_path):
    made = patched_wheel(tmp_path)
    assert made.path.with_name(made.path.name + ".cdx.json").read_bytes() == bill(made.path)


PROGRAM = """
import sys
from pathlib import Path
from kits.provenancekit import patched_wheel
patched_wheel(Path(sys.argv[1]))
"""


def test_another_locale_time_zone_and_hash_seed_give_the_same_bytes(tmp_path):
    made = []
    for number, more in enumerate(
        (
            {"LC_ALL": "C", "TZ": "UTC", "PYTHONHASHSEED": "1"},
            {"LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "2", "PYTHONUTF8": "1"},
        )
    ):
        folder = tmp_path / str(number)
        paths = [str(ROOT / "tests"), str(ROOT / "build"), str(ROOT)]
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder)],
            env={**os.environ, **more, "PYTHONPATH": os.pathsep.join(paths)},
            check=True,
            timeout=100,
        )
        made.append({path.name: path.read_bytes() for path in sorted((folder / "out").iterdir())})
    assert made[0] == made[1]
    assert len(made[0]) == 3
