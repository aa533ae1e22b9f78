"""Parts of secure runs: where certificates come from, their files, and what is left of them."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from multiworld._net.tls.authority import Authority
from multiworld._net.tls.credentials import Credentials
from multiworld.run.errors import ArgumentsError, RunError
from multiworld.run.launcher import launch
from multiworld.run.nodes.secure_rendezvous import secure_handler
from multiworld.run.options import parse
from multiworld.run.secure import authority_folder, key_folder
from multiworld.run.secure.certificates import Certificates
from multiworld.run.secure.commands import make_authority
from multiworld.run.secure.key_folder import KeyFolder, remove_abandoned
from multiworld.run.secure.opening import open_secure
from multiworld.run.secure.source import CertificateSource, choose_source
from multiworld.run.workers.orphan_reaper import OrphanReaper

PATIENCE = 60.0


@pytest.mark.parametrize(
    ("secure", "authority", "files", "nodes", "source"),
    [
        (False, None, False, 4, None),
        (True, None, False, 1, CertificateSource("run")),
        (False, None, True, 4, CertificateSource("files")),
        (True, None, True, 4, CertificateSource("files")),
        (False, "/a", False, 1, CertificateSource("folder", "/a")),
        (True, "/a", False, 4, CertificateSource("folder", "/a")),
    ],
)
def test_where_certificates_come_from(secure, authority, files, nodes, source):
    found = choose_source(secure=secure, authority=authority, files=files, nodes=nodes, run_id="run-1")
    assert found == source


@pytest.mark.parametrize(
    ("authority", "files", "nodes", "says"),
    [(None, False, 2, "make-authority DIR"), ("/a", True, 1, "from one place")],
)
def test_a_source_that_cannot_serve_is_refused(authority, files, nodes, says):
    with pytest.raises(ArgumentsError, match=says):
        choose_source(secure=True, authority=authority, files=files, nodes=nodes, run_id="run-1")


@pytest.mark.parametrize(
    ("backend", "given", "taken"),
    [
        ("etcd", {"cacert": "/ca.pem"}, True),
        ("etcd", {"ca_cert": "/ca.pem"}, False),
        ("etcd", {"cacert": ""}, False),
        ("etcd-v2", {"ca_cert": "/ca.pem"}, True),
        ("etcd-v2", {"cacert": "/ca.pem"}, False),
    ],
)
def test_an_etcd_is_known_by_the_authority_that_torch_reads(backend, given, taken):
    """Torch ignores the other backend's name, and then any server would do."""
    parameters = RendezvousParameters(backend, "host:2379", "run", 1, 2, protocol="https", **given)
    with contextlib.ExitStack() as parts:
        if taken:
            assert secure_handler(parameters, parts, lambda asked: asked) is parameters
        else:
            with pytest.raises(ArgumentsError, match=f"--rdzv-backend {backend} in a secure run"):
                secure_handler(parameters, parts, lambda asked: asked)


def test_runs_of_several_nodes_that_share_an_authority_have_ids():
    with pytest.raises(ArgumentsError, match=r"--authority /a on up to 2 nodes.*--rdzv-id"):
        choose_source(secure=False, authority="/a", files=False, nodes=2, run_id="none")
    alone = choose_source(secure=False, authority="/a", files=False, nodes=1, run_id="none")
    assert alone == CertificateSource("folder", "/a")
    own = choose_source(secure=False, authority=None, files=True, nodes=2, run_id="none")
    assert own == CertificateSource("files")


def test_a_launcher_of_several_nodes_with_an_authority_wants_an_id(tmp_path):
    """The options reach the rule: nothing is started, and no file of the authority is read."""
    options = ["--nnodes", "2", "--rdzv-endpoint", "h:29400", "--authority", str(tmp_path / "none"), "s.py"]
    with pytest.raises(ArgumentsError, match="with --rdzv-id none"):
        launch(parse(options), io.StringIO())


def test_the_folder_of_keys_is_private_and_goes(tmp_path):
    before = os.umask(0)
    try:
        keys = KeyFolder(tmp_path / "launcher")
        path = keys.write("a.pem", b"1")
    finally:
        os.umask(before)
    assert keys.write("a.pem", b"2") == path
    assert path.read_bytes() == b"2"
    assert [each.name for each in keys.path.iterdir()] == ["a.pem"]
    assert [each.stat().st_mode & 0o777 for each in (path, keys.path, keys.path.parent)] == [
        0o600,
        0o700,
        0o700,
    ]
    keys.remove()
    keys.remove()
    assert list(tmp_path.iterdir()) == []


def test_keys_beside_something_else_leave_it(tmp_path):
    keys = KeyFolder(tmp_path / "launcher")
    other = tmp_path / "launcher" / "control.sock"
    other.touch()
    keys.remove()
    assert [*tmp_path.rglob("*")] == [other.parent, other]


def test_only_abandoned_keys_are_removed_by_another_launcher(tmp_path):
    keys = KeyFolder(tmp_path)
    keys.write("a.pem", b"1")
    assert not remove_abandoned(tmp_path)
    assert [each.name for each in keys.path.iterdir()] == ["a.pem"]
    os.close(keys._lock)  # as the kernel does when a launcher is killed
    assert remove_abandoned(tmp_path)
    assert not keys.path.exists()
    assert remove_abandoned(tmp_path)
    keys._lock = -1


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (tmp_path / key_folder.NAME).symlink_to(elsewhere)
    assert not remove_abandoned(tmp_path)
    assert (elsewhere / "file").exists()


