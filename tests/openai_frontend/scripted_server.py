"""The frontend as a process, with an engine that answers by itself: a word every 50 ms, ``max_tokens`` of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from openai_frontend import main
from openai_frontend.engine import Delta
from tests.openai_frontend.fakes import END, START

WORD_S = 0.05


class WordsEngine:
    def __init__(self, url: str, *, stall_timeout_s: float) -> None:
        pass

    async def generate(self, request: Mapping[str, Any], media: Sequence[bytes]) -> AsyncGenerator[Delta, None]:
        yield START
        for number in range(request["thinker"]["max_tokens"]):
            await asyncio.sleep(WORD_S)
            yield Delta(text=f"w{number} ")
        yield END

    async def waiting_for(self) -> list[str]:
        return []

    async def close(self) -> None:
        pass


if __name__ == "__main__":
    main.TritonEngine = WordsEngine
    main.main()
