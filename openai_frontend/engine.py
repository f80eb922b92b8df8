"""The seam between HTTP and whatever answers: one protocol, so that tests need no server."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """One piece of an answer. ``audio``: int16 little-endian samples, 24 kHz mono. ``event``: {} in plain pieces,
    {"type": "start", "usage": {"prompt_tokens"}} in the first, {"type": "end", "finish_reason", "usage"} in the last;
    between them, where asked for, "usage" so far, "logprobs" of the tokens and the deltas of "tool_calls".
    ``choice``: of several answers to one request, which.
    """

    text: str = ""
    audio: bytes = b""
    event: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    choice: int = 0


class Engine(Protocol):
    """Answers requests in omni_bls's own JSON."""

    def generate(self, request: Mapping[str, Any], media: Sequence[bytes]) -> AsyncGenerator[Delta, None]:
        """The answer's pieces; the last one carries the end event, anything else is an OmniError raised here.
        Closing the generator (or cancelling its consumer) cancels the request in every stage.
        """
        ...

    async def waiting_for(self) -> list[str]:
        """What is not ready yet, in words; empty when requests can be served."""
        ...

    async def close(self) -> None: ...
