"""Worlds files: each rule that one can break, with its line; and no text at all that does anything else."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from multiworld.run.errors import PlanError
from multiworld.run.worldsfile import host_checks, positions
from multiworld.run.worldsfile.host_checks import check_backends, check_stores
from multiworld.run.worldsfile.load import load
from multiworld.run.worldsfile.parse import parse
from multiworld.run.worldsfile.positions import Positions
from multiworld.run.worldsfile.worlds_plan import PlannedMember

GOOD = """\
# who is there
[roles]
hub = 1
[roles.worker]
count = 8

[worlds.all]
members = [
  "hub:0",
  "worker:*",  # eight of them
]
backend = "cpu:gloo,cuda:NCCL"
store = "tcp://127.0.0.1:29500"
timeout = 30
hang_timeout = 0.5
device = "cuda:{local_rank}"

[worlds."w{i}"]
for = "worker"
members = ['hub:0', 'worker:{i}']
store = "file:///tmp/m8d/w{i}"
after = ["all"]
"""


def bad(text, line, *words):
    with pytest.raises(PlanError) as caught:
        parse(text, "x.toml")
    error = caught.value
    assert (error.path, error.line) == ("x.toml", line), error
    assert str(error).startswith(f"x.toml:{line}: " if line else "x.toml: ")
    assert error.value
    assert error.rule
    assert error.next_step
    for word in words:
        assert word in str(error), error
    return error


def test_a_good_file():
    plan = parse(GOOD, "good.toml")
    assert [(role.name, role.count, role.line) for role in plan.roles] == [("hub", 1, 3), ("worker", 8, 4)]
    everyone, first = plan.worlds[:2]
    assert everyone.members == (PlannedMember("hub", 0), *(PlannedMember("worker", i) for i in range(8)))
    assert (everyone.backend, everyone.timeout, everyone.hang_timeout) == ("cpu:gloo,cuda:nccl", 30, 0.5)
    assert (everyone.device, everyone.store) == ("cuda:{local_rank}", "tcp://127.0.0.1:29500")
    assert (everyone.line, first.line) == (7, 18)
    assert len(plan.worlds) == 9
    assert (first.name, first.members) == ("w0", (PlannedMember("hub", 0), PlannedMember("worker", 0)))
    assert (first.backend, first.timeout, first.device, first.after) == ("gloo", None, None, ("all",))
    assert plan.worlds[8].store == "file:///tmp/m8d/w7"


@pytest.mark.parametrize(
    ("roles", "line", "words"),
    [
        ("", 0, ["no roles"]),
        ("[roles]", 1, ["no roles"]),
        ("roles = 3", 1, ["roles is 3", "It is a table"]),
        ("[roles]\nhub = 0", 2, ["role 'hub': count 0", "from 1 to 100000"]),
        ("[roles]\nhub = true", 2, ["count True"]),
        ("[roles]\nhub = 1.0", 2, ["count 1.0"]),
        ("[roles]\na = 1\n'h u' = 1", 3, ["role 'h u'", "letters"]),
        ("[roles]\nhub = { count = 1, cuont = 2 }", 2, ["unknown key 'cuont' (did you mean 'count'?)"]),
        ("[roles.hub]\ncuont = 2", 2, ["unknown key 'cuont' (did you mean 'count'?)"]),
        ("[roles.hub]", 1, ["count is missing"]),
        ("[roles]\na = 60000\nb = 60000", 1, ["120000 workers", "at most 100000"]),
        ("[rolse]\nhub = 1", 1, ["unknown key 'rolse' (did you mean 'roles'?)"]),
        ("[roles]\nhub = 1\n[roles]\n", 3, ["TOML"]),
        ("[roles]\nhub = 1\nworker = \n", 3, ["TOML"]),
        ("[roles]\nhub = 1\nx = [\n\n", 5, ["TOML"]),
        ("a = " + "[" * 9999, 1, ["TOML"]),
        ("a = " + "1" * 9999, 1, ["TOML"]),
    ],
)
def test_roles_that_break_a_rule(roles, line, words):
    bad(roles, line, *words)


MEMBERS = 'members = ["hub:0", "worker:0"]\n'


@pytest.mark.parametrize(
    ("world", "line", "words"),
    [
        ("[worlds.w]", 4, ["world 'w' has no members"]),
        ("[worlds]\nw = 1", 5, ["worlds.w is 1", "It is a table"]),
        ("[[worlds.w]]\nmembers = []", 4, ["It is a table"]),
        ('[worlds.w]\nmembers = "hub:0"', 5, ["It is a list of texts"]),
        ("[worlds.w]\nmembers = [1, 2]", 5, ["It is a list of texts"]),
        ("[worlds.w]\nmembers = []", 5, ["has 0 members", "two members at least"]),
        ('[worlds.w]\nmembers = ["hub:0"]', 5, ["has 1 member.", "two members at least"]),
        ('[worlds.w]\nmembers = ["hub:*"]', 5, ["has 1 member."]),
        ('[worlds.w]\nmembers = ["hub:0", "worker"]', 5, ["member 'worker'", '"role:index"']),
        ('[worlds.w]\nmembers = ["hub:0", "worker:-1"]', 5, ["member 'worker:-1'"]),
        ('[worlds.w]\nmembers = ["hub:0", "worker:{i}"]', 5, ["member 'worker:{i}'"]),
        ('[worlds.w]\nmembers = [\n  "hub:0",\n  "worker:8",\n]', 7, ["'worker:8'", "indices are 0 to 7"]),
        ('[worlds.w]\nmembers = [\n"hub:1", "worker:0"]', 6, ["Role 'hub' has 1 worker: the index is 0"]),
        (
            '[worlds.w]\nmembers = ["hub:0",\n  "wroker:1"]',
            6,
            ["there is no role 'wroker' (did you mean 'worker'?)", "The roles are hub, worker"],
        ),
        ('[worlds.w]\nmembers = [\n"hub:0",\n"worker:1",\n"worker:*"]', 8, ["worker:1 is a member twice"]),
        ('[worlds.w]\nmembers = ["hub:0", "worker:1", "worker:01"]', 5, ["worker:1 is a member twice"]),
        (f"[worlds.w]\nmember = []\n{MEMBERS}", 5, ["unknown key 'member' (did you mean 'members'?)"]),
        (f"[worlds.w]\n{MEMBERS}zzz = 1", 6, ["unknown key 'zzz'.", "members, backend, store"]),
        (f"[worlds.w]\n{MEMBERS}backend = 1", 6, ["backend = 1", "It is text"]),
        (f'[worlds.w]\n{MEMBERS}store = ""', 6, ["store = ''"]),
        (f'[worlds.w]\n{MEMBERS}timeout = "30"', 6, ["timeout = '30'", "above 0"]),
        (f"[worlds.w]\n{MEMBERS}timeout = 0", 6, ["timeout = 0"]),
        (f"[worlds.w]\n{MEMBERS}timeout = 1_000_001", 6, ["timeout = 1000001", "at most 1000000"]),  # as of a join
        (f"[worlds.w]\n{MEMBERS}timeout = nan", 6, ["timeout = nan"]),
        (f"[worlds.w]\n{MEMBERS}timeout = inf", 6, ["timeout = inf"]),
        (f"[worlds.w]\n{MEMBERS}timeout = {10**400}", 6, ["timeout = 1000", "…"]),
        (f"[worlds.w]\n{MEMBERS}timeout = true", 6, ["timeout = True"]),
        (f"[worlds.w]\n{MEMBERS}hang_timeout = 0.2", 6, ["hang_timeout = 0.2", "at least 0.3"]),
        (f'[worlds.w]\n{MEMBERS}device = "cuda:{{rank}}"', 6, ["{local_rank}"]),
        (f'[worlds.w]\n{MEMBERS}after = ["v"]', 6, ["after 'v': there is no such world"]),
        (f'[worlds.w]\n{MEMBERS}after = ["w"]', 6, ["cycle of waits: w after w"]),
        (f"[worlds.{'w' * 201}]\n{MEMBERS}", 4, ["1 to 200 characters"]),
        (f'[worlds."w{{i}}"]\n{MEMBERS}', 4, ["{i} needs a role to count"]),
        (f'[worlds.w]\nfor = "worker"\n{MEMBERS}', 4, ["Each world has a name of its own", 'worlds."w{i}"']),
        (f'[worlds."w{{i}}"]\nfor = "wokrer"\n{MEMBERS}', 5, ["no role 'wokrer' (did you mean 'worker'?)"]),
        (f'[worlds.w1]\n{MEMBERS}[worlds."w{{i}}"]\nfor = "worker"\n{MEMBERS}', 6, ["'w1' is there twice: on line 4"]),
        ('[worlds."w{i}"]\nfor = "worker"\nmembers = ["worker:0", "worker:{i}"]', 6, ["worker:0 is a member twice"]),
    ],
)  # fmt: skip
def test_worlds_that_break_a_rule(world, line, words):
    bad(f"[roles]\nhub = 1\nworker = 8\n{world}\n", line, *words)


def test_a_cycle_of_waits_is_shown_whole():
    worlds = "".join(
        f'[worlds.{name}]\nafter = [{after}]\nmembers = ["w:*"]\n'
        for name, after in {"d": '"c"', "a": '"x", "b"', "b": '"c"', "c": '"a", "x"', "x": ""}.items()
    )
    bad(f"[roles]\nw = 2\n{worlds}", 13, "cycle of waits: c after a after b after c")
    # Many that wait for many are no cycle, and are looked at once each.
    layers = "".join(
        f'[worlds.l{i}_{j}]\nmembers = ["w:*"]\nafter = {[f"l{i - 1}_{k}" for k in range(9)] if i else []}\n'
        for i in range(12)
        for j in range(9)
    )
    began = time.monotonic()
    assert len(parse(f"[roles]\nw = 2\n{layers}", "x.toml").worlds) == 108
    assert time.monotonic() - began < 30


@given(st.text() | st.binary().map(lambda octets: octets.decode("latin-1")))
@example("[roles]\nw = 2\n[worlds]\n'\\r' = 1")
@example("[roles]\r\nw = 2\r\n")
@example("\ufeff[roles]\nw = 2\n")
def test_no_text_does_anything_else(text):
    try:
        plan = parse(text, "x.toml")
    except PlanError as error:
        assert error.line <= text.count("\n") + 1  # noqa: PT017  (most texts fail)
    else:
        assert plan.world_size >= 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ODD = st.dictionaries(
    st.sampled_from(
        ["members", "backend", "store", "timeout", "hang_timeout", "device", "after", "for", "x"]
    ),
    VALUES | st.sampled_from([["w:0", "w:1"], ["w:*"], "w", ["a", "b"], 3, "{i}"]),
)


@given(st.dictionaries(st.sampled_from(["a", "b", "w{i}", ""]), ODD))
def test_no_value_does_anything_else(worlds):
    tomli_w = pytest.importorskip("tomli_w")
    bare = _without_none({"roles": {"w": 2}, "worlds": worlds})
    try:
        parse(tomli_w.dumps(bare), "x.toml")
    except PlanError as error:
        assert error.line  # noqa: PT017  (most fail)


def _without_none(value):
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_none(each) for each in value if each is not None]
    return value


def test_lines_of_keys():
    found = Positions(
        'a.b = 1 # [c]\n"a"."q=" = """\n[no]\n"""\n[t."x.y"] # t\nlong = [\n  "one",\n\n  \'two\', {}\n]\n'
        "in = { d = { e = 1 }, f = '''\n=''' }\n[[many]]\nn = 1\n"
    )
    assert found.line("a", "b") == 1
    assert found.line("a", "q=") == 2
    assert found.line("no") == 0
    assert found.line("t", "x.y") == 5
    assert found.line("t", "x.y", "long") == 6
    assert found.line_of("two", "t", "x.y", "long") == 9
    assert found.line_of("three", "t", "x.y", "long") == 6
    assert found.line("t", "x.y", "in", "d", "e") == 11
    assert found.line("t", "x.y", "nothing") == 5
    assert found.line("many", "n") == 14


def test_each_statement_is_parsed_once_however_its_comments_end(monkeypatch):
    """Else a file takes minutes that has a comment in brackets beside each of its members."""
    read, there = [], positions.tomllib.loads

    def loads(text):
        read.append(text)
        return there(text)

    monkeypatch.setattr(positions, "tomllib", SimpleNamespace(loads=loads))
    members = "".join(f'  "w:{rank}",  # [rank {rank}] {{}} """\n' for rank in range(9))
    text = f"[worlds.a]\nmembers = [\n{members}]\n\"k]#\" = '[' # }}\nlast = 1"
    found = Positions(text)
    assert len(read) == 4
    assert found.line_of("w:8", "worlds", "a", "members") == 11
    assert found.line("worlds", "a", "k]#") == 13
    assert found.line("worlds", "a", "last") == 14


