"""m8d-post-setup on small torches that were installed by hand; with pip itself: tests/integration."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
from kits import shimkit

from multiworld.cli.exits import EXIT_CODES, INTERRUPTED
from multiworld.cli.main import main as multiworld_main
from multiworld.cli.post_setup import main
from multiworld.errors import InstallError
from multiworld.shim.install import LoaderState, inspect, install, uninstall
from multiworld.shim.loader import LOADER_ENTRY, LOADER_FOLDER, LOADER_VERSION, loader_text
from multiworld.shim.receipt import BACKUP_FOLDER, RECEIPT, kept_files
from multiworld.shim.torchsite import ASIDE, TorchSite, find_site, lies_outside

FAILED = EXIT_CODES[InstallError]


@pytest.fixture
def site(tmp_path) -> TorchSite:
    return shimkit.make_site(tmp_path / "site-packages")


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


# --- install, check, uninstall


LINKS = ["torch/distributed/multiworld", "torch/distributed/multiworld/__pycache__", "torch/distributed"]


@pytest.fixture
def victim(tmp_path) -> Path:
    """A folder outside of torch, with files that a run would remove if they were its own."""
    folder = tmp_path / "victim"
    for path in ("empty/empty", "multiworld/empty"):
        (folder / path).mkdir(parents=True)
    for path in ("file", f"file{ASIDE}", "__init__.cpython-311.pyc"):
        (folder / path).write_bytes(b"theirs")
    return folder


@pytest.mark.parametrize("arguments", [(), ("--force",), ("--uninstall",), ("--uninstall", "--force")])
@pytest.mark.parametrize("link", [LINKS[0], LINKS[2]])
def test_a_link_out_of_torch_is_refused_before_anything_is_removed(site, victim, capsys, link, arguments):
    shutil.rmtree(site.root / link, ignore_errors=True)
    (site.root / link).symlink_to(victim)
    before = shimkit.tree(victim), shimkit.tree(site.root)
    code, _, error = run(capsys, "--torch", site.root, *arguments)
    assert (code, (shimkit.tree(victim), shimkit.tree(site.root))) == (FAILED, before)
    assert "symbolic link" in error


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("link", LINKS)
def test_uninstalling_removes_nothing_through_a_link(site, victim, capsys, link, gone):
    install(site)
    if link != LINKS[1]:
        # The link leads to a loader of another torch.
        shutil.copytree(site.root / link, victim, dirs_exist_ok=True)
        shutil.rmtree(site.root / link)
    (site.root / link).symlink_to(victim)
    if gone:
        (site.torch / "__init__.py").unlink()
    before = sorted(victim.rglob("*"))
    run(capsys, "--torch", site.root, "--uninstall")
    assert sorted(victim.rglob("*")) == before
    assert (site.root / LOADER_ENTRY).exists() is (link != LINKS[1])


def test_a_torch_that_is_reached_by_links_is_installed_into(tmp_path, capsys):
    """As with a linked environment, /usr/lib64, a linked package, and single files that uv links."""
    site = shimkit.make_site(tmp_path / "store")
    site.torch.rename(tmp_path / "package")
    site.torch.symlink_to(tmp_path / "package")
    file = site.torch / "distributed" / "rendezvous.py"
    file.rename(tmp_path / "kept.py")
    file.symlink_to(tmp_path / "kept.py")
    (tmp_path / "lib64").symlink_to(site.root)
    before = shimkit.tree(tmp_path)
    assert run(capsys, "--torch", tmp_path / "lib64")[0] == 0
    assert (tmp_path / "package/distributed/multiworld/__init__.py").exists()
    assert run(capsys, "--torch", tmp_path / "lib64", "--check")[0] == 0
    assert run(capsys, "--torch", tmp_path / "lib64", "--uninstall")[0] == 0
    assert shimkit.tree(tmp_path) == before


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_installing_adds_one_file_and_one_line_and_uninstalling_leaves_nothing(tmp_path, end):
    site = shimkit.make_site(tmp_path, end=end)
    before = shimkit.tree(tmp_path)
    assert install(site)
    after = shimkit.tree(tmp_path)
    record = f"{site.dist_info.name}/RECORD"
    assert set(after) - set(before) == {LOADER_ENTRY, LOADER_FOLDER}
    assert {path for path in before if before[path] != after[path]} == {record}
    assert after[record] == before[record] + shimkit.row(LOADER_ENTRY, loader_text(), end).encode()
    assert inspect(site).fine
    assert not install(site)
    assert shimkit.tree(tmp_path) == after
    assert uninstall(site)
    assert shimkit.tree(tmp_path) == before
    assert not uninstall(site)


def test_what_python_and_pip_made_of_it_goes_too(site):
    install(site)
    cache = site.root / LOADER_FOLDER / "__pycache__"
    cache.mkdir()
    for tag in ("cpython-310", "cpython-311.opt-1"):
        (cache / f"__init__.{tag}.pyc").write_bytes(b"")
    with site.record_path.open("ab") as file:
        file.write(f"{LOADER_FOLDER}/__pycache__/__init__.cpython-310.pyc,,\r\n".encode())
    assert inspect(site).fine
    uninstall(site)
    assert not (site.root / LOADER_FOLDER).exists()
    assert b"multiworld" not in site.record_path.read_bytes()


def test_a_path_that_is_not_utf_8_is_written_escaped(tmp_path, capsys):
    site = shimkit.make_site(tmp_path / os.fsdecode(b"v\xff"))
    code, said, _ = run(capsys, "--torch", site.root)
    assert (code, f"{tmp_path}/v\\udcff/torch: torch.distributed.multiworld is installed." in said) == (
        0,
        True,
    )
    assert run(capsys, "--check", "--torch", site.root)[0] == 0


def test_check_prints_what_is_there_and_what_to_do(site, capsys):
    code, said, _ = run(capsys, "--check", "--torch", site.torch)
    assert code == 1
    assert "torch 2.6.0+cu124" in said
    assert "Run m8d-post-setup to install it." in said
    code, said, _ = run(capsys, "--torch", site.root)
    assert (code, said) == (0, f"{site.torch}: torch.distributed.multiworld is installed.\n")
    code, said, _ = run(capsys, "--check", "--torch", site.root)
    assert code == 0
    assert "torch.distributed.multiworld is installed." in said
    assert run(capsys, "--torch", site.root)[1].endswith("is there already.\n")
    code, said, _ = run(capsys, "--check", "--json", "--torch", site.root)
    told = json.loads(said)
    assert code == 0
    assert told == {
        "torch": str(site.torch), "torch_version": "2.6.0+cu124", "state": "current", "recorded": True,
        "loader_version": LOADER_VERSION, "expected_version": LOADER_VERSION, "next_step": "",
        "says": "torch.distributed.multiworld is installed", "patch_file": None,
    }  # fmt: skip
    assert run(capsys, "--uninstall", "--torch", site.root)[1].endswith("is removed.\n")
    assert run(capsys, "--uninstall", "--torch", site.root)[1].endswith("is not there.\n")


def set_state(site: TorchSite, state: LoaderState) -> None:
    install(site)
    place = site.root / LOADER_ENTRY
    if state is LoaderState.UNRECORDED:
        record = site.record()
        record.restore(LOADER_ENTRY, None)
        site.change({}, record)
    elif state is LoaderState.DANGLING:
        shutil.rmtree(place.parent)
    elif state is LoaderState.OUTDATED:
        place.write_bytes(loader_text().replace(b"loader 2 ", b"loader 1 ", 1))
    elif state is LoaderState.CHANGED:
        place.write_bytes(loader_text() + b"print()\n")
    elif state is LoaderState.FOREIGN:
        place.write_bytes(b"# torch's own, one day\n")


@pytest.mark.parametrize("state", [LoaderState.UNRECORDED, LoaderState.DANGLING, LoaderState.OUTDATED])
def test_what_an_ended_run_or_an_upgrade_left_is_named_and_repaired(site, state, capsys):
    before = shimkit.tree(site.root)
    set_state(site, state)
    assert inspect(site).state is state
    code, said, _ = run(capsys, "--check", "--torch", site.root)
    assert code == 1
    assert "Run m8d-post-setup again" in said
    assert install(site)
    assert inspect(site).fine
    set_state(site, state)
    assert uninstall(site)
    assert shimkit.tree(site.root) == before


@pytest.mark.parametrize("state", [LoaderState.CHANGED, LoaderState.FOREIGN])
def test_what_is_not_ours_is_left_alone(site, state, capsys):
    set_state(site, state)
    before = shimkit.tree(site.root)
    assert inspect(site).state is state
    for arguments in ((), ("--uninstall",)):
        code, _, said = run(capsys, "--torch", site.root, *arguments)
        assert code == FAILED
        assert "only what m8d-post-setup itself wrote" in said
    assert shimkit.tree(site.root) == before
    if state is LoaderState.CHANGED:
        assert run(capsys, "--force", "--torch", site.root)[0] == 0
        assert inspect(site).fine
    else:
        assert run(capsys, "--force", "--torch", site.root)[0] == FAILED


def test_a_module_of_that_name_is_foreign(site):
    (site.torch / "distributed/multiworld.py").write_text("")
    assert inspect(site).state is LoaderState.FOREIGN
    (site.torch / "distributed/multiworld.py").unlink()
    (site.root / LOADER_FOLDER).mkdir()
    assert inspect(site).state is LoaderState.ABSENT
    (site.root / LOADER_FOLDER / "data.txt").write_text("")
    assert inspect(site).state is LoaderState.FOREIGN


def test_a_torch_that_was_upgraded_says_what_to_do(site):
    """pip takes the loader away with the old torch; where RECORD had been restored it stays behind."""
    install(site)
    old = site.dist_info
    shutil.rmtree(site.root / LOADER_FOLDER)
    shutil.rmtree(old)
    (site.torch / "version.py").write_text("__version__ = '2.7.0'\n")
    new = site.root / "torch-2.7.0.dist-info"
    new.mkdir()
    (new / "METADATA").write_bytes(shimkit.METADATA)
    (new / "RECORD").write_text("torch/__init__.py,,\n")
    found = inspect(find_site(site.root))
    assert (found.state, found.torch_version) == (LoaderState.ABSENT, "2.7.0")
    assert "an upgrade of torch took it away" in found.says
    assert "m8d-post-setup" in found.next_step


@pytest.mark.parametrize("edited", [False, True])
def test_what_is_left_where_conda_has_removed_torch_can_be_uninstalled(site, capsys, edited):
    """conda removes what its own list names; the rest of RECORD is nothing to it."""
    (site.dist_info / "INSTALLER").write_text("conda\n")
    assert "--uninstall before conda removes" in run(capsys, "--torch", site.root)[1]
    for path in shimkit.FILES:
        (site.root / path).unlink()
    shutil.rmtree(site.dist_info)
    if edited:
        (site.root / LOADER_ENTRY).write_bytes(loader_text() + b"print()\n")
    code, said, _ = run(capsys, "--uninstall", "--torch", site.root)
    assert (code, (site.root / LOADER_ENTRY).exists()) == ((FAILED, True) if edited else (0, False))
    if not edited:
        assert said.endswith("is removed; torch itself was gone.\n")
        assert not site.torch.exists()
        assert run(capsys, "--uninstall", "--torch", site.root)[0] == FAILED


@pytest.mark.parametrize("relative", [False, True])
def test_what_is_left_is_found_by_the_folder_of_the_package_too(site, capsys, monkeypatch, relative):
    install(site)
    for path in shimkit.FILES:
        (site.root / path).unlink()
    monkeypatch.chdir(site.torch)
    folder = "." if relative else site.torch
    code, said, _ = run(capsys, "--uninstall", "--torch", folder)
    assert (code, (site.root / LOADER_ENTRY).exists()) == (0, False)
    assert said.endswith("is removed; torch itself was gone.\n")
    assert "there is no torch" in run(capsys, "--uninstall", "--torch", site.torch)[2]


@pytest.mark.parametrize("relative", [False, True])
def test_a_folder_that_held_nothing_but_torch_stays(tmp_path, capsys, monkeypatch, relative):
    site = shimkit.make_site(tmp_path / "v/lib/python3/site-packages")
    install(site)
    for path in shimkit.FILES:
        (site.root / path).unlink()
    shutil.rmtree(site.dist_info)
    monkeypatch.chdir(site.root)
    assert run(capsys, "--uninstall", "--torch", "." if relative else site.root)[0] == 0
    assert shimkit.tree(site.root) == {}
    assert site.root.is_dir()


def test_a_hint_about_conda_is_for_conda_alone(site, capsys):
    (site.dist_info / "INSTALLER").write_text("pip\n")
    assert run(capsys, "--torch", site.root)[1].endswith("multiworld is installed.\n")


# --- finding torch


def test_no_torch_and_no_distribution_are_told_apart(tmp_path, capsys, site):
    assert "there is no torch in" in run(capsys, "--torch", tmp_path / "nowhere")[2]
    assert find_site(site.torch) == find_site(site.root) == site
    site.record_path.rename(tmp_path / "RECORD")
    code, _, said = run(capsys, "--check", "--torch", site.root)
    assert code == FAILED
    assert "has no RECORD" in said
    assert "Install torch with pip" in said
    shutil.rmtree(site.dist_info)
    assert "editable" in run(capsys, "--torch", site.root)[2]


def test_other_distributions_are_not_taken_for_torch_and_two_torches_are_refused(site, capsys):
    (site.root / "torch-geometric-2.0.dist-info").mkdir()
    (site.root / "torch-geometric-2.0.dist-info/METADATA").write_text(
        "Name: torch-geometric\n\nName: torch\n"
    )
    (site.root / "torch-9.dist-info").mkdir()
    assert find_site(site.root) == site
    (site.root / "torch-9.dist-info/METADATA").write_text("Name: Torch\n")
    assert "one torch is installed in one place" in run(capsys, "--torch", site.root)[2]


def test_the_default_is_the_torch_that_this_interpreter_would_import(site, monkeypatch, capsys):
    monkeypatch.setattr("multiworld.shim.torchsite.find_torch", lambda: site.torch)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert run(capsys)[0] == 0
    assert inspect(site).fine
    monkeypatch.setattr("multiworld._c10d.marker.find_spec", lambda _name: None)
    monkeypatch.undo()
    monkeypatch.setattr("multiworld._c10d.marker.find_spec", lambda _name: None)
    code, _, said = run(capsys)
    assert code == FAILED
    assert "name its folder with --torch" in said


@pytest.mark.parametrize(
    ("place", "prefix", "base", "expected"),
    [
        ("/usr/lib/python3/dist-packages/torch", "/home/u/v", "/usr", True),
        ("/home/u/.local/lib/python3/site-packages/torch", "/home/u/v", "/usr", True),
        ("/home/u/v/lib/python3/site-packages/torch", "/home/u/v", "/usr", False),
        ("/usr/v/lib/python3/site-packages/torch", "/usr/v", "/usr", False),
        ("/usr/lib/python3/dist-packages/torch", "/usr", "/usr", False),
        ("/home/u/.local/lib/python3/site-packages/torch", "/usr", "/usr", False),
        ("/srv/target/torch", "/home/u/v", "/usr", True),  # PYTHONPATH, a .pth file
    ],
)
def test_which_torch_lies_outside_of_a_virtual_environment(place, prefix, base, expected):
    assert lies_outside(Path(place), Path(prefix), Path(base)) is expected


@pytest.mark.parametrize("mark", ["pyvenv.cfg", "conda-meta/history"])
def test_the_torch_of_an_environment_inside_of_another_one_lies_outside_of_that(tmp_path, mark):
    outer, base = tmp_path / "outer", tmp_path / "usr"
    places = {each: each / "lib/python3/site-packages/torch" for each in (outer, outer / "inner")}
    for environment, place in places.items():
        place.mkdir(parents=True)
        (environment / mark).parent.mkdir(exist_ok=True)
        (environment / mark).write_text("")
    assert [lies_outside(place, outer, base) for place in places.values()] == [False, True]
    assert [lies_outside(place, outer / "inner", base) for place in places.values()] == [True, False]
    assert [lies_outside(place, outer, outer) for place in places.values()] == [False, False]


@pytest.mark.parametrize("linked", ["torch", "dist-info"])
@pytest.mark.parametrize("more", [(), ("--uninstall",)])
def test_a_virtual_environment_does_not_change_what_is_linked_into_it(
    site, tmp_path, monkeypatch, capsys, linked, more
):
    own = tmp_path / "v"
    inside = own / "lib/site-packages"
    shutil.copytree(site.root, inside)
    gone = inside / ("torch" if linked == "torch" else site.dist_info.name)
    shutil.rmtree(gone)
    gone.symlink_to(site.root / gone.name)
    monkeypatch.setattr(sys, "prefix", str(own))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr("multiworld.shim.torchsite.find_torch", lambda: inside / "torch")
    before = shimkit.tree(site.root)
    code, _, said = run(capsys, *more)
    assert code == FAILED
    assert f"{gone} is not in this virtual environment" in said
    assert f"--torch {inside}" in said
    assert shimkit.tree(site.root) == before
    assert run(capsys, "--torch", inside)[0] == 0


def test_a_version_that_cannot_be_read_is_told(site, capsys):
    (site.torch / "version.py").write_text("version = 2\n")
    assert "says no version" in run(capsys, "--check", "--torch", site.root)[2]
    (site.torch / "version.py").write_bytes(b"\xff")
    assert "cannot be read" in run(capsys, "--check", "--torch", site.root)[2]


# --- what can go wrong


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("which", ["__init__.py" + ASIDE, "RECORD" + ASIDE])
def test_a_folder_that_cannot_be_written_is_told_and_nothing_is_changed(
    site, monkeypatch, capsys, code, which
):
    before = shimkit.tree(site.root)
    real = Path.open

    def refusing(self, mode="r", *rest, **more):
        if "w" in mode and self.name == which:
            raise OSError(code, os.strerror(code), str(self))
        return real(self, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", refusing)
    status, _, said = run(capsys, "--torch", site.root)
    assert status == FAILED
    assert os.strerror(code) in said
    assert "nothing was changed" in said
    full = code in {errno.ENOSPC, errno.EDQUOT}
    assert ("Make room there and run it again" in said, "use a venv of your own" in said) == (full, not full)
    monkeypatch.undo()
    assert shimkit.tree(site.root) == before


@pytest.fixture
def unreadable(monkeypatch):
    """Return a function that makes a folder, and what is in it, unreadable; chmod does not keep root out."""

    def make(folder: Path) -> None:
        def guarded(real, *, itself: bool = False):
            def function(path, *arguments, **options):
                if folder in Path(path).parents or (itself and Path(path) == folder):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
                return real(path, *arguments, **options)

            return function

        for name in ("stat", "open", "read_bytes", "read_text"):
            monkeypatch.setattr(Path, name, guarded(getattr(Path, name)))
        monkeypatch.setattr(Path, "iterdir", guarded(Path.iterdir, itself=True))

    return make


@pytest.mark.parametrize("which", ["root", "torch", "dist_info"])
@pytest.mark.parametrize("more", [(), ("--check",), ("--uninstall",), ("--revert",)])
def test_what_cannot_be_read_is_told(site, unreadable, capsys, which, more):
    unreadable(getattr(site, which))
    for named in (site.root, site.torch):
        code, _, said = run(capsys, "--torch", named, *more)
        assert code == FAILED
        assert "cannot be read: Permission denied" in said
        assert "Run it as a user who may read it" in said


@pytest.mark.parametrize("more", [(), ("--check",), ("--uninstall",)])
def test_a_folder_of_torch_that_cannot_be_read_is_told(site, unreadable, capsys, more):
    unreadable(site.torch / "distributed")
    code, _, said = run(capsys, "--torch", site.root, *more)
    assert (code, "cannot be read: Permission denied" in said) == (FAILED, True)


@pytest.mark.parametrize("more", [(), ("--check",), ("--revert",), ("--revert", "--force")])
def test_a_backup_that_cannot_be_read_is_told_and_not_discarded(site, unreadable, capsys, more):
    (site.root / RECEIPT).parent.mkdir()
    (site.root / RECEIPT).write_text("{}")
    unreadable(site.root / BACKUP_FOLDER)
    code, _, said = run(capsys, "--torch", site.root, *more)
    assert (code, "receipt.json cannot be read: Permission denied" in said) == (FAILED, True)


def test_a_backup_folder_that_cannot_be_listed_is_told(site, monkeypatch):
    (site.root / BACKUP_FOLDER).mkdir()

    def refusing(place):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(InstallError, match="m8d-backup cannot be read"):
        kept_files(site)


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o700])
def test_who_may_read_torch_may_read_what_is_added_whatever_the_umask_is(site, mode):
    (site.torch / "distributed").chmod(mode)
    before = os.umask(0o077)
    try:
        install(site)
    finally:
        os.umask(before)
    place = site.root / LOADER_ENTRY
    assert stat.S_IMODE(place.parent.stat().st_mode) == mode
    assert stat.S_IMODE(place.stat().st_mode) == 0o644


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_for_a_user(site, capsys):
    (site.torch / "distributed").chmod(0o555)
    try:
        status, _, said = run(capsys, "--torch", site.root)
    finally:
        (site.torch / "distributed").chmod(0o755)
    assert status == FAILED
    assert "cannot be written: Permission denied" in said


@pytest.mark.parametrize("more", [(), ("--uninstall",)])
def test_with_nothing_to_do_a_file_system_that_is_read_only_is_fine(site, monkeypatch, capsys, more):
    """It refuses to remove what is not there, too."""
    if not more:
        assert run(capsys, "--torch", site.root)[0] == 0

    def refusing(self, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "unlink", refusing)
    monkeypatch.setattr(Path, "replace", refusing)
    status, _, said = run(capsys, "--torch", site.root, *more)
    assert status == 0, said


@pytest.mark.parametrize(("code", "step"), [(errno.EACCES, "its permissions"), (errno.ENOSPC, "Make room")])
def test_a_move_that_fails_says_that_the_same_run_goes_on(site, monkeypatch, code, step):
    def refusing(self, target):
        raise OSError(code, os.strerror(code), str(self))

    monkeypatch.setattr(Path, "replace", refusing)
    with pytest.raises(InstallError, match=f"{step}.* goes on from there"):
        install(site)
    monkeypatch.undo()
    assert install(site)
    assert not list(site.root.rglob(f"*{ASIDE}"))


def test_two_runs_at_once_are_refused(site):
    handle = os.open(site.dist_info, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(InstallError, match="another m8d-post-setup is at work"):
            install(site)
    finally:
        os.close(handle)
    assert install(site)


def test_a_lock_that_the_file_system_does_not_give_is_told(site, monkeypatch, capsys):
    def refusing(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refusing)
    code, _, said = run(capsys, "--torch", site.root)
    assert code == FAILED
    assert f"{site.dist_info} cannot be locked: {os.strerror(errno.ENOLCK)}" in said


@pytest.mark.parametrize("command", [main, lambda arguments: multiworld_main(["post-setup", *arguments])])
def test_ctrl_c_is_a_line_and_an_exit_code(site, monkeypatch, capsys, command):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(fcntl, "flock", interrupted)
    assert command(["--torch", str(site.root)]) == INTERRUPTED == 130
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith("post-setup: stopped by Ctrl-C; run the same again.\n")


def test_the_file_modes_are_those_of_a_library(site):
    site.record_path.chmod(0o640)
    install(site)
    assert (site.root / LOADER_ENTRY).stat().st_mode & 0o777 == 0o644
    assert site.record_path.stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_leaves_files_to_the_owner_of_the_environment(site):
    for path in (site.root, *site.root.rglob("*")):
        os.chown(path, 12345, 12345)
    install(site)
    for path in (site.record_path, site.root / LOADER_FOLDER, site.root / LOADER_ENTRY):
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12345)


def test_a_run_that_is_killed_at_any_step_is_finished_by_the_next(tmp_path):
    """kill -9 just before each change of the disk, for both directions."""
    template = shimkit.make_site(tmp_path / "template")
    before = shimkit.tree(template.root)
    for start, command in (("absent", ()), ("installed", ("--uninstall",))):
        for step in range(1, 40):
            root = tmp_path / f"{start}-{step}"
            shutil.copytree(template.root, root)
            site = find_site(root)
            if start == "installed":
                install(site)
            status = shimkit.run_killed(step, "--torch", str(root), *command)
            assert inspect(site).state in {
                LoaderState.ABSENT, LoaderState.CURRENT, LoaderState.UNRECORDED, LoaderState.DANGLING,
            }  # fmt: skip
            install(site)
            assert inspect(site).fine
            assert not list(root.rglob(f"*{ASIDE}"))
            uninstall(site)
            assert shimkit.tree(root) == before
            if status == 0:
                break
        assert status == 0
        assert step > 3, "the run was killed at no step"


# --- arguments


@pytest.mark.parametrize(
    "arguments",
    [
        ("x.patch", "--check"), ("x.patch", "--revert"), ("--dry-run",), ("--json",), ("--for-torch", "2.6.0"),
        ("--check", "--force"), ("x.patch", "--force"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_go_together_are_refused(site, capsys, arguments):
    code, _, said = run(capsys, *arguments, "--torch", site.root)
    assert code == FAILED
    assert said.startswith("m8d-post-setup: ")


def test_help_says_what_is_done(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert "pip uninstall torch" in said
    assert "PATCHFILE" in said


def test_exit_codes_are_unique():
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert not {0, 1, 2, INTERRUPTED} & set(EXIT_CODES.values())
