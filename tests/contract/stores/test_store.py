"""Stores: addresses, one server and one connection per process and address, deadlines, nothing left.

What has the fixture `address` runs without TLS and in secure mode.
"""

import contextlib
import datetime as dt
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from kits.contract.worldkit import free_port
from kits.tlskit import Files, authority

import multiworld as mw
from multiworld._net import host_address
from multiworld._net.stores import store as stores
from multiworld._net.stores.address import without_login
from multiworld._net.stores.store import PollingStore, StoreAddress, open_store
from multiworld._net.stores.tcp_client import NotAStoreError, TcpClient
from multiworld._net.stores.torchstore import TcpStore
from multiworld._net.tls.credentials import current
from multiworld.errors import InvalidJoinError, StoreBindError, StoreUnreachableError

ROOT = Path(__file__).parents[3]
PATIENCE = 30.0  # seconds; nothing here takes that long when all is well, on a machine that runs


def soon(seconds=PATIENCE):
    return time.monotonic() + seconds


def sockets():
    links = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            link = str(path.readlink())
        except OSError:
            continue
        if link.startswith("socket:"):
            links.append(link)
    return sorted(links)


def threads():
    return len(list(Path("/proc/self/task").iterdir()))


def settles(get, want, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while get() != want and time.monotonic() < end:
        time.sleep(0.01)
    return get() == want


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Files(tmp_path_factory.mktemp("tls"), authority())


@pytest.fixture(params=["plain", "tls"])
def address(request, certificates, monkeypatch):
    if request.param == "tls":
        for name, value in certificates.environment.items():
            monkeypatch.setenv(name, value)
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(autouse=True)
def _nothing_left():
    before = set(sockets())  # of tests before this one some may still be closing
    yield
    assert not stores.registry.shared
    assert settles(lambda: set(sockets()) - before, set()), (before, sockets())


CHILD = """
import sys, time
from multiworld._net.stores.store import open_store
handle = open_store(sys.argv[1], world="w", serve=True, deadline=time.monotonic() + 60)
print("up", handle.serves, flush=True)
sys.stdin.read()
"""


class Child:
    """A process that serves, until it is told to end or killed."""

    def __init__(self, address):
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip
        self.served = self.process.stdout.readline().split()[1] == "True"

    def __enter__(self):
        return self

    def stop(self):
        """Have it stand still (SIGSTOP); until its last thread does, another one may still answer."""
        self.process.send_signal(signal.SIGSTOP)
        assert settles(self._states, {"T"}), self._states()

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def _states(self):
        stats = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return {each.read_text().rpartition(")")[2].split()[0] for each in stats}

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:29500", "127.0.0.1", 29500),
        ("tcp://[::1]:80", "::1", 80),
        ("tcp://node-7.x:1", "node-7.x", 1),
    ],
)
def test_tcp_addresses(text, host, port):
    parsed = StoreAddress.parse(text)
    assert (parsed.scheme, parsed.host, parsed.port, str(parsed)) == ("tcp", host, port, text)


def test_lists_of_addresses():
    parsed = StoreAddress.parse_all("tcp://h0:1, [::1]:2,h0:3")
    assert [str(each) for each in parsed] == ["tcp://h0:1", "tcp://[::1]:2", "tcp://h0:3"]
    assert StoreAddress.parse_all("file:///a,b")[0].path == "/a,b"


@pytest.mark.parametrize(
    "text",
    [
        "", "127.0.0.1:29500", "tcp://", "tcp://host", "tcp://:29500", "tcp://host:0", "tcp://host:65536", "tcp://host:x",
        "tcp://::1:29500", "tcp://[::1]", "tcp://[host]:1", "tcp://h:1/x", "tcp://u@h:1", "file://x", "file:///", "etcd://h:1",
        "tcp://h:\u0661", "tcp://h:-1", "tcp://h h:1", "tcp://h:1,", "tcp://h:1,h:1", "tcp://h:1,file:///x",
    ],
)  # fmt: skip
def test_bad_addresses_say_value_rule_and_next_step(text):
    with pytest.raises(InvalidJoinError) as caught:
        open_store(text, world="w1", serve=True, deadline=soon())
    error = caught.value
    assert (error.world, error.value) == ("w1", f"store={without_login(text)!r}")
    assert error.rule
    assert error.next_step


def test_what_is_no_store_is_refused():
    with pytest.raises(InvalidJoinError, match="store=7"):
        open_store(7, world="w", serve=False, deadline=soon())


