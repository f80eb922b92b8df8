"""Each dataclass that crosses Triton comes out as it went in."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.triton.fake_pb_utils import Tensor
from triton_omni.errors import InvalidRequestError
from triton_omni.pipeline.events import OmniEvent
from triton_omni.pipeline.stages import CodesChunk, CodesEvent, PromptRows, TalkerStart, ThinkerEvent, ThinkerRequest
from triton_omni.sampling import TalkerSampling, ThinkerSampling
from triton_omni.tools import ToolUse
from triton_omni.triton import code2wav_wire, omni_wire, talker_wire, thinker_wire
from triton_omni.triton.tensors import arrays, read_string

ROWS = PromptRows(np.arange(12, dtype=np.int32).reshape(3, 4), np.arange(64, dtype=np.uint8), "bfloat16")
DEFAULTS = talker_wire.TalkerDefaults("ethan", TalkerSampling(temperature=0.3))


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def same(left: object, right: object) -> bool:
    """Equality of dataclasses with arrays in them."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if dataclasses.is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left)
        )
    return left == right


def test_thinker_request() -> None:
    request = ThinkerRequest(
        request_id="one",
        messages=({"role": "user", "content": [{"type": "image", "media": 0}, {"type": "text", "text": "“é😀"}]},),
        media=(b"\0\xff",),
        sampling=ThinkerSampling(
            temperature=0.5,
            min_p=0.1,
            frequency_penalty=-1.0,
            logit_bias={9: 1.5},
            stop=("x", "y"),
            stop_token_ids=(7,),
            seed=3,
            logprobs=2,
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}},
        ),
        use_audio_in_video=True,
        want_rows=True,
    )
    call = thinker_wire.read_call(arrays(thinker_wire.generate_tensors(request)), ThinkerSampling())
    assert call.op == "generate" and same(call.generate, request)


def test_a_thinker_request_starts_from_the_checkpoints_sampling() -> None:
    inputs = arrays([Tensor("REQUEST", np.array([b'{"messages": [{"role": "user", "content": "x"}]}'], object))])
    call = thinker_wire.read_call(inputs, ThinkerSampling(top_k=5))
    assert call.generate is not None and call.generate.sampling.top_k == 5
    assert len(call.request_id) == 36


def test_thinker_events_that_are_ready_together_leave_in_one_response() -> None:
    events = [
        ThinkerEvent(prompt_token_ids=ids(1, 2, 3)),
        ThinkerEvent(token_ids=ids(4), text="a", logprobs=({"token": "a"},)),
        ThinkerEvent(token_ids=ids(5, 6), text="b", logprobs=({"token": "“"}, {"token": "b"})),
        ThinkerEvent(finish_reason="length"),
    ]
    responses = [thinker_wire.read_event(arrays(t)) for t in thinker_wire.event_tensors(events)]
    logprobs = ({"token": "a"}, {"token": "“"}, {"token": "b"})
    together = ThinkerEvent(token_ids=ids(4, 5, 6), text="ab", finish_reason="length", logprobs=logprobs)
    assert len(responses) == 2 and same(responses[0], events[0]) and same(responses[1], together)
    assert thinker_wire.event_tensors([]) == []


def test_tools_and_calls() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "é"}}
    said = {"role": "assistant", "content": "", "tool_calls": [call("a", "f", '{"x": 1}')]}
    result = {"role": "tool", "content": "“1”", "tool_call_id": "a"}
    for use in (
        ToolUse((tool,)),
        ToolUse((tool,), parallel=False),
        ToolUse((tool,), "required"),
        ToolUse((tool,), "named", "f"),
    ):
        request = ThinkerRequest("one", ({"role": "user", "content": "x"}, said, result), tools=use)
        assert same(
            thinker_wire.read_call(arrays(thinker_wire.generate_tensors(request)), ThinkerSampling()).generate, request
        )


def test_calls_that_are_ready_together_leave_in_one_response() -> None:
    more = {"index": 0, "function": {"arguments": '"é"}'}}
    events = [
        ThinkerEvent(token_ids=ids(1), text="a"),
        ThinkerEvent(call_token_ids=ids(5, 6), tool_calls=({"index": 0, **call("c", "f", '{"x": ')},)),
        ThinkerEvent(call_token_ids=ids(7), tool_calls=(more,), finish_reason="stop"),
    ]
    (tensors,) = thinker_wire.event_tensors(events)
    assert same(
        thinker_wire.read_event(arrays(tensors)),
        ThinkerEvent(
            token_ids=ids(1),
            text="a",
            finish_reason="stop",
            call_token_ids=ids(5, 6, 7),
            tool_calls=({"index": 0, **call("c", "f", '{"x": "é"}')},),
        ),
    )


