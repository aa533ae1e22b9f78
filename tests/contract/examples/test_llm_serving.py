"""examples/llm_serving: stages are killed while answers stream, and each token is that of the undisturbed model."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from kits.contract.runkit import ROOT, launched

pytest.importorskip(
    "transformers", reason="examples/llm_serving needs transformers: nox -s example -- llm_serving.py"
)
pytest.importorskip("uvicorn", reason="examples/llm_serving needs starlette and uvicorn")

pytestmark = [pytest.mark.everyday, pytest.mark.timeout(600)]

FOLDER = ROOT / "examples" / "llm_serving"
PATIENCE = 300.0


@pytest.fixture
def example(monkeypatch):
    """The modules of the example, by their names."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("model", "truth", "wire", "load", "report", "crew", "pipeline", "front", "serve")
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def cases(example):
    return example("truth").cases(count=32)


def test_stages_make_the_tokens_of_the_whole_model_in_any_batch(example, cases):
    model = example("model")
    decoder = model.Decoder(model.Settings(), 3)
    tokenizer = model.Bytes()

    def through(batch, data):
        for stage in range(3):
            data = decoder.run(stage, batch, data)
        return data.tolist()

    chosen = cases[:5]
    sequences = [tokenizer.encode(case.prompt) for case in chosen]
    begins = [len(sequence) for sequence in sequences]
    slots = [7, 0, 3, 23, 11]
    torch = importlib.import_module("torch")
    for step in range(40):
        again = step % 13 == 0  # all from the beginning, in one batch with padding, as after a takeover
        starts = [0 if again else len(sequence) - 1 for sequence in sequences]
        counts = [len(sequence) - start for sequence, start in zip(sequences, starts, strict=True)]
        data = torch.zeros(len(chosen), max(counts), dtype=torch.int64)
        for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
            data[row, : counts[row]] = torch.tensor(sequence[start:])
        for sequence, token in zip(
            sequences, through(model.Batch.of(slots, starts, counts), data), strict=True
        ):
            sequence.append(token)
    for case, sequence, begin in zip(chosen, sequences, begins, strict=True):
        common = min(len(case.tokens), 40)
        assert sequence[begin : begin + common] == case.tokens[:common]


def test_a_replay_leaves_the_keys_of_the_token_under_way(example):
    model = example("model")
    torch = importlib.import_module("torch")
    decoder = model.Decoder(model.Settings(), 3)
    short, long = [256, 65, 66], [256, *range(70, 90)]
    both = torch.tensor([short + [0] * (len(long) - len(short)), long])
    replay = model.Batch.of([0, 1], [0, 0], [len(short), len(long)])
    decoder.run(0, replay, both)
    decoder.run(0, model.Batch.of([0], [len(short)], [1]), torch.tensor([[67]]))
    before = [tensor.clone() for pair in decoder.cache.layers.values() for tensor in pair]
    decoder.run(0, replay, both)
    after = [tensor for pair in decoder.cache.layers.values() for tensor in pair]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new)


class Front:
    """The front without workers: what it refuses needs none; `ask` is a request, given to its routes as they are."""

    def __init__(self, example):
        model, crew, pipeline = example("model"), example("crew"), example("pipeline")
        self.scheduler = pipeline.Scheduler(crew.Crew(), 3, 6)
        self.routes = example("front").Front(self.scheduler, model.Bytes(), "m", 128, model.Bytes.SIZE)

    async def ask(self, path, body):
        sent, gone = [], asyncio.Event()
        requests = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

        async def receive():
            if (request := next(requests, None)) is None:
                await gone.wait()  # the client stays
            return request

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        await asyncio.wait_for(self.routes.app(scope, receive, send), 30)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode()


