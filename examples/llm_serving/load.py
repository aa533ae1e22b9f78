"""Clients that stream answers, and note when each token came; a killer of stages; changes of replicas.

python examples/llm_serving/load.py 127.0.0.1:8000 --seconds 60 --kill-every 15
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from truth import Case

__all__ = ["Answer", "Load", "Story", "ask", "options"]

PATIENCE = 60.0
"""Seconds that a client waits for the next token; then its request counts as lost."""


@dataclass
class Answer:
    """What a client got: tokens, and when each of them came (time.monotonic)."""

    begun: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    whole: bool = False
    wrong: bool = False
    error: str = ""


@dataclass
class Story:
    """What happened in one load."""

    name: str
    began: float = 0.0
    ended: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    replicas: list[tuple[float, int]] = field(default_factory=list)
    seconds: float = 0.0

    def rate(self) -> float:
        """Tokens per second, of all that came."""
        return sum(len(answer.tokens) for answer in self.answers) / max(1e-9, self.seconds)


async def ask(address: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """One request with an answer of JSON; returns status and answer."""
    status, lines = await _open(address, path, body)
    async with contextlib.aclosing(lines):
        return status, json.loads("".join([line async for line in lines]))


async def _open(address: str, path: str, body: dict[str, Any] | None) -> tuple[int, AsyncIterator[str]]:
    """Send a request; returns the status, and the lines of the answer's body as they come.

    A client of 30 lines: one of the usual libraries takes more of the two cores than the pipeline's front.
    """
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    writer.write(
        f"{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    status = int((await reader.readline()).split()[1])
    chunked = False
    while line := (await reader.readline()).strip():
        chunked |= line.lower() == b"transfer-encoding: chunked"

    async def lines() -> AsyncIterator[str]:
        try:
            if not chunked:
                yield (await reader.read()).decode()
                return
            while size := int((await reader.readline()).strip() or b"0", 16):
                chunk = await reader.readexactly(size + 2)
                for line in chunk[:-2].decode().splitlines():
                    yield line
        finally:
            writer.close()

    return status, lines()


async def _next(lines: AsyncIterator[str]) -> str:
    """The next line. Before Python 3.12 `asyncio.wait_for` loses a cancel that comes together with the line.

    Raises:
        asyncio.TimeoutError: none came in `PATIENCE`.
    """
    line = asyncio.ensure_future(anext(lines, "data: [DONE]"))
    try:
        if not (await asyncio.wait({line}, timeout=PATIENCE))[0]:
            raise asyncio.TimeoutError
        return line.result()
    finally:
        if line.cancel():
            await asyncio.wait({line})  # before its generator is closed


class Load:
    """Clients that ask, each of them one question at a time.

    Args:
        address: host:port of the front.
        cases: questions, and the right answers.
        clients: how many.
        pause: seconds between an answer and the next question, on average; 0: the front is saturated.
    """

    def __init__(self, address: str, cases: list[Case], clients: int, pause: float = 0.0) -> None:
        self.address, self.cases, self.clients, self.pause = address, cases, clients, pause
        self.random = random.Random(0)  # noqa: S311  (nothing secret)
        self.tokens = 0

    async def run(
        self, name: str, seconds: float, *, kill_every: float = 0.0, change_replicas: bool = False
    ) -> Story:
        """Ask for some seconds, then let the answers that have begun come to their end."""
        story = Story(name, began=time.monotonic())
        until = story.began + seconds
        asking = [asyncio.create_task(self.client(story, until)) for _ in range(self.clients)]
        beside = [asyncio.create_task(self.progress(story))]
        if kill_every:
            beside.append(asyncio.create_task(self.killer(story, kill_every, until)))
        if change_replicas:
            beside.append(asyncio.create_task(self.changes(story, seconds)))
        try:
            await asyncio.gather(*asking)
        finally:
            for task in (*asking, *beside):
                task.cancel()
            await asyncio.gather(*asking, *beside, return_exceptions=True)
            print(end="\r\033[K" if sys.stdout.isatty() else "", flush=True)
        story.ended = time.monotonic()
        story.seconds = story.ended - story.began
        for task in beside:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        return story

    async def client(self, story: Story, until: float) -> None:
        """Ask one question after the other."""
        while time.monotonic() < until:
            case = self.random.choice(self.cases)
            limit = self.random.randint(len(case.tokens) // 2, len(case.tokens)) or 1
            answer = Answer(time.monotonic())
            story.answers.append(answer)
            try:
                await self.stream(answer, case, limit)
            except (OSError, ValueError, EOFError, asyncio.TimeoutError) as error:
                answer.error = f"{type(error).__name__}: {error}"
                await asyncio.sleep(0.1)  # a front that is gone refuses at once
            await asyncio.sleep(self.random.uniform(0, 2 * self.pause))

    async def stream(self, answer: Answer, case: Case, limit: int) -> None:
        """Ask one question, and compare each token of its answer."""
        body = {"prompt": case.prompt, "max_tokens": limit, "stream": True}
        status, lines = await _open(self.address, "/v1/completions", body)
        if status != 200:
            raise ValueError(f"status {status}")
        async with contextlib.aclosing(lines):
            while True:
                line = await _next(lines)
                if line == "data: [DONE]":
                    break
                if line.startswith("data: "):
                    told = json.loads(line[6:])
                    if "error" in told:
                        raise ValueError(told["error"]["message"])
                    tokens = told["choices"][0]["token_ids"]
                    answer.tokens += tokens
                    answer.times += [time.monotonic()] * len(tokens)
                    self.tokens += len(tokens)
        answer.wrong = answer.tokens != case.tokens[: len(answer.tokens)]
        answer.whole = len(answer.tokens) == min(limit, len(case.tokens))

    async def killer(self, story: Story, every: float, until: float) -> None:
        """SIGKILL a worker that is a stage of a pipeline, again and again."""
        due = story.began + every
        while due < until - 1:  # the last one is seen, too
            await asyncio.sleep(due - time.monotonic())
            due += every
            _, health = await ask(self.address, "/health")
            stages = [stage for pipeline in health["pipelines"] for stage in pipeline["stages"]]
            with contextlib.suppress(ProcessLookupError):  # it is dead already, and not yet replaced
                os.kill(self.random.choice(stages)["pid"], signal.SIGKILL)
                story.kills.append(time.monotonic())

    async def changes(self, story: Story, seconds: float) -> None:
        """Add a replica after a third of the time, and retire it after two."""
        for part, count in ((1, 2), (2, 1)):
            await asyncio.sleep(story.began + seconds * part / 3 - time.monotonic())
            status, told = await ask(self.address, "/replicas", {"count": count})
            if status != 200:
                raise RuntimeError(f"{count} replicas: {told}")
            story.replicas.append((time.monotonic(), count))

    async def progress(self, story: Story) -> None:
        """A line each second on a terminal, else every ten."""
        live = sys.stdout.isatty()
        before, at = self.tokens, time.monotonic()
        while True:
            await asyncio.sleep(1 if live else 10)
            now = time.monotonic()
            done = sum(answer.whole for answer in story.answers)
            line = (
                f"{story.name}: {now - story.began:4.0f} s, {(self.tokens - before) / (now - at):5.0f} tokens/s, "
                f"{done} answers, {len(story.kills)} kills"
            )
            print(f"\r\033[K{line}" if live else line, end="" if live else "\n", flush=True)
            before, at = self.tokens, now


def options(parser: argparse.ArgumentParser) -> None:
    """Those of a load."""
    parser.add_argument("--seconds", type=float, default=60, help="how long it asks (default 60)")
    parser.add_argument(
        "--clients", type=int, default=12, help="answers that are streamed at once (default 12)"
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=0,
        help="seconds between an answer and the next question, on average (default 0)",
    )
    parser.add_argument(
        "--kill-every", type=float, default=0, help="seconds between kills of a stage (default 0: none)"
    )
    parser.add_argument(
        "--change-replicas",
        action="store_true",
        help="add a replica after a third of the time, retire it after two",
    )
    parser.add_argument("--plot", metavar="FILE", help="write a picture (.svg, .png): needs matplotlib")


def main() -> int:
    """Load a server that runs."""
    from report import finish  # noqa: PLC0415  (it needs this module's classes)
    from truth import cases  # noqa: PLC0415  (loads the model)

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", help="host:port of the front")
    options(parser)
    args = parser.parse_args()
    load = Load(args.address, cases(), args.clients, args.pause)
    story = asyncio.run(
        load.run("load", args.seconds, kill_every=args.kill_every, change_replicas=args.change_replicas)
    )
    return finish([story], args.plot)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
