"""m8d-post-setup beside the real pip: in venvs, with a small torch; what pip says and removes is looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from kits import shimkit

from multiworld.shim.loader import LOADER_ENTRY, LOADER_FOLDER, loader_text

ROOT = Path(__file__).parents[2]
PATCH = b"""\
For-Torch: 2.6.0
--- a/torch/distributed/rendezvous.py
+++ b/torch/distributed/rendezvous.py
@@ -5 +5 @@
-    return url
+    return url.lower()
--- /dev/null
+++ b/torch/distributed/extra/part.py
@@ -0,0 +1 @@
+x = 1
"""


class Venv:
    """A virtual environment with pip, and the package as its sources."""

    def __init__(self, root: Path) -> None:
        venv.create(root, with_pip=True, symlinks=True)
        self.python = root / "bin/python"
        self.site = next((root / "lib").glob("python3*")) / "site-packages"

    def run(self, *command: object, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *map(str, command)], capture_output=True, text=True, check=check, timeout=120,
            env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1", "PYTHONPATH": str(ROOT), **environ},
        )  # fmt: skip

    def pip(self, *command: object) -> str:
        return self.run("-m", "pip", *command).stdout

    def post_setup(
        self, *command: object, check: bool = True, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "multiworld", "post-setup", *command, check=check, **environ)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    shimkit.make_wheel(folder)
    shimkit.make_wheel(folder, version="2.6.1")
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Venv:
    return Venv(tmp_path_factory.mktemp("venv") / "v")


@pytest.fixture
def torch(base, wheels):
    base.pip("install", wheels / f"torch-{shimkit.VERSION}-py3-none-any.whl")
    yield base
    base.pip("uninstall", "-y", "torch")
    assert not list(base.site.glob("torch*")), "pip left something behind"


def test_pip_finds_nothing_wrong_and_removes_the_loader_with_torch(torch):
    before = shimkit.tree(torch.site)
    torch.post_setup()
    torch.run("-c", "import compileall; compileall.compile_dir('%s', quiet=1)" % (torch.site / "torch"))
    assert (torch.site / LOADER_ENTRY).read_bytes() == loader_text()
    assert "No broken requirements" in torch.pip("check")
    shown = torch.pip("show", "-f", "torch")
    assert LOADER_ENTRY in shown
    assert torch.post_setup("--check").returncode == 0
    torch.post_setup("--uninstall")
    assert shimkit.tree(torch.site) == before
    assert not (torch.site / LOADER_FOLDER).exists()
    torch.post_setup()


def test_a_patch_is_removed_with_torch_and_its_backup_too(torch, tmp_path):
    patch = tmp_path / "x.patch"
    patch.write_bytes(PATCH)
    before = shimkit.tree(torch.site)
    torch.post_setup(patch)
    assert "No broken requirements" in torch.pip("check")
    torch.post_setup("--revert")
    assert shimkit.tree(torch.site) == before
    torch.post_setup(patch)
    torch.post_setup()


def test_an_upgrade_takes_it_away_and_check_says_what_to_do(torch, wheels):
    torch.post_setup()
    torch.pip("install", "--upgrade", wheels / "torch-2.6.1-py3-none-any.whl")
    assert not (torch.site / LOADER_FOLDER).exists()
    done = torch.post_setup("--check", check=False)
    assert done.returncode == 1
    assert "torch 2.6.1" in done.stdout
    assert "Run m8d-post-setup to install it." in done.stdout
    torch.post_setup()
    assert json.loads(torch.post_setup("--check", "--json").stdout)["state"] == "current"


def test_a_wheel_that_carries_the_loader_needs_nothing(base, tmp_path):
    wheel = shimkit.make_wheel(tmp_path, more={LOADER_ENTRY: loader_text()})
    base.pip("install", wheel)
    try:
        told = json.loads(base.post_setup("--check", "--json").stdout)
        assert (told["state"], told["recorded"]) == ("current", True)
        assert "there already" in base.post_setup().stdout
        base.post_setup("--uninstall")
        assert not (base.site / LOADER_FOLDER).exists()
        assert "No broken requirements" in base.pip("check")
    finally:
        base.pip("uninstall", "-y", "torch")
    assert not list(base.site.glob("torch*"))


def test_a_user_install_is_found(base, wheels, tmp_path):
    """What `pip install --user` makes lies in a folder of its own; inside a venv pip is told by --target."""
    user = tmp_path / "user"
    base.pip("install", "--target", user, wheels / f"torch-{shimkit.VERSION}-py3-none-any.whl")
    environ = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(user)))}
    assert "is not in this virtual environment" in base.post_setup(check=False, **environ).stderr
    base.post_setup("--torch", user, **environ)
    assert (user / LOADER_ENTRY).is_file()
    assert base.post_setup("--check", **environ).returncode == 0
    assert base.post_setup("--check", "--torch", user).returncode == 0


def test_a_venv_does_not_write_into_its_parents_torch(base, wheels, tmp_path):
    """With system-site-packages: the parent's torch is seen, used by others, and changed only where it is named."""
    user = tmp_path / "home"
    environ = {"PYTHONUSERBASE": str(user)}
    venv.create(tmp_path / "v", with_pip=False, symlinks=True, system_site_packages=True)
    child = tmp_path / "v" / "bin/python"
    place = Path(
        subprocess.run(
            [child, "-c", "import site; print(site.getusersitepackages())"],
            capture_output=True, text=True, check=True, timeout=60, env={**os.environ, **environ},
        ).stdout.strip()
    )  # fmt: skip
    base.pip("install", "--target", place, wheels / f"torch-{shimkit.VERSION}-py3-none-any.whl")
    before = shimkit.tree(place)

    def post_setup(*command):
        return subprocess.run(
            [child, "-m", "multiworld", "post-setup", *map(str, command)], capture_output=True, text=True,
            check=False, timeout=60, env={**os.environ, **environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    for command in ([], ["--uninstall"], ["--revert"]):
        done = post_setup(*command)
        assert done.returncode == 3, done.stdout
        assert "is not in this virtual environment" in done.stderr
        assert f"--torch {place}" in done.stderr
        assert shimkit.tree(place) == before
    assert post_setup("--check").returncode == 1
    assert post_setup("--torch", place).returncode == 0
    assert (place / LOADER_ENTRY).is_file()


def test_the_console_script_is_this_command(base, wheels):
    from m8d_build.targets import tomllib

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["m8d-post-setup"].split(":")
    code = f"import sys; from {module} import {function} as main; sys.exit(main(['--check']))"
    done = base.run("-c", code, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert "torch is not installed" in done.stderr


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounting takes root")
def test_a_site_packages_on_a_read_only_file_system(base, wheels, tmp_path):
    place = tmp_path / "ro"
    base.pip("install", "--target", place, wheels / f"torch-{shimkit.VERSION}-py3-none-any.whl")
    before = shimkit.tree(place)
    script = (
        f"mount --bind {place} {place} && mount -o remount,ro,bind {place} && "
        f"exec {base.python} -m multiworld post-setup --torch {place}"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if "mount" in done.stderr and "multiworld" not in done.stderr:
        pytest.skip("this machine does not let us mount")
    assert done.returncode == 3
    assert "Read-only file system" in done.stderr
    assert "use a venv of your own" in done.stderr
    assert shimkit.tree(place) == before
