"""Several answers to one request, as one stream of pieces."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from openai_frontend.engine import Delta, Engine
from triton_omni.sampling import MAX_SEED

# Pieces that wait for a slow client before the engine is kept waiting too.
WAITING_PIECES = 64


def answers(
    engine: Engine, request: Mapping[str, Any], media: Sequence[bytes], choices: int
) -> AsyncGenerator[Delta, None]:
    """``choices`` answers to ``request``, each with a seed of its own where there is a seed."""
    if choices == 1:
        return engine.generate(request, media)
    return merged([engine.generate(_numbered(request, index), media) for index in range(choices)])


def _numbered(request: Mapping[str, Any], index: int) -> dict[str, Any]:
    thinker = request.get("thinker", {})
    if "seed" not in thinker:
        return dict(request)
    return {**request, "thinker": {**thinker, "seed": (thinker["seed"] + index) % (MAX_SEED + 1)}}


async def merged(each: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """The pieces of all as they come, marked with the place of theirs. The first error ends all of them, as closing
    this generator does.
    """
    pieces: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(WAITING_PIECES)

    async def pump(choice: int, answer: AsyncGenerator[Delta, None]) -> None:
        try:
            async with aclosing(answer):
                async for piece in answer:
                    await pieces.put(dataclasses.replace(piece, choice=choice))
        except Exception as error:
            await pieces.put(error)
        else:
            await pieces.put(None)

    pumps = [asyncio.create_task(pump(choice, answer)) for choice, answer in enumerate(each)]
    running = len(pumps)
    try:
        while running:
            match await pieces.get():
                case None:
                    running -= 1
                case Exception() as error:
                    raise error
                case piece:
                    yield piece
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