def test_tokens_that_the_model_does_not_know_are_refused(example):
    async def asked():
        front = Front(example)
        answers = [await front.ask("/v1/completions", {"prompt": [65, token]}) for token in (259, -1, 10**20)]
        return answers, list(front.scheduler.waiting)

    answers, waiting = asyncio.run(asked())
    for (status, text), token in zip(answers, ("259", "-1", "1" + "0" * 20), strict=True):
        assert status == 400, text
        assert f"token {token}: " in text
    assert waiting == []


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("completions", {"prompt": "\ud800"}, "Unicode"),
        ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "Unicode"),
        ("chat/completions", {"messages": ["hello"]}, "objects"),
    ],
)
def test_texts_and_messages_that_are_none_are_refused(example, path, body, word):
    async def asked():
        return await Front(example).ask(f"/v1/{path}", body)

    status, text = asyncio.run(asked())
    assert status == 400, text
    assert word in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_that_ends_each_worker_is_given_up_and_others_are_answered(example, stream):
    class Link:
        """A worker that the token 0 ends: it answers one call after the other, with the token 65."""

        def __init__(self):
            self.turn, self.lost = asyncio.Lock(), False

        async def call(self, stage, batch, data, tag):
            async with self.turn:
                for _ in range(0 if self.lost else 50):  # the other group's call comes meanwhile
                    await asyncio.sleep(0)
                self.lost = self.lost or 0 in data[:, 0].tolist()
                if self.lost:
                    raise mw.WorldError("link", "lost")
                return torch.full((batch.rows,), 65)

    async def asked():
        pipeline, front = example("pipeline"), Front(example)
        workers = [example("crew").Worker(index, index, Link()) for index in range(20)]
        for worker in workers:
            await front.scheduler.crew.add(worker)
        front.scheduler.stages = 1
        await front.scheduler.resize(1)
        (only,) = front.scheduler.pipelines
        # Two groups in one stage: the calls of the good one are behind those of the other, at each worker.
        only.groups.append(pipeline.Group(only, 1, 6))
        only.groups[0].free = [0]
        only.running.append(asyncio.create_task(only.groups[1].run()))
        answers = await asyncio.gather(
            *(
                front.ask("/v1/completions", {"prompt": [token], "max_tokens": 9, "stream": stream})
                for token in (0, 1)
            )
        )
        for task in only.running:
            task.cancel()
        return answers, front.scheduler.counts["takeovers"]

    torch, mw = importlib.import_module("torch"), importlib.import_module("multiworld")
    ((status, failed), (good, text)), takeovers = asyncio.run(asked())
    assert status == (200 if stream else 500)
    assert "3 workers in a row" in failed
    assert "server_error" in failed
    assert good == 200
    assert (
        text.count("65") == 9 if stream else "[65, 65, 65, 65, 65, 65, 65, 65, 65]" in text.replace(",", ", ")
    )
    assert takeovers == 3


def test_pipelines_are_added_all_or_none(example):
    async def resized():
        scheduler, worker = Front(example).scheduler, example("crew").Worker
        workers = [worker(index, index, None) for index in range(6)]
        for each in workers[:4]:
            await scheduler.crew.add(each)
        scheduler.stages = 2
        await scheduler.resize(1)
        with pytest.raises(asyncio.TimeoutError):
            await scheduler.resize(3, 0.01)
        before = scheduler.status()
        for each in workers[4:]:
            await scheduler.crew.add(each)
        await scheduler.resize(3, 30)
        for task in (task for each in scheduler.pipelines for task in each.running):
            task.cancel()
        return before, scheduler.status()

    before, after = asyncio.run(resized())
    assert len(before["pipelines"]) == 1
    assert [each["worker"] for each in before["standbys"]] == [2, 3]
    assert [[each["worker"] for each in pipeline["stages"]] for pipeline in after["pipelines"]] == [
        [0, 1], [2, 3], [4, 5],
    ]  # fmt: skip
    assert after["standbys"] == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--slots", "2"), "--slots 2: .*Give 3"),
        (("--slots", "1", "--stages", "1"), "--slots 1: .*Give 2"),
        (("--length", "7"), "--length 7: "),
        (("--slots", "3", "--length", "8"), "role ''"),  # enough
    ],
)
def test_too_few_slots_and_too_short_ones_are_refused(example, monkeypatch, options, told):
    monkeypatch.setattr(sys, "argv", ["serve.py", *options])
    monkeypatch.setenv("ROLE_NAME", "")
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit, match=told):
            example("serve").main()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def answering(example, monkeypatch, tmp_path):
    """`cases` with a small model in the place of the real one; each of its answers counts, in the list."""
    truth, asked = example("truth"), []

    class Model:
        def generate(self, tokens, **_):
            asked.append(tokens)
            return importlib.import_module("torch").cat([tokens, tokens], 1)

    monkeypatch.setattr(truth, "load", lambda _: Model())
    monkeypatch.setattr(truth.tempfile, "tempdir", str(tmp_path))
    return functools.partial(truth.cases, None, 1, 3), asked


