"""What the frontend counts, in Prometheus' words. Every name begins with ``omni_frontend_``.

Of HTTP: requests by route and status, those in flight, their duration. Of answers, whatever route asked for them: how
they ended, time to first text and to first audio, duration, real-time factor (arrival of the last audio after the
request, over the audio's length), tokens, seconds of audio, and what a player would have waited for (``Playback``).
"""

from __future__ import annotations

import asyncio
import os
import time
import urllib.request
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openai_frontend.engine import Delta, Engine
from triton_omni.model_config import SAMPLE_RATE_HZ

# prometheus_client's own name: the directory where the workers of one frontend keep their figures, and what
# their answers said, together.
SHARED_DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TRITON_TIMEOUT_S = 2.0

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60, 120, 300, 600)
_RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 0.9, 1, 1.25, 1.5, 2, 5, 10)
_UNDERRUN_SECONDS = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30)
_SAMPLES_PER_BYTE = 0.5


class Metrics:
    """One set of figures; with workers, this process's part of them."""

    def __init__(self) -> None:
        self.shared = bool(os.environ.get(SHARED_DIRECTORY_VARIABLE))
        self._registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
            return Histogram(f"omni_frontend_{name}", text, labels, buckets=buckets, registry=registry)

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"omni_frontend_{name}", text, labels, registry=registry)

        self.requests = counter("requests", "HTTP requests and WebSockets that have ended", ("endpoint", "status"))
        self.in_flight = Gauge(
            "omni_frontend_requests_in_flight",
            "HTTP requests and WebSockets that are open",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.request_s = histogram("request_seconds", "From a request's head to its last byte", _SECONDS, ("endpoint",))
        self.answers = counter("answers", "Answers that have ended: finished, aborted or failed", ("outcome",))
        self.first_text_s = histogram("time_to_first_text_seconds", "From request to first text", _SECONDS)
        self.first_audio_s = histogram("time_to_first_audio_seconds", "From request to first audio", _SECONDS)
        self.answer_s = histogram("answer_seconds", "From request to end of a finished answer", _SECONDS)
        self.real_time_factor = histogram(
            "real_time_factor", "From request to last audio, over the audio's length; finished answers", _RATIOS
        )
        self.underrun_s = histogram(
            "playback_underrun_seconds",
            "What a player that starts with the first audio would have waited since; aborted answers, too",
            _UNDERRUN_SECONDS,
            ("outcome",),
        )
        self.tokens = counter("tokens", "Tokens of finished answers; a codec frame is an audio token", ("kind",))
        self.audio_s = counter("audio_seconds", "Seconds of speech in answers that have ended")
        for outcome in ("finished", "aborted", "failed"):
            self.answers.labels(outcome)
            self.underrun_s.labels(outcome)

    def exposition(self) -> bytes:
        if not self.shared:
            return generate_latest(self._registry)
        everybody = CollectorRegistry()
        MultiProcessCollector(everybody)  # type: ignore[no-untyped-call]
        return generate_latest(everybody)

    def close(self) -> None:
        """Take what this worker has in flight out of the sum."""
        if self.shared:
            mark_process_dead(os.getpid())  # type: ignore[no-untyped-call]

    def close_dead(self) -> None:
        """Take what workers had in flight that were killed out of the sum."""
        if self.shared:
            for path in Path(os.environ[SHARED_DIRECTORY_VARIABLE]).glob("gauge_live*_*.db"):
                pid = int(path.stem.rpartition("_")[2])
                if not Path(f"/proc/{pid}").exists():
                    mark_process_dead(pid)  # type: ignore[no-untyped-call]


class Playback:
    """A player that starts with the first audio and stops where none is left. ``underrun_s``: how long it stood still
    until its last audio came; ``last_s``: when that was.
    """

    def __init__(self) -> None:
        self.length_s = 0.0
        self.underrun_s = 0.0
        self.last_s = 0.0
        self._empty_s: float | None = None  # when all that has come will have been played

    def take(self, length_s: float, now_s: float) -> None:
        if self._empty_s is None:
            self._empty_s = now_s
        late_s = max(0.0, now_s - self._empty_s)
        self.underrun_s += late_s
        self._empty_s += late_s + length_s
        self.length_s += length_s
        self.last_s = now_s


class MeasuredEngine:
    """An engine whose answers are counted."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    async def generate(self, request: Mapping[str, Any], media: Sequence[bytes]) -> AsyncGenerator[Delta, None]:
        answer = _Answer(self._metrics)
        outcome = "failed"
        try:
            async with aclosing(self._engine.generate(request, media)) as pieces:
                async for piece in pieces:
                    answer.take(piece)
                    yield piece
            outcome = "finished"
        except (GeneratorExit, asyncio.CancelledError):
            # Who has the end event may close the answer without asking for more.
            outcome = "finished" if answer.end else "aborted"
            raise
        finally:
            answer.close(outcome)

    async def waiting_for(self) -> list[str]:
        return await self._engine.waiting_for()

    async def close(self) -> None:
        await self._engine.close()


class _Answer:
    """The figures of one answer while it comes."""

    def __init__(self, metrics: Metrics) -> None:
        self.end: Mapping[str, Any] = {}
        self._metrics = metrics
        self._started_s = time.monotonic()
        self._has_text = False
        self._playback = Playback()

    def take(self, piece: Delta) -> None:
        now_s = time.monotonic()
        if piece.text and not self._has_text:
            self._has_text = True
            self._metrics.first_text_s.observe(now_s - self._started_s)
        if piece.audio:
            if not self._playback.length_s:
                self._metrics.first_audio_s.observe(now_s - self._started_s)
            length_s = len(piece.audio) * _SAMPLES_PER_BYTE / SAMPLE_RATE_HZ
            self._playback.take(length_s, now_s)
        if piece.event.get("type") == "end":
            self.end = piece.event

    def close(self, outcome: str) -> None:
        metrics, playback = self._metrics, self._playback
        metrics.answers.labels(outcome).inc()
        if playback.length_s:
            metrics.audio_s.inc(playback.length_s)
            metrics.underrun_s.labels(outcome).observe(playback.underrun_s)
        if outcome != "finished":
            return
        metrics.answer_s.observe(time.monotonic() - self._started_s)
        if playback.length_s:
            metrics.real_time_factor.observe((playback.last_s - self._started_s) / playback.length_s)
        usage = self.end.get("usage", {})
        for kind, name in (("prompt", "prompt_tokens"), ("text", "text_tokens"), ("audio", "audio_frames")):
            metrics.tokens.labels(kind).inc(usage.get(name, 0))


class MetricsMiddleware:
    """Counts requests. ``paths``: the routes that are told apart by their path; what a route with parameters takes
    is counted under its template, and the rest of the world under ``other``.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Collection[str]) -> None:
        self.app = app
        self.metrics = metrics
        self.paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        status = "500"  # where nothing is sent the server says so

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = str(message["status"])
            elif message["type"] == "websocket.accept":
                status = "101"
            await send(message)

        started_s = time.monotonic()
        self.metrics.in_flight.inc()
        try:
            await self.app(scope, receive, send_noting_status)
        finally:
            self.metrics.in_flight.dec()
            endpoint = self._endpoint(scope)
            self.metrics.requests.labels(endpoint, status).inc()
            self.metrics.request_s.labels(endpoint).observe(time.monotonic() - started_s)

    def _endpoint(self, scope: Scope) -> str:
        if scope["path"] in self.paths:
            return str(scope["path"])
        template = getattr(scope.get("route"), "path", None)
        return template if template in self.paths else "other"


async def of_triton(url: str) -> bytes:
    """tritonserver's own exposition, or a comment that says why it is missing."""
    try:
        return await asyncio.to_thread(_get, url)
    except OSError as error:
        reason = " ".join(str(error).split())
        return f"# tritonserver's metrics at {url} cannot be read: {reason}\n".encode()


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TRITON_TIMEOUT_S) as response:
        return bytes(response.read())
