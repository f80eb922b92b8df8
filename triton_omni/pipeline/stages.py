"""What passes between the stages, and the protocol each stage fulfils (no torch, no Triton).

Engines (in ``thinker/``, ``talker/``, ``code2wav/``) take a *sink*: a callable that receives each event from the
engine's own thread and must not block. A stream ends with an event whose ``finish_reason`` is set, or with an
OmniError given to the sink; exactly one of the two, always.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from triton_omni.errors import OmniError
from triton_omni.sampling import TalkerSampling, ThinkerSampling
from triton_omni.tools import ToolCallDelta, ToolUse

Int32: TypeAlias = npt.NDArray[np.int32]
Int16: TypeAlias = npt.NDArray[np.int16]
FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]

TokenLogprob: TypeAlias = Mapping[str, Any]
"""OpenAI's: {"token": text, "bytes": [its UTF-8], "logprob", "top_logprobs": [the same three of each alternative]}."""

NO_IDS: Int32 = np.empty(0, np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class ThinkerRequest:
    """One chat request. ``messages``: [{"role", "content": str | [part]}] with parts {"type": "text", "text"} or
    {"type": "audio" | "image" | "video", "media": index into ``media``}; ``media``: the files' bytes; messages with
    calls and their results as ``check_messages`` gives them. ``tools``: what the model may call, if anything.
    ``want_rows``: the caller will fetch ``rows()`` (media prompt with speech).
    """

    request_id: str
    messages: Sequence[Mapping[str, Any]]
    media: Sequence[bytes] = ()
    sampling: ThinkerSampling = dataclasses.field(default_factory=ThinkerSampling)
    tools: ToolUse | None = None
    use_audio_in_video: bool = False
    want_rows: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ThinkerEvent:
    """First event: ``prompt_token_ids`` int32 [P], expanded (media pads repeated). Later ones: new ``token_ids``
    int32 [k] (EOS and stop ids left out) and the ``text`` that became certain; the last has ``finish_reason``.
    What belongs to tool calls is apart from what is said: their ids are ``call_token_ids`` int32 [c], their news
    ``tool_calls``. ``logprobs``: one entry for each of both kinds of ids, in the answer's order, when the sampling asks
    for them, else none.
    """

    prompt_token_ids: Int32 | None = None
    token_ids: Int32 = dataclasses.field(default_factory=lambda: NO_IDS)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    call_token_ids: Int32 = dataclasses.field(default_factory=lambda: NO_IDS)
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @property
    def has_news(self) -> bool:
        """Whether an event on the way brings anything of the answer."""
        return bool(self.token_ids.size or self.text or self.call_token_ids.size or self.tool_calls)


@dataclasses.dataclass(frozen=True, slots=True)
class PromptRows:
    """What the talker needs of a media prompt. ``positions`` int32 [3, P]: the thinker's M-RoPE positions;
    ``rows`` uint8 [R * hidden * itemsize]: layer ``accept_hidden_layer`` (residual included) at the prompt's audio,
    image and video positions in order, as bytes of ``dtype`` ("float32", "bfloat16" or "float16").
    """

    positions: Int32
    rows: npt.NDArray[np.uint8]
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class TalkerStart:
    """Opens a speech session. ``prompt_token_ids`` int32 [P] as the thinker gave them; ``prompt_rows`` for media
    prompts; ``token_ids`` int32 [k >= 0] the first answer ids; ``text_finished`` when no more will follow.
    ``chunk_frames`` and ``chunk_policy``: sizes of the CODES events, as ChunkPlan has them.
    """

    prompt_token_ids: Int32
    speaker: str
    sampling: TalkerSampling
    chunk_frames: tuple[int, ...]
    prompt_rows: PromptRows | None = None
    token_ids: Int32 = dataclasses.field(default_factory=lambda: NO_IDS)
    text_finished: bool = False
    chunk_policy: str = "fixed"


@dataclasses.dataclass(frozen=True, slots=True)
class CodesEvent:
    """``codes`` int32 [frames, code_groups], frames >= 0; the last event of a session has ``finish_reason``:
    "stop" at codec EOS (or nothing to say), "length" at ``max_frames``, "cancelled".
    """

    codes: Int32
    finish_reason: FinishReason | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CodesChunk:
    """Input of code2wav: ``codes`` int32 [frames, code_groups] of session ``session_id``; ``start`` opens it,
    ``end`` flushes and frees it. frames may be 0 with ``end``.
    """

    session_id: str
    codes: Int32
    start: bool = False
    end: bool = False


ThinkerSink: TypeAlias = Callable[[ThinkerEvent | OmniError], None]
TalkerSink: TypeAlias = Callable[[CodesEvent | OmniError], None]


class ThinkerEngine(Protocol):
    """Continuous batching over text requests."""

    def submit(self, request: ThinkerRequest, sink: ThinkerSink) -> None: ...
    def rows(self, request_id: str, timeout_s: float) -> PromptRows: ...
    def abort(self, request_id: str) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...


class TalkerEngine(Protocol):
    """Continuous batching over speech sessions."""

    def start(self, session_id: str, start: TalkerStart, sink: TalkerSink) -> None: ...
    def append(self, session_id: str, token_ids: Int32, text_finished: bool) -> None: ...
    def cancel(self, session_id: str) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...


class Code2WavEngine(Protocol):
    """One batched forward over chunks of different sessions and lengths. One result per chunk, in order."""

    def decode(self, chunks: Sequence[CodesChunk]) -> list[Int16 | OmniError]: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...


class ThinkerStage(Protocol):
    """The thinker as the pipeline sees it. ``cancel`` of an unknown or finished request is ignored; it also frees
    rows that nobody has fetched.
    """

    def generate(self, request: ThinkerRequest) -> Iterator[ThinkerEvent]: ...
    def rows(self, request_id: str) -> PromptRows: ...
    def cancel(self, request_id: str) -> None: ...


class TalkerStage(Protocol):
    """The talker as the pipeline sees it. When ``start`` returns, START is through and appends may follow at once;
    ``append`` to a session that has finished speaking is ignored; ``end`` comes exactly once per ``start``, also when
    ``start`` raised (its sequence may be open all the same).
    """

    def start(self, session_id: str, start: TalkerStart) -> Iterator[CodesEvent]: ...
    def append(self, session_id: str, token_ids: Int32, text_finished: bool) -> None: ...
    def end(self, session_id: str, *, cancel: bool) -> None: ...


class Code2WavStage(Protocol):
    """The vocoder as the pipeline sees it."""

    def decode(self, chunk: CodesChunk) -> Int16: ...