# -- the edges --------------------------------------------------------------------------------------------------


def test_lines_that_end_as_on_windows():
    with pytest.raises(PlanError) as caught:
        parse("[roles]\r\nw = 2\r\n[worlds.a]\r\nmembers = ['w:0', 'x:1']\r\n", "x.toml")
    assert caught.value.line == 4


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "worlds.toml"
    with pytest.raises(PlanError, match="No such file"):
        load(str(path))
    with pytest.raises(PlanError, match="Is a directory"):
        load(str(tmp_path))
    with pytest.raises(PlanError):
        load("\0")
    path.write_bytes(b"# a\n# \xff\n")
    with pytest.raises(PlanError, match=r"worlds.toml:2: byte 0xff is no UTF-8"):
        load(str(path))
    path.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(PlanError, match="more than 1048576 bytes"):
        load(str(path))
    path.write_text(GOOD)
    assert load(str(path)) == parse(GOOD, str(path))


def world(**said):
    text = '[roles]\nw = 2\n[worlds.one]\nmembers = ["w:*"]\n'
    return parse(text + "".join(f'{key} = "{value}"\n' for key, value in said.items()), "x.toml")


def refused(plan, timeout=2.0):
    with pytest.raises(PlanError) as caught:
        check_stores(plan, timeout=timeout)
    assert (caught.value.line, caught.value.path) == (3, "x.toml")
    return str(caught.value)


