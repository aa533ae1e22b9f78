"""m8d-post-setup PATCHFILE and --revert, on small torches that were installed by hand."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from kits import shimkit

from multiworld.cli.exits import EXIT_CODES
from multiworld.cli.post_setup import main
from multiworld.errors import InstallError
from multiworld.shim.install import inspect, install, uninstall
from multiworld.shim.patchfile import apply_patch, read_patch, revert_patch
from multiworld.shim.receipt import BACKUP_FOLDER, receipt_of
from multiworld.shim.torchsite import ASIDE, TorchSite, find_site

FAILED = EXIT_CODES[InstallError]
PATCH = """\
From: somebody
For-Torch: 2.6.0

diff --git a/torch/distributed/rendezvous.py b/torch/distributed/rendezvous.py
index 1111111..2222222 100644
--- a/torch/distributed/rendezvous.py
+++ b/torch/distributed/rendezvous.py
@@ -2,7 +2,7 @@ import os
.
.
 def rendezvous(url):
-    return url
+    return url.lower()
.
.
 def handler():
diff --git a/torch/distributed/world_manager.py b/torch/distributed/world_manager.py
new file mode 100644
--- /dev/null
+++ b/torch/distributed/world_manager.py
@@ -0,0 +1,2 @@
+class WorldManager:
+    pass
diff --git a/torch/distributed/old.py b/torch/distributed/old.py
--- a/torch/distributed/old.py
+++ b/torch/distributed/old.py
@@ -1,2 +1,2 @@
 a = 1\r
