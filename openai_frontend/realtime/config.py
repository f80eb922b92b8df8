"""What a session has set, and what one answer may set otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from openai_frontend import tool_schemas
from openai_frontend.context import Context
from openai_frontend.realtime.formats import PCM16_24K, WireFormat
from openai_frontend.realtime.schemas import (
    Audio,
    Format,
    NamedTool,
    ResponseOptions,
    SessionPatch,
    Tool,
    ToolChoice,
    TurnDetection,
)
from openai_frontend.realtime.vad import TurnRules
from openai_frontend.tools import tools_wire
from triton_omni.errors import InvalidRequestError

_G711_RATE_HZ = 8_000
# The runtime's field names in the client's words.
_CLIENTS_NAMES = {
    "speaker": "audio.output.voice",
    "thinker.max_tokens": "max_output_tokens",
    "thinker.temperature": "temperature",
    "modalities": "output_modalities",
}
_ANY_MESSAGE = [{"role": "user", "content": "?"}]


@dataclasses.dataclass(frozen=True, slots=True)
class SessionConfig:
    """``max_output_tokens`` and ``temperature``: None, and the runtime decides."""

    voice: str
    speaks: bool
    instructions: str = ""
    input_format: WireFormat = PCM16_24K
    output_format: WireFormat = PCM16_24K
    turn_detection: TurnDetection | None = dataclasses.field(default_factory=lambda: TurnDetection(type="server_vad"))
    max_output_tokens: int | None = None
    temperature: float | None = None
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = None

    @property
    def turn_rules(self) -> TurnRules | None:
        rules = self.turn_detection
        if rules is None:
            return None
        return TurnRules(rules.threshold, rules.prefix_padding_ms, rules.silence_duration_ms)

    @property
    def output_modalities(self) -> list[str]:
        return ["audio"] if self.speaks else ["text"]

    @property
    def output_json(self) -> dict[str, Any]:
        return {"format": self.output_format.json, "voice": self.voice}

    @property
    def max_output_tokens_json(self) -> int | str:
        return "inf" if self.max_output_tokens is None else self.max_output_tokens

    def json(self) -> dict[str, Any]:
        turn_detection = self.turn_detection and self.turn_detection.model_dump()
        return {
            "type": "realtime",
            "object": "realtime.session",
            "output_modalities": self.output_modalities,
            "instructions": self.instructions,
            "audio": {
                "input": {
                    "format": self.input_format.json,
                    "turn_detection": turn_detection,
                    "noise_reduction": None,
                    "transcription": None,
                },
                "output": {**self.output_json, "speed": 1.0},
            },
            "max_output_tokens": self.max_output_tokens_json,
            "temperature": self.temperature,
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools],
            "tool_choice": self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.model_dump(),
            "truncation": "disabled",
            "tracing": None,
            "include": None,
            "prompt": None,
        }

    def wire(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The request of omni_bls; text deltas count their tokens, so that what is cancelled has its usage."""
        limits = {"max_tokens": self.max_output_tokens, "temperature": self.temperature}
        wire = {
            "messages": messages,
            "modalities": self.output_modalities,
            "speaker": self.voice if self.speaks else None,
            "thinker": {name: value for name, value in limits.items() if value is not None},
            "continuous_usage": True,
        } | self._tools_wire()
        return {key: value for key, value in wire.items() if value is not None}

    def _tools_wire(self) -> dict[str, Any]:
        """Without tools, of what was set for them only a choice that cannot be met is told of."""
        choice: tool_schemas.ToolChoice
        if isinstance(self.tool_choice, NamedTool):
            name = tool_schemas.FunctionName(name=self.tool_choice.name)
            choice = tool_schemas.NamedTool(type="function", function=name)
        else:
            choice = self.tool_choice
        functions = (tool_schemas.Function(**tool.model_dump(exclude={"type"})) for tool in self.tools)
        tools = [tool_schemas.Tool(type="function", function=function) for function in functions]
        return tools_wire(tools, choice, self.parallel_tool_calls if tools else None)

    def changed(self, patch: SessionPatch | ResponseOptions, context: Context, place: str) -> SessionConfig:
        """With what ``patch`` sets. Raises: InvalidRequestError naming the field under ``place``."""
        changes = _flat(patch)
        config = dataclasses.replace(self, **changes)
        try:
            context.parser.check(config.wire(_ANY_MESSAGE))
        except InvalidRequestError as error:
            raise in_clients_words(error, place) from None
        return config


def in_clients_words(error: InvalidRequestError, place: str) -> InvalidRequestError:
    field = _CLIENTS_NAMES.get(str(error.field))
    if str(error.field).startswith("tool"):
        field = str(error.field).replace(".function.", ".")
    named = f"{place}.{field}" if field else str(error.field)
    return InvalidRequestError(named, f"{named}: {error.message}")


def first_config(context: Context) -> SessionConfig:
    voices = context.voices
    prompt = context.settings.speech_system_prompt if voices else ""
    return SessionConfig(voice=voices[0] if voices else "", speaks=bool(voices), instructions=prompt)


def _flat(patch: SessionPatch | ResponseOptions) -> dict[str, Any]:
    """The fields of SessionConfig that are set, by either of their names; a null that means nothing sets nothing."""
    sent = {name: getattr(patch, name) for name in patch.model_fields_set}
    found = _audio(sent.get("audio"))
    for name, key in (
        ("voice", "voice"),
        ("input_audio_format", "input_format"),
        ("output_audio_format", "output_format"),
    ):
        if sent.get(name) is not None:
            found[key] = sent[name]
    for name in ("instructions", "temperature", "tools", "tool_choice", "parallel_tool_calls"):
        if sent.get(name) is not None:
            found[name] = sent[name]
    if "turn_detection" in sent:
        found["turn_detection"] = sent["turn_detection"]
    modalities = sent.get("output_modalities") or sent.get("modalities")
    if modalities:
        found["speaks"] = "audio" in modalities
    limit = sent.get("max_output_tokens") or sent.get("max_response_output_tokens")
    if limit is not None:
        found["max_output_tokens"] = None if limit == "inf" else limit
    for key in ("input_format", "output_format"):
        if key in found:
            found[key] = _wire_format(found[key], f"audio.{key.removesuffix('_format')}.format.rate")
    return found


def _audio(audio: Audio | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if audio is not None and audio.input is not None:
        if audio.input.format is not None:
            found["input_format"] = audio.input.format
        if "turn_detection" in audio.input.model_fields_set:
            found["turn_detection"] = audio.input.turn_detection
    if audio is not None and audio.output is not None:
        if audio.output.format is not None:
            found["output_format"] = audio.output.format
        if audio.output.voice is not None:
            found["voice"] = audio.output.voice
    return found


def _wire_format(sent: Format, field: str) -> WireFormat:
    pcm = sent.type == "audio/pcm"
    if sent.rate not in (None, *((24_000, 16_000) if pcm else (_G711_RATE_HZ,))):
        accepted = "24000 or 16000" if pcm else f"{_G711_RATE_HZ}"
        raise InvalidRequestError(field, f"{field}: must be {accepted} for {sent.type}, got {sent.rate}")
    return WireFormat(sent.type, sent.rate or (PCM16_24K.rate_hz if pcm else _G711_RATE_HZ))
