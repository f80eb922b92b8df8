"""The frontend as a process, with an engine that answers by itself: ``max_tokens`` words at once. Asked ``WAIT`` it
holds the last of them back until the process gets a SIGUSR1.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from openai_frontend import main
from openai_frontend.engine import Delta
from tests.openai_frontend.fakes import END, START

WAIT = "Wait."


class WordsEngine:
    def __init__(self, url: str, *, stall_timeout_s: float) -> None:
        self._released = asyncio.Event()

    async def generate(self, request: Mapping[str, Any], media: Sequence[bytes]) -> AsyncGenerator[Delta, None]:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._released.set)
        yield START
        words = request["thinker"]["max_tokens"]
        for number in range(words):
            if number == words - 1 and request["messages"][-1]["content"] == WAIT:
                await self._released.wait()
            yield Delta(text=f"w{number} ")
        yield END

    async def waiting_for(self) -> list[str]:
        return []

    async def close(self) -> None:
        pass


if __name__ in ("__main__", "__mp_main__"):  # its workers import it under the second name
    main.TritonEngine = WordsEngine
if __name__ == "__main__":
    main.main()
