"""The HTTP front: the part of OpenAI's interface that text needs, and where workers are seen and pipelines added."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from model import Tokenizer
from pipeline import Scheduler, Sequence
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

__all__ = ["Front", "Server"]


class Refused(Exception):
    """A request that cannot be served, and why."""


class Front:
    """The routes.

    Args:
        scheduler: who makes the tokens.
        tokenizer: of the model.
        name: the model's.
        length: tokens of prompt and answer at most.
        vocabulary: number of tokens that the model knows.
    """

    def __init__(
        self, scheduler: Scheduler, tokenizer: Tokenizer, name: str, length: int, vocabulary: int
    ) -> None:
        self.scheduler, self.tokenizer, self.name = scheduler, tokenizer, name
        self.length, self.vocabulary = length, vocabulary
        self.open: weakref.WeakSet[Sequence] = weakref.WeakSet()
        self.closing = False
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
                Route("/replicas", self.replicas, methods=["POST"]),
            ],
            exception_handlers={Refused: _refuse},
        )

    def close(self) -> None:
        """End all answers where they are: the server is about to stop."""
        self.closing = True
        for sequence in [*self.open]:
            sequence.end()

    # -- OpenAI's interface ----------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await _json(request)
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt)
        if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
            raise Refused("prompt is neither a text nor a list of tokens: one of both is needed.")
        return await self.answer(
            request, body, prompt, _Text("text_completion", "cmpl", lambda text: {"text": text})
        )

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await _json(request)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(type(each) is dict for each in messages):
            raise Refused("messages is no list of messages: give one of objects with role and content.")
        if hasattr(self.tokenizer, "apply_chat_template"):
            prompt = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        else:
            lines = [f"{each.get('role')}: {each.get('content')}\n" for each in messages]
            prompt = self.tokenizer.encode("".join(lines) + "assistant: ")
        part = "delta" if body.get("stream") else "message"
        form = _Text(
            "chat.completion", "chatcmpl", lambda text: {part: {"role": "assistant", "content": text}}
        )
        return await self.answer(request, body, prompt, form)

    async def answer(
        self, request: Request, body: dict[str, Any], prompt: list[int], form: _Text
    ) -> Response:
        """Make a sequence of the prompt, and answer with it: token by token, or as a whole."""
        # A token that the model does not know would end the worker that gets it, and each one that takes its place.
        if strange := [token for token in prompt if not 0 <= token < self.vocabulary]:
            raise Refused(f"token {strange[0]}: the model knows 0 to {self.vocabulary - 1}. Leave it out.")
        most = body.get("max_completion_tokens", body.get("max_tokens", 16))
        if type(most) is not int or most < 1 or len(prompt) + most > self.length:
            raise Refused(
                f"{len(prompt)} tokens of prompt and max_tokens {most!r}: "
                f"together they may be 2 to {self.length}. Shorten one of both."
            )
        if body.get("temperature") or body.get("n", 1) != 1:
            raise Refused("temperature and n: decoding is greedy, with one answer. Leave both out.")
        if self.closing:
            return JSONResponse({"error": {"message": "the server stops"}}, 503)
        sequence = Sequence([*prompt], len(prompt) + most, self.tokenizer.eos_token_id)
        self.open.add(sequence)
        self.scheduler.submit(sequence)
        watch = asyncio.create_task(_gone(request, sequence))
        head = {
            "id": f"{form.prefix}-{uuid.uuid4().hex}", "object": form.kind,
            "created": int(time.time()), "model": self.name,
        }  # fmt: skip
        pieces = self.pieces(sequence, watch)
        if body.get("stream"):
            return StreamingResponse(
                self.events(head, form, sequence, pieces), media_type="text/event-stream"
            )
        text, tokens = "", []
        async for token, piece in pieces:
            text += piece
            tokens.append(token)
        if sequence.error:
            return JSONResponse(_failed(sequence), 500)
        choice = {
            "index": 0, **form.choice(text), "token_ids": tokens, "finish_reason": self.reason(sequence)
        }  # fmt: skip
        usage = {
            "prompt_tokens": len(prompt), "completion_tokens": len(tokens),
            "total_tokens": len(prompt) + len(tokens),
        }  # fmt: skip
        return JSONResponse({**head, "choices": [choice], "usage": usage})

    async def pieces(self, sequence: Sequence, watch: asyncio.Task[None]) -> AsyncIterator[tuple[int, str]]:
        """Tokens as they come, each with the text that it completes."""
        tokens: list[int] = []
        told = ""
        try:
            while (token := await sequence.fresh.get()) is not None:
                tokens.append(token)
                text = self.tokenizer.decode(tokens)
                # A character of several tokens waits for the last of them; three are its longest beginning.
                whole = text if text == text.rstrip("\ufffd") else text[: max(len(told), len(text) - 3)]
                yield token, whole[len(told) :]
                told = whole
        finally:
            sequence.end()
            watch.cancel()

    async def events(
        self, head: dict[str, Any], form: _Text, sequence: Sequence, pieces: AsyncIterator[tuple[int, str]]
    ) -> AsyncIterator[str]:
        """Server-sent events of an answer."""
        head = {**head, "object": form.kind + ".chunk"} if form.prefix == "chatcmpl" else head

        def event(choice: dict[str, Any], reason: str | None) -> str:
            choices = [{"index": 0, **choice, "finish_reason": reason}]
            return f"data: {json.dumps({**head, 'choices': choices})}\n\n"

        async for token, piece in pieces:
            yield event({**form.choice(piece), "token_ids": [token]}, None)
        if sequence.error:
            yield f"data: {json.dumps(_failed(sequence))}\n\n"
        else:
            yield event({**form.choice(""), "token_ids": []}, self.reason(sequence))
        yield "data: [DONE]\n\n"

    def reason(self, sequence: Sequence) -> str:
        """Why an answer ended."""
        if sequence.tokens[-1] == sequence.stop:
            return "stop"
        return "length" if len(sequence.tokens) >= sequence.limit else "abort"

    # -- about the server ------------------------------------------------------------------------------------

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [{"id": self.name, "object": "model"}]})

    async def health(self, _: Request) -> Response:
        """GET /health: pipelines, their workers, and who stands by; 503 while there is no pipeline."""
        status = self.scheduler.status()
        return JSONResponse(status, 200 if status["pipelines"] else 503)

    async def replicas(self, request: Request) -> Response:
        """POST /replicas {"count": N}: so many pipelines; the answer comes when it is so."""
        count = (await _json(request)).get("count")
        if type(count) is not int or count < 1:
            raise Refused(f"count {count!r} is no number of pipelines: at least 1.")
        try:
            await self.scheduler.resize(count, 60)
        except asyncio.TimeoutError:
            message = f"{count} pipelines need more workers: {self.scheduler.stages} for each stand by."
            return JSONResponse({"error": {"message": message}}, 503)
        return await self.health(request)


class Server(uvicorn.Server):
    """uvicorn, told to stop by this program.

    Args:
        front: the routes.
        host, port: where; port 0 is any that is free.
        told: gets host:port once it serves.
    """

    def __init__(self, front: Front, host: str, port: int, told: Callable[[str], None]) -> None:
        super().__init__(uvicorn.Config(front.app, host, port, log_level="warning", access_log=False))
        self.front, self.told = front, told

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and tell where."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.told(f"{host}:{port}")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: uvicorn would raise the signal again when it is done, and no world would be closed."""
        yield

    def stop(self) -> None:
        """End the streams, then the server."""
        self.front.close()
        self.should_exit = True


class _Text:
    """How an answer is written."""

    def __init__(self, kind: str, prefix: str, choice: Callable[[str], dict[str, Any]]) -> None:
        self.kind, self.prefix, self.choice = kind, prefix, choice


async def _json(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
        # JSON can name half of a surrogate pair, which no tokenizer takes.
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON of Unicode text: {error}.") from error
    if not isinstance(body, dict):
        raise Refused("the body is no object: give one.")
    return body


async def _gone(request: Request, sequence: Sequence) -> None:
    """End a sequence whose client has gone: its slot is for others."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    sequence.end()


def _failed(sequence: Sequence) -> dict[str, Any]:
    return {"error": {"message": sequence.error, "type": "server_error"}}


async def _refuse(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, 400)
