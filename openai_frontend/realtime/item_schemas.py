"""The items of a conversation, as clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from openai_frontend.strict import Only, Strict, Text

CallId: TypeAlias = Annotated[Text, Field(min_length=1, max_length=64)]


class InputText(Strict):
    type: Literal["input_text"]
    text: Text


class InputAudio(Strict):
    """``audio``: base64 of raw samples in the session's input format."""

    type: Literal["input_audio"]
    audio: str
    transcript: str | None = None


class InputImage(Strict):
    type: Literal["input_image"]
    image_url: str
    detail: Annotated[Any, Only("auto")] = None


class OutputText(Strict):
    type: Literal["output_text", "text"]
    text: Text


class OutputAudio(Strict):
    """A former answer as the client remembers it; its samples are of no use to the model."""

    type: Literal["output_audio", "audio"]
    transcript: Text
    audio: Annotated[Any, Only()] = None


UserPart: TypeAlias = Annotated[InputText | InputAudio | InputImage, Field(discriminator="type")]
AssistantPart: TypeAlias = Annotated[OutputText | OutputAudio, Field(discriminator="type")]


class _Item(Strict):
    """``status``: of no effect."""

    id: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class _Message(_Item):
    type: Literal["message"]


class SystemItem(_Message):
    role: Literal["system"]
    content: Annotated[list[InputText], Field(min_length=1)]


class UserItem(_Message):
    role: Literal["user"]
    content: Annotated[list[UserPart], Field(min_length=1)]


class AssistantItem(_Message):
    role: Literal["assistant"]
    content: Annotated[list[AssistantPart], Field(min_length=1)]


class FunctionCallItem(_Item):
    """A call of a former answer as the client remembers it. ``call_id``: null, and one is made up."""

    type: Literal["function_call"]
    call_id: CallId | None = None
    name: Annotated[Text, Field(min_length=1)]
    arguments: Text


class FunctionCallOutputItem(_Item):
    """What the function returned."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Text


MessageBody: TypeAlias = Annotated[SystemItem | UserItem | AssistantItem, Field(discriminator="role")]
ItemBody: TypeAlias = Annotated[MessageBody | FunctionCallItem | FunctionCallOutputItem, Field(discriminator="type")]