def test_right_answers_are_kept_for_what_made_them(example, answering, monkeypatch, tmp_path):
    cases, asked = answering
    first = cases()
    assert (cases(), len(asked)) == (first, 1)
    monkeypatch.setattr(example("truth"), "version", lambda _: "another")
    cases()
    assert len(asked) == 2
    changed = tmp_path / "model.py"
    changed.write_text("another")
    monkeypatch.setattr(example("model"), "__file__", str(changed))
    cases()
    assert len(asked) == 3


def test_two_runs_keep_the_right_answers_at_once(answering, monkeypatch, tmp_path):
    cases, asked = answering
    replace, others = pathlib.Path.replace, []

    def replace_after_another_run(path, target):
        monkeypatch.setattr(pathlib.Path, "replace", replace)
        others.append(cases())
        return path.replace(target)

    monkeypatch.setattr(pathlib.Path, "replace", replace_after_another_run)
    assert [cases()] == others
    assert len(asked) == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_right_answers_that_cannot_be_kept_are_made_again(answering, monkeypatch, tmp_path):
    cases, asked = answering

    def refuse(path, target):
        raise PermissionError(path)

    monkeypatch.setattr(pathlib.Path, "replace", refuse)
    assert cases() == cases()
    assert len(asked) == 2
    assert list(tmp_path.iterdir()) == []


# The front with links whose workers are away: their waits end when their world is closed, as those of worlds do.
FRONT = """
import asyncio, sys, threading
import multiworld as mw
import serve

class Away:
    def __init__(self):
        self.state, self.closed = mw.State.JOINING, threading.Event()
    def on_break(self, fn):
        pass
    def wait_active(self, timeout):
        print("waiting", flush=True)
        self.closed.wait(timeout)
        raise mw.WorldClosedError("away", "closed")
    def close(self, timeout):
        self.state = mw.State.CLOSED
        self.closed.set()

async def join():
    print("joining", flush=True)
    if "--joining" in sys.argv:
        await asyncio.Event().wait()
    return {number: Away() for number in range(40)}

mw.join_all_async = join
args = serve.parser().parse_args(["--replicas", sys.argv[1]])
sys.exit(asyncio.run(serve.front(args, serve.Settings())))
"""


