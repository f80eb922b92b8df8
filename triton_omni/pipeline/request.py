"""The request of omni_bls: JSON and media bytes in, a checked and complete OmniRequest out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Any, NoReturn

from triton_omni.errors import InvalidRequestError
from triton_omni.model_config import ModelConfig
from triton_omni.options import from_mapping, unknown_key_message
from triton_omni.pipeline.chunk_policy import DEFAULT_CHUNK_FRAMES, ChunkPlan
from triton_omni.pipeline.messages import check_messages
from triton_omni.sampling import TalkerSampling, ThinkerSampling
from triton_omni.tools import TOOL_KEYS, ToolUse, check_tools

MODALITIES = ("text", "audio")
MAX_REQUEST_ID_LENGTH = 128
_KEYS = (
    "messages",
    *TOOL_KEYS,
    "modalities",
    "speaker",
    "thinker",
    "talker",
    "chunk_frames",
    "chunk_policy",
    "async_chunk",
    "use_audio_in_video",
    "continuous_usage",
    "request_id",
)


@dataclasses.dataclass(frozen=True, slots=True)
class OmniRequest:
    """A request with nothing left to decide. ``messages`` and ``media`` are as ThinkerRequest takes them; ``speech``:
    audio is wanted (text streams always, it is the transcript); ``continuous_usage``: text deltas count their tokens;
    ``client_request_id`` is for logs only.
    """

    messages: tuple[Mapping[str, Any], ...]
    media: tuple[bytes, ...]
    speech: bool
    speaker: str
    thinker: ThinkerSampling
    talker: TalkerSampling
    chunk_plan: ChunkPlan
    async_chunk: bool
    use_audio_in_video: bool
    tools: ToolUse | None = None
    continuous_usage: bool = False
    client_request_id: str = ""


class RequestParser:
    """Parses requests against one checkpoint; built once.

    ``chunk_frames``, ``chunk_policy`` and ``async_chunk`` are what requests get that do not say. Raises
    InvalidRequestError on a bad one.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        chunk_frames: Sequence[int] = DEFAULT_CHUNK_FRAMES,
        chunk_policy: str = "fixed",
        async_chunk: bool = True,
    ) -> None:
        self._speaks = model.speaks
        self._speakers = tuple(model.speakers) if model.speaks else ()
        self._default_speaker = model.default_speaker if model.speaks else ""
        self._thinker = ThinkerSampling.defaults(model.generation)
        self._talker = TalkerSampling.defaults(model.generation)
        self._chunk_plan = ChunkPlan(tuple(chunk_frames), chunk_policy)
        self._async_chunk = async_chunk

    def parse(self, request: str | bytes, media: Sequence[bytes] = ()) -> OmniRequest:
        """``request``: the JSON text of REQUEST; ``media``: the bytes of each file of MEDIA.

        Raises: InvalidRequestError whose field is the path of what is wrong (``messages[1].content[0].media``).
        """
        return self.check(_load(request), media)

    def check(self, request: Mapping[str, Any], media: Sequence[bytes] = ()) -> OmniRequest:
        """As ``parse``, of the JSON object. A null stands for an absent key."""
        for key in request:
            if key not in _KEYS:
                raise InvalidRequestError(str(key), unknown_key_message(str(key), _KEYS))
        values = {key: value for key, value in request.items() if value is not None}
        if "messages" not in values:
            raise InvalidRequestError("messages", 'is missing; give a list of {"role": …, "content": …}')
        speech = self._speech(values.get("modalities", ["text"]))
        return OmniRequest(
            messages=check_messages(values["messages"], media),
            media=tuple(media),
            speech=speech,
            speaker=self._speaker(values.get("speaker")),
            thinker=from_mapping(ThinkerSampling, _object(values, "thinker"), where="thinker.", base=self._thinker),
            talker=from_mapping(TalkerSampling, _object(values, "talker"), where="talker.", base=self._talker),
            chunk_plan=self._plan(values),
            async_chunk=_flag(values, "async_chunk", self._async_chunk),
            use_audio_in_video=_flag(values, "use_audio_in_video", False),
            continuous_usage=_flag(values, "continuous_usage", False),
            tools=check_tools(values),
            client_request_id=_request_id(values.get("request_id", "")),
        )

    def _speech(self, modalities: Any) -> bool:
        accepted = '["text"], ["audio"] or ["text", "audio"]'
        if not isinstance(modalities, (list, tuple)):
            raise InvalidRequestError("modalities", f"must be a list: {accepted}; got {short(modalities)}")
        if not modalities:
            raise InvalidRequestError("modalities", f"must not be empty: {accepted}")
        for index, modality in enumerate(modalities):
            if modality not in MODALITIES:
                raise InvalidRequestError(f"modalities[{index}]", f"must be 'text' or 'audio', got {short(modality)}")
        if len(set(modalities)) < len(modalities):
            raise InvalidRequestError("modalities", f"must name each once: {accepted}; got {short(modalities)}")
        if "audio" in modalities and not self._speaks:
            raise InvalidRequestError("modalities", 'must be ["text"]: this checkpoint has no speech output')
        return "audio" in modalities

    def _speaker(self, speaker: Any) -> str:
        if speaker is None:
            return self._default_speaker
        if not self._speaks:
            raise InvalidRequestError("speaker", "must be left out: this checkpoint has no speech output")
        voices = ", ".join(self._speakers)
        if not isinstance(speaker, str):
            raise InvalidRequestError("speaker", f"must be the name of a voice ({voices}), got {short(speaker)}")
        if speaker.lower() not in self._speakers:
            raise InvalidRequestError("speaker", f"Invalid speaker {short(speaker)}. Supported: {voices}")
        return speaker.lower()

    def _plan(self, values: Mapping[str, Any]) -> ChunkPlan:
        frames = _integers(values["chunk_frames"]) if "chunk_frames" in values else self._chunk_plan.frames
        return ChunkPlan(frames, values.get("chunk_policy", self._chunk_plan.policy))


def _load(request: str | bytes) -> Mapping[str, Any]:
    try:
        values = json.loads(request, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequestError("request", f"must be UTF-8: {error}") from None
    except RecursionError:
        raise InvalidRequestError("request", "is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError("request", f"must be JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequestError("request", f"must be a JSON object with messages, got {type(values).__name__}")
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _object(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key, {})
    if not isinstance(value, Mapping):
        raise InvalidRequestError(key, f"must be an object of sampling parameters, got {short(value)}")
    return value


def _flag(values: Mapping[str, Any], key: str, default: bool) -> bool:
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise InvalidRequestError(key, f"must be true or false, got {short(value)}")
    return value


def _integers(chunk_frames: Any) -> tuple[int, ...]:
    if not isinstance(chunk_frames, (list, tuple)):
        raise InvalidRequestError("chunk_frames", f"must be a list of frame counts, got {short(chunk_frames)}")
    for index, size in enumerate(chunk_frames):
        if not isinstance(size, int) or isinstance(size, bool):
            raise InvalidRequestError(f"chunk_frames[{index}]", f"must be an integer, got {short(size)}")
    return tuple(chunk_frames)


def _request_id(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_REQUEST_ID_LENGTH or not value.isprintable():
        raise InvalidRequestError(
            "request_id", f"must be a printable string of at most {MAX_REQUEST_ID_LENGTH} characters"
        )
    return value