def test_every_call_of_a_store(address):
    handle = open_store(address, world="w", serve=True, deadline=soon())
    store = handle.store
    assert handle.serves
    assert handle.local_host == "127.0.0.1"
    store.set("a", "text")
    store.set("b", b"\0\xff")
    assert (store.get("a"), store.get("b")) == (b"text", b"\0\xff")
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])
    assert (store.add("n", 5), store.add("n", -7), store.get("n")) == (5, -2, b"-2")
    assert store.compare_set("new", "", "1") == b"1"
    assert store.compare_set("new", "0", "2") == b"1"
    assert store.compare_set("new", "1", "2") == b"2"
    assert store.num_keys() >= 4
    assert store.delete_key("new")
    assert not store.delete_key("new")
    assert not store.check(["new"])
    big = os.urandom(300_000)
    store.set("big", big)
    assert store.get("big") == big
    # The same keys, seen by torch's own client and through torch's own PrefixStore.
    fresh = handle.fresh()
    assert isinstance(fresh, dist.TCPStore if current() is None else TcpStore)
    assert fresh.get("a") == b"text"
    under = dist.PrefixStore("p", store)
    under.set("k", "v")
    assert under.get("k") == b"v"
    assert fresh.get("p/k") == b"v"
    assert under.add("m", 2) == 2
    assert under.check(["k"])
    assert under.compare_set("k", "v", "w") == b"w"
    del fresh, under
    handle.close()


def test_missing_values_are_waited_for_and_time_out(address):
    handle = open_store(address, world="w", serve=True, deadline=soon())
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="later"):
        handle.store.wait(["later"], dt.timedelta(seconds=0.2))
    assert 0.2 <= time.monotonic() - began < PATIENCE / 2
    setter = threading.Timer(0.1, lambda: handle.store.set("later", "x"))
    setter.start()
    assert handle.store.get("later") == b"x"
    setter.join()
    handle.close()
    with pytest.raises(dist.DistNetworkError, match="closed here"):
        handle.store.set("x", "y")


def test_one_server_and_one_connection_per_process(address):
    before, alone = sockets(), threads()
    handles = [open_store(address, world=f"w{n}", serve=n % 2 == 0, deadline=soon()) for n in range(20)]
    # torch's server: listener, its own client (2 ends); ours (2 ends).
    assert len(set(sockets()) - set(before)) <= 6
    for number, handle in enumerate(handles):
        handle.store.set(f"k{number}", str(number))
    assert [h.store.get(f"k{n}") for n, h in enumerate(reversed(handles))] == [b"%d" % n for n in range(20)]
    for handle in handles[:-1]:
        handle.close()
        handle.close()
    assert handles[-1].store.get("k3") == b"3"
    handles[-1].close()
    # Fewer where one of an earlier test was on its way out.
    assert settles(lambda: threads() <= alone, True)
    assert settles(lambda: set(sockets()) <= set(before), True)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])), timeout=1)


def test_it_listens_on_the_given_address_only(address):
    port = int(address.rsplit(":", 1)[1])
    handle = open_store(address, world="w", serve=True, deadline=soon())
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), timeout=1)
    handle.close()


def test_ipv6():
    try:
        port = free_port("::1")
    except OSError:
        pytest.skip("no IPv6 here")
    handle = open_store(f"tcp://[::1]:{port}", world="w", serve=True, deadline=soon())
    other = open_store(f"tcp://[::1]:{port}", world="w", serve=False, deadline=soon())
    other.store.set("a", "b")
    assert handle.store.get("a") == b"b"
    assert handle.local_host == "::1"
    assert handle.fresh().get("a") == b"b"
    handle.close()
    other.close()


def test_names_resolve():
    port = free_port()
    handle = open_store(f"tcp://localhost:{port}", world="w", serve=True, deadline=soon())
    assert handle.local_host in {"127.0.0.1", "::1"}
    handle.close()
    with pytest.raises(StoreUnreachableError, match=r"no-such-host\.invalid"):
        open_store("tcp://no-such-host.invalid:1", world="w", serve=False, deadline=soon(5))


class Names:
    """What a name server says of one name in turn; the last answer stays."""

    name = "pod-0.workers"

    def __init__(self, monkeypatch, *answers):
        self.answers, self.asked = list(answers), 0
        self._ask = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host, *arguments, **options):
        if not str(host).startswith("pod-"):
            return self._ask(host, *arguments, **options)
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, int):
            raise socket.gaierror(answer, "no address")
        return self._ask(answer, *arguments, **options)


