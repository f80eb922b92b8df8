"""The thinker's requests and responses as tensors, both ways.

op        request                                       responses
generate  REQUEST {op, request_id, messages, sampling,  PROMPT_TOKEN_IDS once, then TOKEN_IDS, TEXT and at the end
          tools, tool_choice, parallel_tool_calls,      FINISH_REASON; LOGPROBS where they are asked for;
          use_audio_in_video, want_rows}, MEDIA         CALL_TOKEN_IDS and TOOL_CALLS where there are calls
rows      REQUEST {op, request_id}                      PROMPT_POSITIONS, ROWS, ROWS_DTYPE
cancel    REQUEST {op, request_id}                      (none)
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np

from triton_omni.errors import InvalidRequestError
from triton_omni.options import from_mapping
from triton_omni.pipeline.messages import check_messages
from triton_omni.pipeline.stages import FinishReason, Int32, PromptRows, ThinkerEvent, ThinkerRequest
from triton_omni.sampling import ThinkerSampling
from triton_omni.tools import TOOL_KEYS, check_tools, joined
from triton_omni.triton.tensors import (
    Arrays,
    array_tensor,
    constant_string,
    read_files,
    read_ids,
    read_json,
    read_object,
    read_string,
    string_tensor,
)

Op = Literal["generate", "rows", "cancel"]
GENERATE_OUTPUTS = (
    "PROMPT_TOKEN_IDS",
    "TOKEN_IDS",
    "TEXT",
    "FINISH_REASON",
    "LOGPROBS",
    "CALL_TOKEN_IDS",
    "TOOL_CALLS",
)
ROWS_OUTPUTS = ("PROMPT_POSITIONS", "ROWS", "ROWS_DTYPE")
_SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(ThinkerSampling))
_OPS = ("generate", "rows", "cancel")
_KEYS = ("op", "request_id", "messages", "sampling", *TOOL_KEYS, "use_audio_in_video", "want_rows")


@dataclasses.dataclass(frozen=True, slots=True)
class ThinkerCall:
    """A request as it arrives; ``generate`` is there when ``op`` says so."""

    op: Op
    request_id: str
    generate: ThinkerRequest | None = None


def generate_tensors(request: ThinkerRequest) -> list[Any]:
    """The request ``generate``."""
    content = {
        "op": "generate",
        "request_id": request.request_id,
        "messages": list(request.messages),
        "sampling": {name: getattr(request.sampling, name) for name in _SAMPLING_FIELDS},
        "use_audio_in_video": request.use_audio_in_video,
        "want_rows": request.want_rows,
    }
    if request.tools is not None:
        content |= request.tools.to_wire()
    tensors = [string_tensor("REQUEST", json.dumps(content, ensure_ascii=False))]
    return [*tensors, string_tensor("MEDIA", *request.media)] if request.media else tensors


def op_tensors(op: Op, request_id: str) -> list[Any]:
    """The requests ``rows`` and ``cancel``."""
    return [string_tensor("REQUEST", json.dumps({"op": op, "request_id": request_id}))]


def read_call(inputs: Arrays, defaults: ThinkerSampling) -> ThinkerCall:
    """``sampling`` starts from ``defaults``; a request without ``request_id`` gets one. Raises InvalidRequestError."""
    content = read_json(inputs, "REQUEST", _KEYS)
    op, request_id = content.get("op", "generate"), content.get("request_id", "")
    if op not in _OPS:
        raise InvalidRequestError("op", f"must be one of {', '.join(_OPS)}, got {op!r}")
    if not isinstance(request_id, str) or (op != "generate" and not request_id):
        raise InvalidRequestError("request_id", f"must name a request, got {request_id!r}")
    if op != "generate":
        return ThinkerCall(op, request_id)
    media = read_files(inputs, "MEDIA")
    request = ThinkerRequest(
        request_id=request_id or str(uuid.uuid4()),
        messages=check_messages(content.get("messages", []), media),
        media=media,
        sampling=from_mapping(ThinkerSampling, read_object(content, "sampling"), where="sampling.", base=defaults),
        tools=check_tools(content),
        use_audio_in_video=_flag(content, "use_audio_in_video"),
        want_rows=_flag(content, "want_rows"),
    )
    return ThinkerCall(op, request.request_id, request)


def event_tensors(events: Sequence[ThinkerEvent]) -> list[list[Any]]:
    """Events that are ready together leave in one response; the prompt's ids in one of their own."""
    responses = [
        [array_tensor("PROMPT_TOKEN_IDS", e.prompt_token_ids)] for e in events if e.prompt_token_ids is not None
    ]
    answers = [e for e in events if e.prompt_token_ids is None or e.token_ids.size or e.text or e.finish_reason]
    if answers:
        responses.append(_answer_tensors(answers))
    return responses


def _answer_tensors(answers: Sequence[ThinkerEvent]) -> list[Any]:
    tensors = [
        array_tensor("TOKEN_IDS", _ids([e.token_ids for e in answers])),
        string_tensor("TEXT", "".join(e.text for e in answers)),
        constant_string("FINISH_REASON", answers[-1].finish_reason or ""),
    ]
    if logprobs := [entry for e in answers for entry in e.logprobs]:
        tensors.append(string_tensor("LOGPROBS", json.dumps(logprobs, separators=(",", ":"))))
    if any(e.call_token_ids.size for e in answers):
        tensors.append(array_tensor("CALL_TOKEN_IDS", _ids([e.call_token_ids for e in answers])))
    if calls := joined(delta for e in answers for delta in e.tool_calls):
        tensors.append(string_tensor("TOOL_CALLS", json.dumps(calls, ensure_ascii=False, separators=(",", ":"))))
    return tensors


def _ids(parts: Sequence[Int32]) -> Int32:
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return whole.astype(np.int32, copy=False)


def read_event(outputs: Arrays) -> ThinkerEvent:
    """One response of ``generate``."""
    prompt = read_ids(outputs, "PROMPT_TOKEN_IDS") if "PROMPT_TOKEN_IDS" in outputs else None
    reason = cast(FinishReason, read_string(outputs, "FINISH_REASON"))
    return ThinkerEvent(
        prompt_token_ids=prompt,
        token_ids=read_ids(outputs, "TOKEN_IDS"),
        text=read_string(outputs, "TEXT"),
        finish_reason=reason or None,
        logprobs=tuple(json.loads(read_string(outputs, "LOGPROBS", "[]"))),
        call_token_ids=read_ids(outputs, "CALL_TOKEN_IDS"),
        tool_calls=tuple(json.loads(read_string(outputs, "TOOL_CALLS", "[]"))),
    )


def rows_tensors(rows: PromptRows) -> list[Any]:
    """The response of ``rows``."""
    return [
        array_tensor("PROMPT_POSITIONS", rows.positions),
        array_tensor("ROWS", rows.rows),
        string_tensor("ROWS_DTYPE", rows.dtype),
    ]


def read_rows(values: Arrays) -> PromptRows:
    """From the response of ``rows`` and from the talker's START, which carries the same three tensors."""
    return PromptRows(values["PROMPT_POSITIONS"], values["ROWS"].ravel(), read_string(values, "ROWS_DTYPE"))


def _flag(content: dict[str, Any], key: str) -> bool:
    value = content.get(key, False)
    if not isinstance(value, bool):
        raise InvalidRequestError(key, f"must be true or false, got {value!r}")
    return value
