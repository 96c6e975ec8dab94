"""Self-distillation through serving engines: the base LLM behind OpenAI-compatible completions servers.

The engine scales (vLLM, SGLang, llama.cpp; one process or a cluster); this client only keeps it fed. Prompts
go out as token ids, so that template and tokenizer cannot differ; a server that takes text only says so in
its refusal. Answers come back as token ids where the server gives them (vLLM and SGLang, `return_token_ids`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import AsyncIterator, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import aiohttp
from anyio.from_thread import start_blocking_portal

from specformer.base import Base
from specformer.engine import Request
from specformer.errors import UserError

KEY = "OPENAI_API_KEY"
TRIES = 12
PASSING = (408, 409, 425, 429)
"""Statuses, besides 500 and above, after which another try may succeed."""
# vLLM, SGLang, llama.cpp and OpenAI word it differently: "maximum context length", "context_length_exceeded",
# "the available context size".
_OVERFLOW = re.compile(r"context[ _-]?(length|size|window)", re.IGNORECASE)


@dataclass
class Served:
    """A server's answer. ids: the new tokens, the stop token included, and text without special tokens, as in
    `engine.Result`. finish_reason: stop or length; too_long (more than the server's context) and inexact (ids
    that its text does not tell for sure) are dropped prompts, with no ids."""

    id: str
    prompt_ids: list[int]
    ids: list[int]
    text: str
    finish_reason: str


class _Fault(Exception):
    """What went wrong may pass: worth another try."""


class _Overflow(Exception):
    """The server's context is too short for the prompt and its answer."""


@dataclass
class _Server:
    url: str
    faults: int = 0
    """In a row, over all its slots."""