@pytest.mark.parametrize(
    ("error", "known"), [(socket.EAI_NONAME, True), (socket.EAI_AGAIN, True), (socket.EAI_AGAIN, False)]
)
def test_a_name_that_does_not_resolve_yet_is_waited_for(monkeypatch, error, known):
    server = open_store(f"tcp://127.0.0.1:{(port := free_port())}", world="w", serve=True, deadline=soon())
    names = Names(monkeypatch, error, error, "127.0.0.1")
    found = open_store(f"tcp://{names.name}:{port}", world="w", serve=False, known=known, deadline=soon())
    assert names.asked == 3
    for each in (server, found):
        each.close()


def test_a_name_that_does_not_exist_is_waited_for_until_the_deadline(monkeypatch):
    monkeypatch.setattr(stores, "_UNRESOLVED", 0.01)
    names = Names(monkeypatch, socket.EAI_NONAME)
    where = f"tcp://{names.name}:1"
    with pytest.raises(
        StoreUnreachableError, match=r"its name does not resolve: .*no address.*Check the name"
    ):
        open_store(where, world="w", serve=False, known=True, deadline=soon(1.0))
    assert names.asked > 1


def test_a_name_that_does_not_exist_ends_a_first_join_at_once(monkeypatch):
    names = Names(monkeypatch, socket.EAI_NONAME)
    with pytest.raises(StoreUnreachableError, match=names.name):
        open_store(f"tcp://{names.name}:1", world="w", serve=False, deadline=soon())
    assert names.asked == 1


def test_a_name_that_stands_for_another_address_meanwhile(monkeypatch):
    monkeypatch.setattr(stores, "_RESOLVE_AGAIN", 0.1)
    server = open_store(f"tcp://127.0.0.1:{(port := free_port())}", world="w", serve=True, deadline=soon())
    # Nothing listens at 127.0.0.2, which counts while the name does not exist.
    names = Names(monkeypatch, "127.0.0.2", socket.EAI_NONAME, "127.0.0.1")
    found = open_store(f"tcp://{names.name}:{port}", world="w", serve=False, deadline=soon())
    assert names.asked == 3
    for each in (server, found):
        each.close()


def test_a_rejoin_waits_for_a_name_and_a_join_does_not(monkeypatch):
    names = Names(monkeypatch, "127.0.0.1")
    where = f"tcp://{names.name}:{free_port()}"
    world = mw.join("named", 0, 1, store=where, timeout=PATIENCE)
    world.close()
    names.answers = [socket.EAI_NONAME] * 3 + ["127.0.0.1"]
    world.rejoin()
    assert world.state is mw.State.ACTIVE
    world.close()
    names.answers = [socket.EAI_NONAME]
    for call in (
        lambda: mw.join("named", 0, 1, store=where, timeout=PATIENCE),
        lambda: world.rejoin(store="tcp://pod-1.workers:1"),
    ):
        asked = names.asked
        with pytest.raises(StoreUnreachableError):
            call()
        assert names.asked == asked + 1


def test_a_member_waits_for_rank_0(address):
    found = []
    waiter = threading.Thread(
        target=lambda: found.append(open_store(address, world="w", serve=False, deadline=soon()))
    )
    waiter.start()
    time.sleep(0.2)
    rank0 = open_store(address, world="v", serve=True, deadline=soon())  # the same process, another thread
    waiter.join(2 * PATIENCE)
    assert found[0].store.num_keys() >= 0
    rank0.close()
    found[0].close()


def test_nobody_serves(address):
    began = time.monotonic()
    with pytest.raises(StoreUnreachableError, match="refused") as caught:
        open_store(address, world="w1", serve=False, deadline=soon(0.5))
    assert time.monotonic() - began < PATIENCE
    assert address in str(caught.value)
    assert isinstance(caught.value, ConnectionError)


def test_waiting_can_be_cancelled(address):
    began = time.monotonic()
    with pytest.raises(StoreUnreachableError):
        open_store(
            address,
            world="w",
            serve=False,
            deadline=soon(2 * PATIENCE),
            cancelled=lambda: time.monotonic() > began + 0.2,
        )
    assert time.monotonic() - began < PATIENCE


