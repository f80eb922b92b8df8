"""Every error in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from triton_omni.errors import (
    CapacityError,
    InvalidRequestError,
    NotFoundError,
    OmniError,
    RequestCancelledError,
    RequestTimeoutError,
)

logger = logging.getLogger(__name__)


class UnavailableError(OmniError):
    """Triton, or a model in it, cannot be reached."""

    code = "unavailable"


class UnauthorizedError(OmniError):
    """No key, or none of ours."""

    code = "invalid_api_key"


class RateLimitError(CapacityError):
    """This client asks too often. ``retry_after_s``: when it may ask again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


# Most special first. 499: the client closed the request; nobody reads that answer, but the access log shows it.
_KINDS: tuple[tuple[type[OmniError], int, str, str], ...] = (
    (NotFoundError, 404, "invalid_request_error", "not_found"),
    (InvalidRequestError, 400, "invalid_request_error", "invalid_value"),
    (CapacityError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (RequestCancelledError, 499, "request_cancelled", "cancelled"),
    (RequestTimeoutError, 504, "server_error", "timeout"),
    (UnavailableError, 503, "server_error", "unavailable"),
    (UnauthorizedError, 401, "invalid_request_error", "invalid_api_key"),
)
_RETRY_AFTER_S = {429: "1", 503: "5"}


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body. The server's own failures are logged; what is no OmniError is told without its inside."""
    if not isinstance(error, OmniError):
        logger.error("unexpected error", exc_info=error)
        return 500, _body("internal error; the server's log says more", "server_error", None, "internal_error")
    for kind, status, type_, code in _KINDS:
        if isinstance(error, kind):
            if kind is NotFoundError and error.field == "model":
                code = "model_not_found"
            return status, _body(error.message, type_, error.field, code)
    logger.warning("a request failed: %s", error.to_wire())
    return 500, _body(error.to_wire(), "server_error", None, error.code)


def response(error: Exception) -> Response:
    """``error`` as an answer, with the headers that belong to its status."""
    headers = {}
    if isinstance(error, RateLimitError):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    return _response(*describe(error), headers)


def install(app: FastAPI) -> None:
    """Answers every error of ``app`` in this shape."""

    @app.exception_handler(OmniError)
    @app.exception_handler(Exception)
    async def on_error(request: Request, error: Exception) -> Response:
        return response(error)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        return _response(*describe(validation_error(error.errors(), error.body)))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = error.detail
        if error.status_code in (404, 405):
            message = f"no route {request.method} {request.url.path}; GET /openapi.json lists what there is"
        body = _body(message, "invalid_request_error", None, _HTTP_CODES.get(error.status_code))
        return _response(error.status_code, body, error.headers)


_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def validation_error(problems: Sequence[Any], body: Any) -> InvalidRequestError:
    """The first of pydantic's ``problems`` as an error of ours, its place written as ``messages[0].content``."""
    problem = problems[0]
    kind, context = problem["type"], problem.get("ctx") or {}
    if kind == "json_invalid":
        return InvalidRequestError(
            "body", f"JSON decode error: the body is not JSON: {context.get('error', problem['msg'])}"
        )
    field = _field(problem["loc"][1:], body, keep_last=kind == "missing")
    if kind == "unknown_parameter":
        field = f"{field}.{context['key']}" if field else context["key"]
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        field = f"{field}.{context['discriminator'].strip(chr(39))}"
        if kind == "union_tag_not_found":
            return InvalidRequestError(field, f"{field}: is missing")
        message = f"must be one of {context['expected_tags']}, got {context['tag'][:64]!r}"
        return InvalidRequestError(field, f"{field}: {message}")
    if not field:
        return InvalidRequestError("body", "the body must be a JSON object, sent with content-type: application/json")
    return InvalidRequestError(field, f"{field}: {_told(kind, problem)}")


def _told(kind: str, problem: Any) -> str:
    """pydantic's message in our words, with the value where it is short enough to help."""
    if (told := _TOLD.get(kind)) is not None:
        return told
    value = problem.get("input")
    if kind in _TOO_SHORT and not value:
        return "must not be empty"
    message = "must be an object" if kind in _NO_OBJECT else problem["msg"]
    got = f", got {value!r:.64}" if isinstance(value, (str, int, float)) else ""
    return f"{message.replace('Input should be', 'must be')}{got}"


_TOLD = {"missing": "is missing"}
_TOO_SHORT = ("string_too_short", "too_short")
_NO_OBJECT = ("model_type", "model_attributes_type", "dict_type")


def _field(place: Sequence[str | int], body: Any, *, keep_last: bool) -> str:
    """pydantic's place without the names of union branches, which are no keys of ``body``."""
    path, here = "", body
    for index, step in enumerate(place):
        if isinstance(here, list) and isinstance(step, int) and step < len(here):
            path, here = f"{path}[{step}]", here[step]
        elif not isinstance(here, dict) or _is_tag(place, index, here):
            continue
        elif step in here or (keep_last and index == len(place) - 1):
            path, here = f"{path}.{step}" if path else str(step), here.get(step)
    return path


def _is_tag(place: Sequence[str | int], index: int, item: dict[str, Any]) -> bool:
    """Whether this step is what pydantic puts behind the index of a list of unions: the branch it took for the item."""
    if index < 2 or not isinstance(place[index - 1], int) or place[index - 2] in _LISTS_OF_ONE_KIND:
        return False
    return place[index] in (item.get("role"), item.get("type"))


# Here a step that is also the item's type is a key.
_LISTS_OF_ONE_KIND = ("tools", "tool_calls")


def _body(message: str, type_: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": _clean(message), "type": type_, "param": param and _clean(param), "code": code}}


def _clean(text: str) -> str:
    """Without lone surrogates, which JSON can carry in and UTF-8 cannot carry out."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _response(status: int, body: dict[str, Any], headers: Any = None) -> Response:
    retry = {"retry-after": _RETRY_AFTER_S[status]} if status in _RETRY_AFTER_S else {}
    return Response(orjson.dumps(body), status, {**retry, **(headers or {})}, "application/json")