def call(call_id: str, name: str, arguments: str) -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_rows() -> None:
    assert same(thinker_wire.read_rows(arrays(thinker_wire.rows_tensors(ROWS))), ROWS)
    assert thinker_wire.read_call(arrays(thinker_wire.op_tensors("rows", "one")), ThinkerSampling()).op == "rows"


@pytest.mark.parametrize("rows", [None, ROWS])
@pytest.mark.parametrize("token_ids", [ids(), ids(8, 9)])
def test_talker_start(rows: PromptRows | None, token_ids: np.ndarray) -> None:
    start = TalkerStart(
        prompt_token_ids=ids(1, 2),
        speaker="chelsie",
        sampling=TalkerSampling(temperature=0, max_frames=9, seed=1),
        chunk_frames=(4, 8),
        chunk_policy="adaptive",
        prompt_rows=rows,
        token_ids=token_ids,
        text_finished=bool(token_ids.size),
    )
    assert same(talker_wire.read_start(arrays(talker_wire.start_tensors(start)), DEFAULTS, end=False), start)


def test_a_plain_start_needs_nothing_but_the_prompt() -> None:
    start = talker_wire.read_start(arrays([Tensor("PROMPT_TOKEN_IDS", ids(1))]), DEFAULTS, end=True)
    assert (start.speaker, start.sampling, start.chunk_frames) == ("ethan", DEFAULTS.sampling, (4, 8, 16, 25))
    assert start.text_finished, "the end of the sequence is the end of the text"


def test_talker_appends() -> None:
    append = talker_wire.read_append(arrays(talker_wire.append_tensors(ids(3), True)), end=False)
    assert same(append, talker_wire.TalkerAppend(ids(3), text_finished=True, cancel=False))
    assert talker_wire.read_append(arrays(talker_wire.cancel_tensors()), end=True).cancel
    assert talker_wire.read_append({}, end=True).text_finished


@pytest.mark.parametrize("frames", [0, 3])
def test_codes(frames: int) -> None:
    events = [CodesEvent(np.ones((frames, 16), np.int32)), CodesEvent(np.ones((frames, 16), np.int32), "stop")]
    read = [talker_wire.read_codes(arrays(tensors)) for tensors in talker_wire.codes_tensors(events)]
    assert all(map(same, read, events)) and len(read) == 2


@pytest.mark.parametrize("frames", [0, 3])
def test_chunks_and_audio(frames: int) -> None:
    chunk = CodesChunk("one", np.ones((frames, 16), np.int32), start=True, end=True)
    inputs = arrays(code2wav_wire.chunk_tensors(chunk))
    assert same(code2wav_wire.read_chunk(inputs, "one", start=True, end=True), chunk)
    audio = np.arange(frames * 10, dtype=np.int16)
    assert same(code2wav_wire.read_audio(arrays(code2wav_wire.audio_tensors(audio))), audio)
    with pytest.raises(InvalidRequestError, match=r"must be \[1, frames, code_groups\]"):
        code2wav_wire.read_chunk({"CODES": np.zeros((2, 1, 16), np.int32)}, "one", start=True, end=True)


def test_plain_deltas_of_omni_bls_join_and_start_and_end_stand_alone() -> None:
    events = [
        OmniEvent(info={"type": "start"}),
        OmniEvent(text="a"),
        OmniEvent(audio=np.arange(3, dtype=np.int16)),
        OmniEvent(text="b"),
        OmniEvent(info={"type": "end"}),
    ]
    responses = [arrays(tensors) for tensors in omni_wire.event_tensors(events)]
    assert [read_string(r, "EVENT") for r in responses] == ['{"type":"start"}', "{}", '{"type":"end"}']
    assert [read_string(r, "TEXT") for r in responses] == ["", "ab", ""]
    assert [r["AUDIO"].size for r in responses] == [0, 3, 0]
    assert all(r["AUDIO"].dtype == np.int16 for r in responses)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "must be JSON"),
        (b"[]", "must be a JSON object"),
        (b"\xff", "must be UTF-8"),
        (b"{}", "at least one message"),
    ],
)
def test_requests_that_are_no_json(text: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        thinker_wire.read_call({"REQUEST": np.array([text], object)}, ThinkerSampling())