class Servers:
    """Greedy answers of `base` by completions servers, for `distill` in the place of an `Engine`.

    urls: such as http://gpu1:8000, with or without /v1. model: the name it is served under; None is
    base.name. concurrency: requests in flight at each server. timeout: seconds for one answer, waiting in the
    server's queue included. rest: seconds that a slot rests after a first fault, up to 64 times as long after
    more in a row. A key for the servers comes from the environment variable OPENAI_API_KEY only.
    """

    def __init__(
        self,
        base: Base,
        urls: Sequence[str],
        *,
        model: str | None = None,
        concurrency: int = 64,
        timeout: float = 600.0,
        rest: float = 0.5,
    ):
        self.base, self.model, self.timeout, self.rest = base, model or base.name, timeout, rest
        self.servers = [_Server(url.rstrip("/").removesuffix("/v1")) for url in urls]
        self.concurrency = concurrency
        self.key = os.environ.get(KEY, "").strip()
        end = base.tokenizer.eos_token_id
        self.end: int = end if end in base.stop_token_ids else base.stop_token_ids[0]
        self._told = False

    def run(self, requests: Iterable[Request]) -> Generator[Served, None, None]:
        """Yield each request's answer once, in the order they finish; `requests` are read as slots get free.

        Raises UserError, after yielding what has finished: for a server that cannot be reached or serves
        another model, before any request is sent; for a refused key, certificate or request, at once; for a
        request that failed TRIES times.
        """
        finished: SimpleQueue[Future] = SimpleQueue()
        running = 0
        # In a thread of its own, since a notebook's thread has a running loop already.
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(self._connect()):
            try:
                for request in requests:
                    if running == self.concurrency * len(self.servers):
                        yield self._result(*finished.get().result())
                        running -= 1
                    portal.start_task_soon(self._answer, request).add_done_callback(finished.put)
                    running += 1
                for _ in range(running):
                    yield self._result(*finished.get().result())
            except UserError:
                while not finished.empty():
                    if not (future := finished.get()).exception():
                        yield self._result(*future.result())
                raise

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[None]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        connector = aiohttp.TCPConnector(limit=0)  # the slots are the limit
        timeout = aiohttp.ClientTimeout(total=self.timeout)
        async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
            self._session = session
            for server in self.servers:
                await self._check(server)
            # A server that is slow or at fault gives its slots back later, so the others get the work.
            self._slots: asyncio.Queue[_Server] = asyncio.Queue()
            for _ in range(self.concurrency):
                for server in self.servers:
                    self._slots.put_nowait(server)
            yield

    async def _check(self, server: _Server) -> None:
        """Raise UserError unless the server is there and holds the model."""
        fault = None
        for attempt in range(3):
            try:
                found = await self._ask(f"{server.url}/v1/models")
                names = [str(entry["id"]) for entry in found["data"]]
                break
            except (_Fault, KeyError, TypeError) as error:
                fault = error if isinstance(error, _Fault) else "gives no list of models"
                await asyncio.sleep(self.rest * 2**attempt)
        else:
            raise UserError(
                f"{server.url}/v1/models {fault}: is a completions server running there? Start one, or "
                "correct distill.servers ([] answers with the engine here)"
            )
        if self.model not in names:
            raise UserError(
                f"{server.url} serves {', '.join(map(repr, names))}, not {self.model!r}: if that is the base "
                "LLM under another name, set distill.model to it; all servers must hold the same"
            )

    async def _answer(self, request: Request) -> tuple[Request, Mapping[str, Any] | None]:
        """The first choice of a completion, checked, with the count of its tokens; None for an overflow."""
        body = {
            "model": self.model,
            "prompt": request.prompt_ids,
            "max_tokens": request.max_new_tokens,
            "temperature": 0,
            # Servers read defaults for these from a model's generation_config.json.
            "top_p": 1,
            "repetition_penalty": 1.0,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "stop_token_ids": list(self.base.stop_token_ids),
            "return_token_ids": True,
        }
        said = ""
        for _ in range(TRIES):
            server = await self._slots.get()
            try:
                answer = await self._ask(f"{server.url}/v1/completions", body)
                choice = self._choice(request, answer, server)
                server.faults = 0
                return request, choice
            except _Overflow:
                server.faults = 0
                return request, None
            except _Fault as fault:
                server.faults += 1
                said = f"{server.url} {fault}"
            finally:
                pause = self.rest * 2 ** min(server.faults - 1, 6) * random.uniform(0.5, 1)
                asyncio.get_running_loop().call_later(
                    pause if server.faults else 0, self._slots.put_nowait, server
                )
        raise UserError(
            f"request {request.id!r} failed {TRIES} times; the last time {said}. What was answered is kept: "
            "look at the server's log, then run it again to go on"
        )

    async def _ask(self, url: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST `body` as JSON, or GET, and parse the answer. Raises _Fault, _Overflow or, for what no other
        try would mend, UserError; none of them shows the key."""
        try:
            async with self._session.request(
                "POST" if body else "GET", url, json=body, allow_redirects=False
            ) as answer:
                status, said = answer.status, await answer.read()
        except aiohttp.ClientSSLError as error:
            raise UserError(
                f"{url}: no secure connection ({error}): mend the server's certificate, or use the host name "
                "that it is for"
            ) from None
        except TimeoutError:
            raise _Fault(f"did not answer within {self.timeout:g} s (distill.timeout_s)") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Fault(f"broke off or cannot be reached ({error})") from None
        if status == 200:
            try:
                return json.loads(said)
            except ValueError:
                raise _Fault("sent something that is no whole JSON") from None
        if status in (401, 403):
            key = f"the key in {KEY}" if self.key else f"to answer without a key: set {KEY}"
            raise UserError(f"{url} refuses {key} (status {status})")
        text = " ".join(said.decode(errors="replace").split())
        text = (text.replace(self.key, "***") if self.key else text)[:400]
        if status in PASSING or status >= 500:
            raise _Fault(f"answered with status {status} ({text})")
        if status in (400, 413, 422) and _OVERFLOW.search(text):
            raise _Overflow
        raise UserError(f"{url} refuses the request (status {status}): {text}")

    def _choice(self, request: Request, answer: Any, server: _Server) -> Mapping[str, Any]:
        try:
            choice = answer["choices"][0]
            ids, reason, text = choice.get("token_ids"), choice["finish_reason"], choice["text"]
            counted = (answer.get("usage") or {}).get("completion_tokens")
        except (AttributeError, IndexError, KeyError, TypeError):
            raise _Fault("sent no completion") from None
        if reason not in ("stop", "length"):
            raise _Fault(f"ended an answer with {reason!r}")
        if choice.get("prompt_token_ids") not in (None, request.prompt_ids):
            raise UserError(
                f"{server.url} changed the prompt of request {request.id!r}: switch that off there"
            )
        if ids is not None:
            size = self.base.model.config.vocab_size
            if len(ids) > request.max_new_tokens or not all(type(i) is int and 0 <= i < size for i in ids):
                raise _Fault(f"sent {len(ids)} tokens that are too many or none of the model's")
        elif not self._told:
            self._told = True
            print(
                f"{server.url} returns no token ids: its text is tokenised again, and answers that this does "
                "not restore are dropped",
                flush=True,
            )
        return {"ids": ids, "text": text, "stopped": reason == "stop", "counted": counted}

    def _result(self, request: Request, choice: Mapping[str, Any] | None) -> Served:
        # Not in the loop's thread: a tokenizer is for one thread at a time.
        tokenizer = self.base.tokenizer
        if choice is None:
            return Served(request.id, request.prompt_ids, [], "", "too_long")
        ids = choice["ids"]
        if ids is None:
            ids = self._tokenised_again(choice["text"], choice["counted"], choice["stopped"])
        # Some servers cut the stop token off.
        if ids is not None and choice["stopped"] and (not ids or ids[-1] not in self.base.stop_token_ids):
            ids = [*ids, self.end]
        if not ids or len(ids) > request.max_new_tokens:
            return Served(request.id, request.prompt_ids, [], "", "inexact")
        reason = "stop" if ids[-1] in self.base.stop_token_ids else "length"
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        return Served(request.id, request.prompt_ids, ids, text, reason)

    def _tokenised_again(self, text: str, counted: int | None, stopped: bool) -> list[int] | None:
        """The ids of an answer's text; None unless they give the text again, as many as the server counted.

        counted: tokens of the answer, the stop token among them or not; None where the server does not say.
        """
        tokenizer = self.base.tokenizer
        ids = list(tokenizer(text, add_special_tokens=False).input_ids)
        counts = (None, len(ids), len(ids) + stopped)
        cut = "\ufffd" in text  # a character that lost some of its bytes
        exact = tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        return ids if exact and not cut and counted in counts else None