def test_the_reaper_removes_keys_and_nothing_else(tmp_path):
    folder = tmp_path / "a folder of\nkeys"
    folder.mkdir()
    (folder / "a.pem").touch()
    (tmp_path / "other").touch()
    reaper = OrphanReaper(1.0, str(folder))
    reaper.remove_keys()
    reaper.remove_keys()
    assert [each.name for each in tmp_path.iterdir()] == ["other"]
    OrphanReaper(1.0).remove_keys()


def credentials(variables):
    return Credentials(*(variables[f"M8D_TLS_{name}"] for name in ("CERT", "KEY", "CA")))


@pytest.fixture
def made(tmp_path):
    """Makes certificates of so many days, of a folder that goes with the test."""
    keys = KeyFolder(tmp_path / "launcher")
    opened, told = [], []

    def make(days, authority_days=1.0):
        authority = Authority.create("job", days=authority_days)
        ca = keys.write("ca.pem", authority.certificate)
        opened.append(Certificates(authority, keys, ca, days=days, note=lambda *said: told.append(said)))
        return opened[-1]

    make.told = told
    make.keys = keys
    yield make
    for each in opened:
        each.close()
    keys.remove()
    assert "m8d-run-certificates" not in {each.name for each in threading.enumerate()}


def until(holds, what):
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_each_start_of_a_worker_has_another_key(made):
    certificates = made(0.5)
    first = certificates.worker(3, "trainer", 1)
    before = Path(first["M8D_TLS_KEY"]).read_bytes()
    assert certificates.worker(3, "trainer", 1) == first
    assert Path(first["M8D_TLS_KEY"]).read_bytes() != before
    own = credentials(first)
    assert (own.identity.job, own.identity.subject) == ("job", "rank 3 trainer:1")
    assert 0 < own.until - time.time() - 0.5 * 86400 + 60 <= 60


def test_certificates_end_no_later_than_their_authority(made):
    certificates = made(30.0, authority_days=0.25)
    assert credentials(certificates.issue("a", "a")).until <= time.time() + 0.25 * 86400


@pytest.mark.parametrize("ago", [1, 3600])
def test_an_authority_that_has_ended_signs_nothing(made, monkeypatch, ago):
    certificates = made(0.5)
    monkeypatch.setattr(Authority, "until", time.time() - ago)
    with pytest.raises(RunError, match=r"authority's certificate was valid until .* UTC"):
        certificates.worker(0, "trainer", 0)


def test_what_a_certificate_cannot_name_is_told(made, monkeypatch):
    certificates = made(0.5)
    monkeypatch.setattr(certificates, "_addresses", ("münchen.de",))
    with pytest.raises(RunError, match=r"no certificate for 'rank 0 trainer:0' on .*DNSName"):
        certificates.worker(0, "trainer", 0)


@pytest.mark.parametrize(
    ("role", "kept"),
    [("训练" * 20, "训练" * 9 + "训"), ("é" * 40, "é" * 28), ("\udcff", "?:0")],
    ids=["of three", "of two", "no text"],
)
def test_a_common_name_is_cut_to_the_bytes_it_may_have(made, role, kept):
    own = credentials(made(0.5).worker(0, role, 0))
    assert own.identity.subject == f"rank 0 {kept}"


def test_a_name_for_the_page_that_browsers_send_otherwise_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("M8D_WEB_HOSTS", "page.example, münchen.de")
    with (
        contextlib.ExitStack() as parts,
        pytest.raises(ArgumentsError, match=r"M8D_WEB_HOSTS: münchen\.de.*xn--"),
    ):
        open_secure(CertificateSource("run"), "job", tmp_path, parts, lambda *_: None, days=1.0)


def test_all_are_renewed_at_half_their_time(made):
    began = time.time()
    certificates = made(4 / 86400)
    own = [credentials(certificates.issue(name, name)) for name in ("a", "b")]
    first = [each.until for each in own]
    until(lambda: all(each.until > old for each, old in zip(own, first, strict=True)), "both are renewed")
    assert time.time() - began > 1.9
    assert next(text for _, text in made.told) == "certificates renewed: 2"


def test_a_renewal_that_fails_is_told_and_tried_again(made):
    # One of a second, which is cut to whole seconds, may have ended whenever it is looked at.
    certificates = made(4 / 86400)
    own = credentials(certificates.issue("a", "a"))
    first = own.until
    obstacle = made.keys.path / "a.pem.new"
    obstacle.mkdir()
    until(lambda: any("tried again" in text for _, text in list(made.told)), "the failure is told")
    obstacle.rmdir()
    until(lambda: own.until > first, "it is renewed")


def test_an_authority_is_made_once_and_read(tmp_path, capsys):
    folder = tmp_path / "a" / "b"
    assert make_authority([str(folder), "--days", "2"]) == 0
    assert str(folder) in capsys.readouterr().out
    key = folder / authority_folder.KEY
    assert key.stat().st_mode & 0o777 == 0o600
    assert not authority_folder.readable_by_others(folder)
    before = key.read_bytes()
    assert make_authority([str(folder)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert key.read_bytes() == before
    assert authority_folder.read(folder, "job").job == "job"
    key.chmod(0o644)
    assert authority_folder.readable_by_others(folder)
    with pytest.raises(SystemExit):
        make_authority([str(folder), "--days", "nan"])


@pytest.mark.parametrize("text", [b"", b"-----BEGIN CERTIFICATE-----\nx\n"])
def test_what_is_no_authority_is_refused(tmp_path, text):
    authority_folder.make(tmp_path, days=1)
    (tmp_path / authority_folder.CERTIFICATE).write_bytes(text)
    with pytest.raises(ArgumentsError, match="PEM files of one authority"):
        authority_folder.read(tmp_path, "job")