def ended_by_sigterm(word, *args):
    """The front's exit status and what it printed, SIGTERM sent once it has printed `word`."""
    path = os.pathsep.join(map(str, (FOLDER, ROOT / "build", ROOT)))
    program = subprocess.Popen(
        [sys.executable, "-c", FRONT, *args], env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        lines = []
        for line in program.stdout:
            lines.append(line)
            if word in line:
                break
        program.send_signal(signal.SIGTERM)
        rest, _ = program.communicate(timeout=60)
        return program.returncode, "".join(lines) + rest
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


def test_a_front_whose_workers_are_away_ends_at_sigterm():
    code, text = ended_by_sigterm("serving on", "0")
    assert code == 0, text
    assert "Traceback" not in text


@pytest.mark.parametrize("args", [["1", "--joining"], ["1"]])
def test_a_front_that_does_not_serve_yet_ends_at_sigterm(args):
    """While it joins, and while it waits for workers."""
    code, text = ended_by_sigterm("joining" if "--joining" in args else "waiting", *args)
    assert code == 0, text
    assert "serving on" not in text
    assert "Traceback" not in text


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """One run for all tests that only ask: its ten processes take most of their time. SIGTERM ends it."""
    with serving(tmp_path_factory.mktemp("serving")) as (run, address):
        yield run, address
        run.signal(signal.SIGTERM)
        assert run.ended(PATIENCE) == 143, run.report()
        assert "Traceback" not in run.text()
        assert run.leftovers() == []


def test_killed_stages_cost_no_request_and_no_token(served, example, cases):
    run, address = served
    load, report = example("load"), example("report")

    async def under_fire(address):
        return await load.Load(address, cases, 9).run("fire", 24, kill_every=6, change_replicas=True)

    story = asyncio.run(under_fire(address))
    found = report.numbers(story)
    assert found["kills"] >= 3, run.report()
    assert (found["lost"], found["wrong"]) == (0, 0), run.report()
    assert [count for _, count in story.replicas] == [2, 1]
    _, health = asyncio.run(load.ask(address, "/health"))
    assert health["takeovers"] >= 3
    assert len(health["pipelines"]) == 1


def test_clients_that_leave_free_their_slots(served, example, cases):
    _, address = served
    load = example("load")

    async def leave(address):
        async def one(case):
            status, lines = await load._open(
                address, "/v1/completions", {"prompt": case.prompt, "max_tokens": 60, "stream": True}
            )
            assert status == 200
            assert "data:" in await anext(lines)
            await lines.aclose()

        _, before = await load.ask(address, "/health")
        for _ in range(2):  # more than there are slots
            await asyncio.gather(*(one(case) for case in cases[:16]))
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while True:
            _, health = await load.ask(address, "/health")
            if not health["pipelines"][0]["sequences"] and not health["waiting"]:
                break
            assert asyncio.get_running_loop().time() < deadline, health
            await asyncio.sleep(0.05)
        # Whole answers of 60 tokens would have been 1920.
        assert health["tokens"] - before["tokens"] < 1920
        status, told = await load.ask(
            address, "/v1/completions", {"prompt": cases[0].prompt, "max_tokens": 12}
        )
        assert status == 200
        assert told["choices"][0]["token_ids"] == cases[0].tokens[:12]
        assert told["choices"][0]["finish_reason"] == "length"
        status, told = await load.ask(
            address,
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
        )
        assert status == 200
        assert told["usage"]["completion_tokens"] <= 3
        for body, word in (
            ({"prompt": 3}, "prompt"),
            ({"prompt": "a", "max_tokens": 1000}, "max_tokens"),
            ({"prompt": "a", "temperature": 1}, "greedy"),
        ):
            status, told = await load.ask(address, "/v1/completions", body)
            assert status == 400
            assert word in told["error"]["message"]

    asyncio.run(leave(address))


def test_a_client_is_cancelled_also_when_its_next_token_comes_meanwhile(example):
    load = example("load")

    async def cancelled_after(steps):
        token = asyncio.Event()

        async def lines():
            while True:
                await token.wait()
                yield "data: token"
                token.clear()

        client = asyncio.create_task(load._next(lines()))
        await asyncio.sleep(0.01)
        token.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        late = client.done()
        client.cancel()
        await asyncio.wait([client])
        return late or client.cancelled()

    assert all(asyncio.run(cancelled_after(steps)) for steps in range(10))


def test_one_command_shows_it_and_ctrl_c_ends_it(tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TMPDIR": str(tmp_path)}
    program = subprocess.Popen(
        [sys.executable, str(FOLDER.with_suffix(".py")), "--seconds", "600", "--clients", "3"],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        lines = []
        for line in program.stdout:
            lines.append(line)
            if re.search(r"[1-9]\d* tokens/s", line):
                break
        program.send_signal(signal.SIGINT)
        rest, _ = program.communicate(timeout=PATIENCE)
        assert program.returncode == 130, "".join(lines) + rest
        assert "Traceback" not in "".join(lines) + rest
        (log,) = tmp_path.glob("m8d-llm-serving-*/worlds.log")
        assert "Traceback" not in log.read_text()
    finally:
        program.kill()
        program.wait()


class serving:  # noqa: N801  (used as a function)
    """A front and its workers: the run, and the front's address."""

    def __init__(self, folder):
        self.file = folder / "address"
        self.running = launched(
            folder, FOLDER / "serve.py", "--address-file", str(self.file),
            options=["--worlds", str(FOLDER / "worlds.toml"), "--max-restarts", "100", "--grace", "30"],
            env={"M8D_HANG_TIMEOUT": "30"},  # a machine that stalls is no worker that hangs
        )  # fmt: skip

    def __enter__(self):
        run = self.running.__enter__()
        try:
            run.wait_for(self.file.exists, "the front serves", timeout=PATIENCE)
        except BaseException:
            self.running.__exit__(None, None, None)
            raise
        return run, self.file.read_text()

    def __exit__(self, *error):
        self.running.__exit__(*error)
