"""What /openapi.json says beyond the requests: the shapes of answers and of errors."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_AT = "#/components/schemas"


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """``param``: the field that is wrong, by the client's name."""

    error: ErrorDetail


class AnswerAudio(BaseModel):
    """``data``: base64 of one file in the format asked for. ``expires_at``: until then ``id`` names this answer."""

    id: str
    data: str
    transcript: str
    expires_at: int


class CalledFunction(BaseModel):
    """``arguments``: JSON text."""

    name: str
    arguments: str


class AnswerToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[AnswerToolCall] | None = None
    audio: AnswerAudio | None = None


class Alternative(BaseModel):
    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(Alternative):
    top_logprobs: list[Alternative]


class Logprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class Choice(BaseModel):
    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: Logprobs | None


class Usage(BaseModel):
    """An audio token is a codec frame, 80 ms of speech."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


CHAT_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "application/json": {"schema": {"$ref": f"{_AT}/ChatCompletion"}},
            "text/event-stream": {},
        }
    }
}
_EVENT = {
    "description": "Each server-sent event; its data is JSON, or [DONE] where OpenAI ends with it.",
    "type": "object",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_ERROR = {"application/json": {"schema": {"$ref": f"{_AT}/Error"}}}
_MODELS = (Error, ChatCompletion)


def install(app: FastAPI) -> None:
    """Every operation may answer with an error of ours; none answers with FastAPI's own."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = plain()
            _, shapes = models_json_schema(
                [(model, "serialization") for model in _MODELS], ref_template=f"{_AT}/{{model}}"
            )
            named = schema.setdefault("components", {}).setdefault("schemas", {})
            named |= shapes["$defs"]
            for name in ("HTTPValidationError", "ValidationError"):
                named.pop(name, None)
            for operation in (o for path in schema["paths"].values() for o in path.values()):
                operation["responses"].pop("422", None)
                for response in operation["responses"].values():
                    if "text/event-stream" in response.get("content", {}):
                        response["content"]["text/event-stream"] = {"schema": _EVENT}
                for status, text in (("4XX", "The request is refused"), ("5XX", "The request failed")):
                    operation["responses"].setdefault(status, {"description": text, "content": _ERROR})
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{}, {"key": []}]  # which of them, the operator decides
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