def test_stores_that_can_be_used(tmp_path):
    pytest.importorskip("torch")
    check_stores(world())
    check_stores(world(store=f"file://{tmp_path}/store"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody listens
        check_stores(world(store=f"tcp://127.0.0.1:{free.getsockname()[1]}"), timeout=30)
        check_stores(world(store=f"tcp://localhost:{free.getsockname()[1]}"), timeout=30)
        other = "no-such-host.invalid:29500"  # of a list one is enough
        check_stores(world(store=f"tcp://{other},127.0.0.1:{free.getsockname()[1]}"), timeout=30)
        check_stores(world(store="etcd://10.0.0.1:2379/worlds"))
    dist = pytest.importorskip("torch.distributed")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    check_stores(world(store=f"tcp://127.0.0.1:{server.port}"), timeout=30)


def test_stores_that_cannot_be_used(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    assert 'A store is "launcher", or:' in refused(world(store="lancher"))
    assert "a port from 1 to 65535" in refused(world(store="tcp://127.0.0.1"))
    assert "a port from 1 to 65535" in refused(world(store="tcp://127.0.0.1:29500,127.0.0.1"))
    assert "prefix of the keys" in refused(world(store="etcd://10.0.0.1:2379"))
    assert "cannot be written" in refused(world(store=f"file://{tmp_path}/nothing/store"))
    assert "cannot be written" in refused(world(store=f"file://{tmp_path}"))
    assert "x.toml:3: world 'one': store 'tcp://" in refused(
        world(store="tcp://no-such-host.invalid:29500"), timeout=30
    )
    assert "store 'tcp://a..b:1'" in refused(world(store="tcp://a..b:1"), timeout=30)
    monkeypatch.setattr(host_checks, "_SLACK", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = refused(world(store=f"tcp://127.0.0.1:{silent.getsockname()[1]}"), timeout=4)
        assert "somebody else listens there" in found


def test_a_store_that_nobody_answers_for(monkeypatch):
    """A name server that hangs keeps nobody longer than the timeout."""
    pytest.importorskip("torch")
    over = threading.Event()

    def hang(*_, **__):
        over.wait(60)
        raise OSError("too late")

    monkeypatch.setattr(host_checks.socket, "getaddrinfo", hang)
    assert "no answer within 0.1 s" in refused(world(store="tcp://slow:1"), timeout=0.1)
    assert not over.is_set()
    over.set()
    for thread in threading.enumerate():
        if thread.name == "m8d-check-store":
            thread.join(60)


def test_backends():
    dist = pytest.importorskip("torch.distributed")
    check_backends(world())
    check_backends(world(backend="cpu:gloo"))
    check_backends(world(backend="of-the-script"))  # it may register it
    for name in ("glooo", "cpu:gloo,cuda:ncl"):
        with pytest.raises(PlanError, match=r"this torch has no .*did you mean"):
            check_backends(world(backend=name))
    if not dist.is_mpi_available():
        with pytest.raises(PlanError, match="this torch has no 'mpi'"):
            check_backends(world(backend="MPI"))
