"""A fake engine, and clients of an application in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import httpx
import orjson
from fastapi import FastAPI

from openai_frontend.engine import Delta
from triton_omni.errors import OmniError

WITHIN_S = 60  # for what comes at once, on a machine that has stopped for a while too
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "text_tokens": 3, "audio_frames": 2, "audio_samples": 2}
START = Delta(event={"type": "start", "usage": {"prompt_tokens": 7}})
END = Delta(event={"type": "end", "finish_reason": "stop", "usage": USAGE})


class FakeEngine:
    """Answers with ``script``: an OmniError is raised, an Event is waited for. ``closed`` is set when an answer is
    over or has been taken back, ``running`` counts those that are not.
    """

    def __init__(self, *script: Delta | OmniError | Exception | asyncio.Event) -> None:
        self.script = script
        self.request: Mapping[str, Any] = {}
        self.requests: list[Mapping[str, Any]] = []
        self.running = 0
        self.media: Sequence[bytes] = ()
        self.not_ready: list[str] = []
        self.waits = asyncio.Event()
        self.closed = asyncio.Event()

    async def generate(self, request: Mapping[str, Any], media: Sequence[bytes]) -> AsyncGenerator[Delta, None]:
        self.request, self.media = orjson.loads(orjson.dumps(request)), media  # as it crosses the wire
        self.requests.append(self.request)
        self.running += 1
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    self.waits.set()
                    await step.wait()
                else:
                    yield step
        finally:
            self.running -= 1
            self.closed.set()

    async def waiting_for(self) -> list[str]:
        return self.not_ready

    async def close(self) -> None:
        self.closed.set()


def client_of(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://frontend")


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON of each server-sent event; [DONE] must be the last and is left out."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


class LeavingClient:
    """Drives an application by hand, so that the client can leave at any moment."""

    def __init__(
        self,
        app: FastAPI,
        body: Mapping[str, Any],
        *,
        reads: bool = True,
        path: str = "/v1/chat/completions",
        client: tuple[str, int] | None = None,
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self.blocked = asyncio.Event()
        self._reads = reads
        self._gone = asyncio.Event()
        self._inbox = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "method": "POST",
            "headers": headers,
            "client": client,
        }
        scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http"}
        self.done = asyncio.ensure_future(app({**scope, "http_version": "1.1"}, self._receive, self._send))

    def leave(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        if self._inbox:
            return self._inbox.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if not self._reads and message["type"] == "http.response.body":
            self.blocked.set()
            await asyncio.Event().wait()
