"""A completions server on loopback: answers by a fixed rule, and goes wrong by a seeded plan."""

from __future__ import annotations

import asyncio
import random
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from aiohttp import web

FAULTS = ("status", "reset", "half", "cut", "slow")
END = 2
"""The end-of-turn token of conftest's tokenizer."""


def rule(prompt: Sequence[int], limit: int) -> list[int]:
    """The answer of this server: its length and its ids depend on the prompt alone."""
    rng = random.Random(repr(list(prompt)))
    ids = [rng.randrange(3, 300) for _ in range(rng.randrange(1, limit + 3))]
    return ids[:limit] if len(ids) >= limit else [*ids, END]


class FakeServer:
    """A context manager; `url` is where it listens.

    faults: share of the tries that each kind of FAULTS spoils, by `seed`, the prompt and how often it came.
    slow_s: how long a slow answer takes. token_ids: whether answers carry them. decode: ids to text.
    refuse: prompt ids -> (status, body) to answer with, or None. Counts: asked, by prompt; injected, by kind;
    most (tries at a time).
    """

    def __init__(
        self,
        *,
        model: str = "nano",
        faults: float = 0.0,
        seed: int = 0,
        slow_s: float = 5.0,
        token_ids: bool = True,
        decode: Callable[[list[int]], str] = repr,
        answer: Callable[[Sequence[int], int], list[int]] = rule,
        refuse: Callable[[list[int]], tuple[int, str] | None] = lambda prompt: None,
        extra: dict | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        self.model, self.faults, self.seed, self.slow_s = model, faults, seed, slow_s
        self.token_ids, self.decode, self.answer, self.refuse = token_ids, decode, answer, refuse
        self.extra, self.tls = extra or {}, tls
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.injected: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most = 0

    def __enter__(self) -> FakeServer:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self.tls).start()
        port = runner.addresses[0][1]
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{port}"
        started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        if refused := self.refuse([]):
            return web.Response(status=refused[0], text=refused[1])
        return web.json_response({"data": [{"id": self.model}]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._complete(request)
        finally:
            self.running -= 1

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        self.bodies = [*self.bodies[-3:], body]
        self.headers = [*self.headers[-3:], dict(request.headers)]
        tries = self.asked[tuple(prompt)] = self.asked[tuple(prompt)] + 1
        if refused := self.refuse(prompt):
            return web.Response(status=refused[0], text=refused[1])
        ids = self.answer(prompt, body["max_tokens"])
        stopped = ids[-1] == END
        choice = {
            "text": self.decode(ids[:-1] if stopped else ids),
            "finish_reason": "stop" if stopped else "length",
        }
        if self.token_ids and body["return_token_ids"]:
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        whole = web.json_response(
            {"choices": [choice | self.extra], "usage": {"completion_tokens": len(ids)}}
        )
        drawn = random.Random(f"{self.seed} {prompt} {tries}").random()
        if drawn >= self.faults * len(FAULTS):
            return whole
        kind = FAULTS[int(drawn / self.faults)]
        self.injected[kind] += 1
        text = whole.text or ""
        if kind == "status":
            return web.Response(status=random.Random(tries).choice([429, 500, 503]), text="not now")
        if kind == "half":
            return web.Response(text=text[: len(text) // 2])
        if kind == "slow":
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self.slow_s)
            return whole
        assert request.transport is not None
        if kind == "cut":
            half = web.StreamResponse(headers={"Content-Length": str(len(text))})
            await half.prepare(request)
            await half.write(text[: len(text) // 2].encode())
        request.transport.abort()
        return whole
