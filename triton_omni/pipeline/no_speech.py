"""The engines of a checkpoint without speech output: they refuse whatever reaches them past the request parser."""

from __future__ import annotations

from collections.abc import Sequence

from triton_omni.errors import OmniError, StageError
from triton_omni.pipeline.stages import CodesChunk, Int16, Int32, TalkerSink, TalkerStart

_REASON = "this checkpoint has no speech output"


class NoTalker:
    """TalkerEngine of a checkpoint that has no talker."""

    def start(self, session_id: str, start: TalkerStart, sink: TalkerSink) -> None:
        raise StageError("talker", _REASON)

    def append(self, session_id: str, token_ids: Int32, text_finished: bool) -> None:
        raise StageError("talker", _REASON)

    def cancel(self, session_id: str) -> None:
        """No session was opened."""

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing is open."""


class NoCode2Wav:
    """Code2WavEngine of a checkpoint that has no talker, and so nothing to decode."""

    def decode(self, chunks: Sequence[CodesChunk]) -> list[Int16 | OmniError]:
        return [StageError("code2wav", _REASON) for _ in chunks]

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing is open."""
