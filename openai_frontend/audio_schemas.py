"""Bodies of /v1/audio/speech, and form fields of /v1/audio/transcriptions and /translations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from openai_frontend.audio import FORMATS
from openai_frontend.schemas import TalkerOptions
from openai_frontend.strict import Int, Only, Strict, Text

# OpenAI's name here for what its chat API calls pcm16.
SPEECH_FORMATS = {"pcm": "pcm16"} | {name: name for name in FORMATS}
TRANSCRIPT_FORMATS = ("json", "text", "verbose_json")
# The languages that Qwen3-Omni was trained to hear, by ISO 639 code.
LANGUAGES = {
    "en": "English",
    "zh": "Chinese",
    "yue": "Cantonese",
    "ko": "Korean",
    "ja": "Japanese",
    "de": "German",
    "ru": "Russian",
    "it": "Italian",
    "fr": "French",
    "es": "Spanish",
    "pt": "Portuguese",
    "ms": "Malay",
    "nl": "Dutch",
    "id": "Indonesian",
    "tr": "Turkish",
    "vi": "Vietnamese",
    "ar": "Arabic",
    "ur": "Urdu",
}


def _refused(message: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", "{message}", {"message": message})


def _speech_format(value: str) -> str:
    if value not in SPEECH_FORMATS:
        raise _refused(f"must be one of {', '.join(SPEECH_FORMATS)}")
    return value


def _transcript_format(value: str) -> str:
    if value in ("srt", "vtt", "diarized_json"):
        raise _refused(f"must be one of {', '.join(TRANSCRIPT_FORMATS)}: the model tells no times and no speakers")
    if value not in TRANSCRIPT_FORMATS:
        raise _refused(f"must be one of {', '.join(TRANSCRIPT_FORMATS)}")
    return value


def _language(value: str) -> str:
    if value.lower() not in LANGUAGES:
        raise _refused(f"must be one of {', '.join(LANGUAGES)}")
    return value.lower()


class SpeechRequest(Strict):
    """POST /v1/audio/speech. ``voice``: one of the checkpoint's, in any case; ``instructions``: how to read;
    ``talker``, ``seed``, ``chunk_frames`` and ``chunk_policy`` as in chat.
    """

    model: str
    input: Annotated[Text, Field(min_length=1)]
    voice: str | None = None
    response_format: (
        Annotated[str, AfterValidator(_speech_format), WithJsonSchema({"enum": list(SPEECH_FORMATS)})] | None
    ) = None
    speed: Annotated[Any, Only(1)] = None
    instructions: Text | None = None
    stream_format: Literal["audio", "sse"] | None = None

    # Beyond OpenAI's.
    talker: TalkerOptions | None = None
    chunk_frames: list[Int] | None = None
    chunk_policy: Literal["fixed", "adaptive"] | None = None
    seed: Int | None = None


class TranslationForm(Strict):
    """The fields beside ``file``; they come as texts."""

    model_config = ConfigDict(strict=False)

    model: str
    prompt: Text | None = None
    response_format: Annotated[
        str, AfterValidator(_transcript_format), WithJsonSchema({"enum": list(TRANSCRIPT_FORMATS)})
    ] = "json"
    temperature: float = 0.0
    stream: bool = False


class TranscriptionForm(TranslationForm):
    language: Annotated[str, AfterValidator(_language), WithJsonSchema({"enum": list(LANGUAGES)})] | None = None

    timestamp_granularities: Annotated[Any, Only()] = None
    include: Annotated[Any, Only()] = None
    chunking_strategy: Annotated[Any, Only()] = None
    known_speaker_names: Annotated[Any, Only()] = None
    known_speaker_references: Annotated[Any, Only()] = None
    keywords: Annotated[Any, Only()] = None
    languages: Annotated[Any, Only()] = None