def test_a_port_that_something_else_has(monkeypatch):
    monkeypatch.setattr(stores, "_SILENT", 1.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(StoreBindError, match="does not answer as a TCPStore") as caught:
            open_store(address, world="w", serve=True, deadline=soon())
        assert isinstance(caught.value, OSError)
        with pytest.raises(StoreUnreachableError, match="does not answer as a TCPStore"):
            open_store(address, world="w", serve=False, deadline=soon(1))


def test_a_server_that_stands_still_for_some_seconds_is_waited_for(address):
    with Child(address) as child:
        child.stop()
        timer = threading.Timer(stores._FOREIGN + 1.0, child.go_on)
        timer.start()
        handle = open_store(address, world="w", serve=True, deadline=soon())
        assert not handle.serves
        handle.store.set("a", "b")
        handle.close()
        timer.join()


def test_an_address_of_another_host():
    with pytest.raises(StoreBindError, match="no address of this host"):
        open_store("tcp://192.0.2.1:29500", world="w", serve=True, deadline=soon())


def test_somebody_serves_already(address):
    with Child(address) as child:
        assert child.served
        handle = open_store(address, world="w", serve=True, deadline=soon())
        assert not handle.serves
        handle.store.set("a", "b")
        handle.close()


def test_a_server_that_died_is_replaced(address, capfd):
    with Child(address) as child:
        old = open_store(address, world="w", serve=False, deadline=soon())
        old.store.set("a", "b")
        child.process.kill()
        child.process.wait(10)
        with pytest.raises(dist.DistNetworkError):
            for _ in range(1000):
                old.store.check(["a"])
                time.sleep(0.01)
    new = open_store(address, world="w", serve=True, deadline=soon())
    assert new.serves
    assert not new.store.check(["a"])
    old.close()
    new.store.set("a", "c")
    again = open_store(address, world="v", serve=False, deadline=soon())
    assert again.store.get("a") == b"c"
    again.close()
    new.close()
    assert capfd.readouterr().err == ""


def test_a_server_that_hangs_keeps_no_call_beyond_its_deadline(address):
    with Child(address) as child:
        handle = open_store(address, world="w", serve=False, deadline=soon())
        handle.store.set("a", "b")
        handle.store._deadline = soon(0.5)
        child.stop()
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(dist.DistStoreError, match="does not answer"):
                handle.store.check(["a"])
        assert time.monotonic() - began < PATIENCE / 2
        with pytest.raises(StoreUnreachableError):
            open_store(address, world="v", serve=False, deadline=soon(1))
        handle.store._deadline = soon()
        child.go_on()
        # The late answers are not taken for those of the next calls.
        assert handle.store.get("a") == b"b"
        assert handle.store.add("n", 3) == 3
        handle.close()


def test_calls_of_many_threads_do_not_mix(address):
    handle = open_store(address, world="w", serve=True, deadline=soon(60))
    wrong = []

    def work(number):
        for turn in range(100):
            handle.store.set(f"{number}/{turn}", f"{number}:{turn}")
            if handle.store.get(f"{number}/{turn}") != b"%d:%d" % (number, turn):
                wrong.append((number, turn))
            handle.store.add("sum", 1)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not wrong
    assert handle.store.get("sum") == b"600"
    handle.close()


def test_open_and_close_in_many_threads(address):
    errors = []

    def work(number):
        try:
            for _ in range(15):
                handle = open_store(address, world=f"w{number}", serve=number % 2 == 0, deadline=soon(60))
                handle.store.add("n", 1)
                handle.close()
        except Exception as error:  # noqa: BLE001  (reported)
            # Another thread's last close may end the server between our open and our call.
            if "over" not in str(error):
                errors.append(error)

    keeper = open_store(address, world="k", serve=True, deadline=soon())
    workers = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert not errors
    keeper.close()


STANDS_STILL = """
import os, signal, socket, threading, time
from multiworld._net.stores.server import StoreServer

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = StoreServer(socket.AF_INET, ("127.0.0.1", port), timeout=20)
beats = []

def beat():
    while True:
        beats.append(time.monotonic())
        time.sleep(0.02)

threading.Thread(target=beat, daemon=True).start()
stranger = socket.create_connection(("127.0.0.1", port))
stranger.sendall(bytes(1))  # the beginning of a query
time.sleep(0.05)
child = os.fork()  # it has the stranger's connection, too, and ends it: this process may stand still
if not child:
    time.sleep(15)
    os._exit(0)
stranger.close()
server.close()
time.sleep(0.1)
print(max(after - before for before, after in zip(beats, beats[1:])))
os.kill(child, signal.SIGKILL)
"""


def test_half_a_query_does_not_hold_up_the_end_of_a_server():
    """torch's server up to 2.8 waits for the rest of it, in a destructor that has the GIL."""
    done = subprocess.run(
        [sys.executable, "-c", STANDS_STILL],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert float(done.stdout) < 5, done.stderr


def test_files(tmp_path):
    path = tmp_path / "s"
    first = open_store(f"file://{path}", world="w", serve=True, deadline=soon())
    second = open_store(f"file://{path}", world="v", serve=False, deadline=soon())
    first.store.set("a", "b")
    assert second.store.get("a") == b"b"
    assert first.local_host == host_address.outward()
    first.close()
    assert second.store.get("a") == b"b"
    second.close()
    with pytest.raises(StoreBindError, match="folder"):
        open_store(f"file://{tmp_path}/no/s", world="w", serve=True, deadline=soon())


def test_objects_stay_the_callers():
    store = dist.HashStore()
    handle = open_store(store, world="w", serve=True, deadline=soon())
    assert handle.store is store
    assert handle.local_host == "127.0.0.1"
    handle.close()
    store.set("a", "b")
    tcp = dist.TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    handle = open_store(dist.PrefixStore("x", tcp), world="w", serve=False, deadline=soon())
    assert handle.local_host == host_address.outward()
    handle.close()


def test_polling_asks_until_it_is_told_to_stop():
    inner = dist.HashStore()
    stop = threading.Event()

    def check():
        if stop.is_set():
            raise KeyError("told to stop")

    store = PollingStore(inner, prefix="g1", check_cancelled=check)
    store.set("a", b"1")
    assert inner.get("g1/a") == b"1"
    assert (store.get("a"), store.written, store.read) == (b"1", {"a": b"1"}, {"a": b"1"})
    threading.Timer(0.1, stop.set).start()
    began = time.monotonic()
    with pytest.raises(KeyError, match="told to stop"):
        store.get("never")
    assert time.monotonic() - began < PATIENCE / 2
    stop.clear()
    with pytest.raises(dist.DistStoreError, match="never"):
        dist.PrefixStore("y", store).wait(["never"], dt.timedelta(milliseconds=50))


def test_garbage_from_a_server_is_not_taken_for_an_answer():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def talk():
            with other.accept()[0] as accepted:
                accepted.sendall(os.urandom(64))

        answer = threading.Thread(target=talk)
        answer.start()
        with pytest.raises(NotAStoreError):
            TcpClient.connect(socket.AF_INET, other.getsockname(), deadline=soon())
        answer.join(PATIENCE)


def test_an_interrupted_call_gives_its_reply_to_no_other(address):
    """Wherever the exception of a signal's handler comes: a call gets its own reply, or the connection is over."""

    class Interrupt(Exception):
        pass

    def interrupts(*_):
        raise Interrupt

    target = ("127.0.0.1", int(address.rpartition(":")[2]))

    def connect():
        return TcpClient.connect(socket.AF_INET, target, deadline=soon())

    with contextlib.closing(open_store(address, world="w", serve=True, deadline=soon())):
        client = connect()
        for number in range(20):
            client.set(f"k{number}", b"value %d" % number, deadline=soon())
        before, interrupted, random_ = signal.signal(signal.SIGALRM, interrupts), 0, random.Random(1)  # noqa: S311  (times)
        try:
            while interrupted < 400:
                wanted = random_.randrange(20)
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, random_.uniform(5e-6, 4e-4))
                        client.get(f"k{wanted}", deadline=soon())
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupt:
                    interrupted += 1
                except ConnectionError:
                    client.close()
                    client = connect()
                with contextlib.suppress(ConnectionError):
                    assert client.get("k7", deadline=soon()) == b"value 7"
        finally:
            signal.signal(signal.SIGALRM, before)
            client.close()


def test_a_client_that_a_signals_handler_closes_in_its_own_call_says_so(address):
    with (
        Child(address) as child,
        contextlib.closing(open_store(address, world="w", serve=False, deadline=soon())),
    ):
        client = TcpClient.connect(
            socket.AF_INET, ("127.0.0.1", int(address.rpartition(":")[2])), deadline=soon()
        )
        child.stop()
        before = signal.signal(signal.SIGALRM, lambda *_: client.close())
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(ConnectionError, match="closed here"):
                client.get("k", deadline=soon())
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            client.close()
            child.go_on()


def test_a_deadline_months_ahead(address):
    with contextlib.closing(open_store(address, world="w", serve=True, deadline=soon())):
        target = ("127.0.0.1", int(address.rpartition(":")[2]))
        with contextlib.closing(TcpClient.connect(socket.AF_INET, target, deadline=soon())) as client:
            assert client.add("n", 1, deadline=soon(60 * 86400)) == 1
