"""A small request through every stage: a server that says it is ready may yet not answer."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

from openai_frontend.engine import Engine
from triton_omni.errors import OmniError, RequestTimeoutError, StageError

LIMIT_S = 30.0


class Probe:
    """``speaks``: the answer must have speech, too. ``limit_s``: how long it may take."""

    def __init__(self, engine: Engine, *, speaks: bool, limit_s: float = LIMIT_S) -> None:
        self._engine = engine
        self._speaks = speaks
        self._limit_s = limit_s
        self._running: asyncio.Task[dict[str, float]] | None = None

    async def run(self) -> dict[str, float]:
        """What it took, in ms. Who asks while one runs waits for that one. Raises: OmniError."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._ask())
        return await asyncio.shield(self._running)

    async def _ask(self) -> dict[str, float]:
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._times()
        except TimeoutError:
            raise RequestTimeoutError(f"no whole answer within {self._limit_s:g} s") from None
        except OmniError:
            raise
        except Exception as error:
            raise StageError("omni_bls", f"{type(error).__name__}: {error}") from error

    async def _times(self) -> dict[str, float]:
        started_s = time.monotonic()
        times: dict[str, float] = {}

        def note(name: str) -> None:
            times.setdefault(name, round((time.monotonic() - started_s) * 1000, 1))

        async with aclosing(self._engine.generate(self._request(), [])) as pieces:
            async for piece in pieces:
                if piece.text:
                    note("first_text_ms")
                if piece.audio:
                    note("first_audio_ms")
        note("total_ms")
        for name in ("first_text_ms", *(("first_audio_ms",) if self._speaks else ())):
            if name not in times:
                raise StageError("omni_bls", f"answered without {name.split('_')[1]}")
        return times

    def _request(self) -> dict[str, Any]:
        """Two tokens and one chunk of speech, whatever the model would like to say."""
        return {
            "messages": [{"role": "user", "content": "Hello"}],
            "modalities": ["text", "audio"] if self._speaks else ["text"],
            "thinker": {"max_tokens": 2, "ignore_eos": True},
            **({"talker": {"min_frames": 4, "max_frames": 4}} if self._speaks else {}),
            "request_id": "probe",
        }