-b = 2\r
+b = 3\r
--.
2.39.5
""".replace(".\n", " \n").encode()  # a dot at a line's end is a space
FILES = ["torch/distributed/rendezvous.py", "torch/distributed/world_manager.py", "torch/distributed/old.py"]


@pytest.fixture
def site(tmp_path) -> TorchSite:
    return shimkit.make_site(tmp_path / "site-packages")


@pytest.fixture
def patch(tmp_path) -> Path:
    path = tmp_path / "worlds.patch"
    path.write_bytes(PATCH)
    return path


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def recorded(site: TorchSite) -> bool:
    """Whether every file below torch/ is in RECORD with its hash, and RECORD names no file that is not there."""
    record = site.record()
    present = {str(path.relative_to(site.root)) for path in site.torch.rglob("*") if path.is_file()}
    named = {path for path in record.below("torch") if not path.endswith(".pyc")}
    return named == present and all(record.says(path, (site.root / path).read_bytes()) for path in present)


def test_a_patch_is_applied_with_a_backup_and_taken_back_byte_for_byte(site, patch, capsys):
    before = shimkit.tree(site.root)
    assert recorded(site)
    code, said, _ = run(capsys, patch, "--torch", site.root)
    assert code == 0
    assert all(path in said for path in FILES)
    assert "worlds.patch is applied; `m8d-post-setup --revert` takes it back." in said
    assert (site.root / FILES[0]).read_bytes() == shimkit.RENDEZVOUS.replace(
        b"return url", b"return url.lower()"
    )
    assert (site.root / FILES[1]).read_bytes() == b"class WorldManager:\n    pass\n"
    assert (site.root / FILES[2]).read_bytes() == b"a = 1\r\nb = 3\r\n"
    assert recorded(site)
    assert "worlds.patch: applied" in run(capsys, "--check", "--torch", site.root)[1]
    told = json.loads(run(capsys, "--check", "--json", "--torch", site.root)[1])
    assert told["patch_file"] == {"name": "worlds.patch", "state": "applied"}
    code, said, _ = run(capsys, "--revert", "--torch", site.root)
    assert code == 0
    assert said.endswith("worlds.patch is taken back.\n")
    assert shimkit.tree(site.root) == before
    code, _, said = run(capsys, "--revert", "--torch", site.root)
    assert code == FAILED
    assert "no patch file is applied" in said


def test_a_record_whose_last_line_has_no_end_comes_back_byte_for_byte(site, patch):
    site.record_path.write_bytes(site.record_path.read_bytes().removesuffix(b"\r\n"))
    before = shimkit.tree(site.root)
    apply_patch(site, read_patch(patch))
    assert recorded(site)
    install(site)
    uninstall(site)
    revert_patch(site)
    assert shimkit.tree(site.root) == before


def test_a_new_file_that_is_empty_is_added_and_taken_back(site, tmp_path):
    path = tmp_path / "v2.6.0.patch"
    names = "a/torch/worlds/__init__.py b/torch/worlds/__init__.py"
    path.write_bytes(PATCH + f"diff --git {names}\nnew file mode 100644\nindex 0000000..e69de29\n".encode())
    before = shimkit.tree(site.root)
    patch = read_patch(path)
    apply_patch(site, patch)
    assert (site.torch / "worlds/__init__.py").read_bytes() == b""
    assert recorded(site)
    assert not apply_patch(site, patch).changed
    revert_patch(site)
    assert shimkit.tree(site.root) == before


def test_the_loader_and_a_patch_do_not_disturb_each_other(site, patch):
    before = shimkit.tree(site.root)
    apply_patch(site, read_patch(patch))
    install(site)
    assert recorded(site)
    revert_patch(site)
    assert inspect(site).fine
    assert recorded(site)
    shutil.rmtree(site.torch / "distributed/multiworld")
    after = shimkit.tree(site.root)
    assert set(after) == set(before)


def test_a_dry_run_changes_nothing(site, patch, capsys):
    before = shimkit.tree(site.root)
    code, said, _ = run(capsys, patch, "--dry-run", "--torch", site.root)
    assert code == 0
    assert "fits; nothing was changed" in said
    assert shimkit.tree(site.root) == before
    apply_patch(site, read_patch(patch))
    applied = shimkit.tree(site.root)
    assert "can be taken back" in run(capsys, "--revert", "--dry-run", "--torch", site.root)[1]
    assert "applied already" in run(capsys, patch, "--dry-run", "--torch", site.root)[1]
    assert shimkit.tree(site.root) == applied
    revert_patch(site)
    with pytest.raises(InstallError, match="no patch file"):
        revert_patch(site, dry_run=True)


def test_applied_twice_says_so_and_another_one_is_refused(site, patch, tmp_path):
    apply_patch(site, read_patch(patch))
    after = shimkit.tree(site.root)
    again = apply_patch(site, read_patch(patch))
    assert not again.changed
    assert "applied already" in again.says
    assert shimkit.tree(site.root) == after
    other = tmp_path / "other.patch"
    other.write_bytes(PATCH.replace(b"somebody", b"somebody else"))
    with pytest.raises(InstallError, match="one patch file at a time"):
        apply_patch(site, read_patch(other))
    (site.root / FILES[0]).write_bytes(b"edited\n")
    for act in (lambda: apply_patch(site, read_patch(patch)), lambda: revert_patch(site)):
        with pytest.raises(InstallError, match="was changed after the patch was applied"):
            act()


def test_a_record_that_was_not_written_is_repaired(site, patch):
    record = site.record_path.read_bytes()
    apply_patch(site, read_patch(patch))
    after = site.record_path.read_bytes()
    site.record_path.write_bytes(record)
    told = apply_patch(site, read_patch(patch))
    assert (told.changed, "half done; it is taken back" in told.left) == (True, True)
    assert recorded(site)
    assert sorted(site.record_path.read_bytes().splitlines()) == sorted(after.splitlines())


def test_changes_that_are_in_this_torch_already_are_told(site, patch):
    apply_patch(site, read_patch(patch))
    shutil.rmtree(site.root / BACKUP_FOLDER)
    outcome = apply_patch(site, read_patch(patch))
    assert not outcome.changed
    assert "in this torch already; there is no backup" in outcome.says
    (site.root / FILES[2]).write_bytes(b"a = 1\r\nb = 2\r\n")
    with pytest.raises(InstallError, match="was made against"):
        apply_patch(site, read_patch(patch))


@pytest.mark.parametrize(
    "change",
    [lambda data: data.replace(b"return url", b"return uri"), lambda data: b"# new\n" + data, lambda _: None],
)
def test_a_patch_that_does_not_fit_exactly_changes_nothing(site, patch, change, capsys):
    place = site.root / FILES[2]
    data = change(place.read_bytes().replace(b"b = 2", b"b = 22"))
    if data is None:
        place.unlink()
    else:
        place.write_bytes(data)
    before = shimkit.tree(site.root)
    code, _, said = run(capsys, patch, "--torch", site.root)
    assert code == FAILED
    assert "torch/distributed/old.py" in said
    assert "without fuzz; nothing was changed" in said
    assert shimkit.tree(site.root) == before


@pytest.mark.parametrize(
    ("name", "head", "option", "found"),
    [
        ("x.patch", b"For-Torch: 2.6.0\n", None, "2.6.0"),
        ("x.patch", b"# torch: v2.6.0\n", None, "2.6.0"),
        ("pytorch-v2.4.0.patch", b"", None, "2.4.0"),
        ("2.4.1-worlds.patch", b"", None, "2.4.1"),
        ("x.patch", b"", "2.13.0+cpu", "2.13.0"),
        ("v2.6.0.patch", b"for torch: 2.6.0\n", "v2.6.0", "2.6.0"),
        ("x.patch", b"", None, "--for-torch X.Y.Z"),
        ("1.2.3.4.patch", b"", None, "--for-torch X.Y.Z"),
        ("v2.4.0.patch", b"For-Torch: 2.6.0\n", None, "they agree"),
        ("x.patch", b"For-Torch: 2.6.0\n", "2.7.0", "they agree"),
    ],
)
def test_the_version_is_stated_in_one_of_three_places(tmp_path, name, head, option, found):
    path = tmp_path / name
    path.write_bytes(head + b"--- a/torch/x.py\n+++ b/torch/x.py\n@@ -1 +1 @@\n-a\n+For-Torch: 1.0.0\n")
    if found[0].isdigit():
        assert read_patch(path, for_torch=option).torch == found
    else:
        with pytest.raises(InstallError, match=found):
            read_patch(path, for_torch=option)


def test_another_version_of_torch_is_refused(site, patch, capsys):
    (site.torch / "version.py").write_text("__version__ = '2.6.1'\n")
    code, _, said = run(capsys, patch, "--torch", site.root)
    assert code == FAILED
    assert "is for torch 2.6.0, installed is 2.6.1" in said
    assert receipt_of(site) is None


def test_a_file_that_is_not_there_or_no_patch(site, tmp_path, capsys):
    assert "cannot be read" in run(capsys, tmp_path / "none.patch", "--torch", site.root)[2]
    (tmp_path / "none.patch").write_text("hello\n")
    assert "no unified diff" in run(capsys, tmp_path / "none.patch", "--torch", site.root)[2]


def test_a_folder_that_leads_elsewhere_is_not_followed(site, patch, tmp_path):
    outside = tmp_path / "outside"
    (site.torch / "distributed").rename(outside)
    (site.torch / "distributed").symlink_to(outside)
    with pytest.raises(InstallError, match="leads out of"):
        apply_patch(site, read_patch(patch))


def test_a_backup_folder_that_leads_elsewhere_is_not_followed(site, patch, tmp_path, capsys):
    (tmp_path / "outside").mkdir()
    (site.root / BACKUP_FOLDER).mkdir()
    (site.root / BACKUP_FOLDER / "torch").symlink_to(tmp_path / "outside")
    before = shimkit.tree(tmp_path)
    code, _, error = run(capsys, patch, "--torch", site.root)
    assert (code, shimkit.tree(tmp_path)) == (FAILED, before)
    assert "leads out of" in error


def test_a_backup_that_is_damaged_is_told(site, patch):
    apply_patch(site, read_patch(patch))
    backup = site.root / BACKUP_FOLDER / f"{FILES[0]}.orig"
    backup.write_bytes(b"")
    with pytest.raises(InstallError, match="the backup of"):
        revert_patch(site)
    receipt = site.root / BACKUP_FOLDER / "receipt.json"
    for text in ("{", "{}", receipt.read_text().replace('"schema": 1', '"schema": 2'), "[]"):
        receipt.write_text(text)
        with pytest.raises(InstallError, match="is damaged"):
            revert_patch(site)


@pytest.mark.parametrize("which", ["receipt.json", "rendezvous.py", "world_manager.py", "RECORD"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_disk_that_is_full_leaves_everything_as_it_was(site, patch, monkeypatch, which, nth):
    before = shimkit.tree(site.root)
    real, left = Path.open, [nth]

    def refusing(self, mode="r", *rest, **more):
        if "w" in mode and self.name == which + ASIDE:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return real(self, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", refusing)
    if nth == 1 or which in {"receipt.json", "RECORD"}:
        with pytest.raises(InstallError, match="No space left"):
            apply_patch(site, read_patch(patch))
    monkeypatch.undo()
    if nth == 1 or which in {"receipt.json", "RECORD"}:
        assert shimkit.tree(site.root) == before
    apply_patch(site, read_patch(patch))
    revert_patch(site)
    assert shimkit.tree(site.root) == before


@pytest.mark.parametrize("start", ["clean", "applied"])
def test_a_run_that_is_killed_at_any_step_is_taken_back_or_finished_by_the_next(tmp_path, patch, start):
    template = shimkit.make_site(tmp_path / "template")
    before = shimkit.tree(template.root)
    if start == "applied":
        apply_patch(template, read_patch(patch))
    steps = 0
    for step in range(1, 60):
        killed = tmp_path / f"{step}-killed"
        shutil.copytree(template.root, killed)
        command = ("--revert",) if start == "applied" else (str(patch),)
        status = shimkit.run_killed(step, "--torch", str(killed), *command)
        for follow in ("apply", "revert"):
            root = tmp_path / f"{step}-{follow}"
            shutil.copytree(killed, root)
            site = find_site(root)
            if follow == "apply":
                apply_patch(site, read_patch(patch))
                assert recorded(site)
                revert_patch(site)
            elif receipt_of(site) is not None:
                revert_patch(site)
            else:
                with pytest.raises(InstallError, match="no patch file"):
                    revert_patch(site)
                apply_patch(site, read_patch(patch))
                revert_patch(site)
            assert shimkit.tree(root) == before
            shutil.rmtree(root)
        steps = step
        if status == 0:
            break
    assert status == 0
    assert steps > 8, "the run was killed at no step"


class KilledError(BaseException):
    """Ends a run as a kill does: nothing is cleaned up."""


def test_a_run_that_is_killed_before_record_is_renamed_is_half_done(site, patch, monkeypatch, capsys):
    install(site)
    before = shimkit.tree(site.root)
    real, left = Path.replace, [2]

    def killed(self, target):
        left[0] -= target == site.record_path
        if left[0] == 0:
            raise KilledError
        return real(self, target)

    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr(Path, "replace", killed)
        apply_patch(site, read_patch(patch))
    assert (receipt_of(site) or {})["state"] == "applied"
    assert not recorded(site)
    code, said, _ = run(capsys, "--check", "--torch", site.root)
    assert (code, "worlds.patch: half done" in said) == (1, True)
    code, said, _ = run(capsys, "--torch", site.root)
    assert (code, "it is taken back." in said) == (0, True)
    assert shimkit.tree(site.root) == before
    assert run(capsys, "--check", "--torch", site.root)[0] == 0


@pytest.mark.parametrize("revert", [False, True])
@pytest.mark.parametrize("folder", ["torch/worlds", "torch/worlds/deep"])
def test_a_run_that_is_killed_leaves_no_empty_folder(site, tmp_path, monkeypatch, revert, folder):
    path = tmp_path / "worlds-2.6.0.patch"
    path.write_bytes(PATCH.replace(b"torch/distributed/world_manager.py", b"torch/worlds/deep/new.py"))
    before, name = shimkit.tree(site.root), "rmdir" if revert else "mkdir"
    if revert:
        apply_patch(site, read_patch(path))
    real = getattr(Path, name)

    def killed(self, *rest, **more):
        if self == site.root / folder and revert:
            raise KilledError
        real(self, *rest, **more)
        if self == site.root / folder:
            raise KilledError

    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr(Path, name, killed)
        revert_patch(site) if revert else apply_patch(site, read_patch(path))
    assert (site.root / folder).is_dir()
    revert_patch(site)
    assert shimkit.tree(site.root) == before


def test_a_patch_for_a_folder_that_is_a_file_changes_nothing(site, tmp_path):
    path = tmp_path / "worlds-2.6.0.patch"
    path.write_bytes(PATCH.replace(b"torch/distributed/world_manager.py", b"torch/version.py/new.py"))
    before = shimkit.tree(site.root)
    with pytest.raises(InstallError, match="cannot be written"):
        apply_patch(site, read_patch(path))
    assert shimkit.tree(site.root) == before


def test_a_file_that_was_edited_later_is_not_half_done(site, patch, capsys):
    install(site)
    apply_patch(site, read_patch(patch))
    (site.root / FILES[0]).write_bytes(b"edited\n")
    (site.root / BACKUP_FOLDER / f"{FILES[0]}.orig").write_bytes(b"edited\n")
    code, said, _ = run(capsys, "--check", "--torch", site.root)
    assert (code, "worlds.patch: applied" in said) == (0, True)
    assert run(capsys, "--torch", site.root)[0] == 0


@pytest.mark.parametrize("command", [(), ("--uninstall",)])
@pytest.mark.parametrize("start", ["clean", "applied"])
def test_what_a_killed_run_left_is_told_by_check_and_taken_back_by_any_run(
    tmp_path, patch, capsys, start, command
):
    template = shimkit.make_site(tmp_path / "template")
    install(template)
    before = shimkit.tree(template.root)
    if start == "applied":
        apply_patch(template, read_patch(patch))
    kill = ("--revert",) if start == "applied" else (str(patch),)
    mixed = 0
    for step in range(1, 60):
        root = tmp_path / f"{step}"
        shutil.copytree(template.root, root)
        status = shimkit.run_killed(step, *kill, "--torch", str(root))
        patched = [shimkit.tree(root).get(path) != before.get(path) for path in FILES]
        if any(patched) and not all(patched):
            mixed += 1
            code, said, _ = run(capsys, "--check", "--torch", root)
            assert (code, "worlds.patch: half done" in said) == (1, True)
            code, said, _ = run(capsys, "--torch", root, *command)
            assert (code, "it is taken back." in said) == (0, True)
            if command:
                assert run(capsys, "--torch", root)[0] == 0
            assert shimkit.tree(root) == before
            assert run(capsys, "--check", "--torch", root)[0] == 0
        if status == 0:
            break
    assert status == 0
    assert mixed


def test_a_dry_run_over_a_half_done_one_says_so(tmp_path, patch):
    site = shimkit.make_site(tmp_path / "site")
    before = shimkit.tree(site.root)
    step = 0
    while (found := receipt_of(site)) is None or found["state"] != "applying":
        step += 1
        shutil.rmtree(site.root)
        site = shimkit.make_site(tmp_path / "site")
        assert shimkit.run_killed(step, str(patch), "--torch", str(site.root)) == -9
    half = shimkit.tree(site.root)
    for act in (
        lambda: apply_patch(site, read_patch(patch), dry_run=True),
        lambda: revert_patch(site, dry_run=True),
    ):
        with pytest.raises(InstallError, match="ended half way"):
            act()
    assert shimkit.tree(site.root) == half
    assert "is taken back" in revert_patch(site).says
    assert shimkit.tree(site.root) == before
