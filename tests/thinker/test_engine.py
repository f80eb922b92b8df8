"""The engine under its users' hands: limits, seeds, neighbours, aborts, failures, shutdown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from tests.thinker.support import TIMEOUT_S, Answered, Media, ask, request, send
from triton_omni.errors import CapacityError, InvalidRequestError, NotFoundError, StageError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import ThinkerEngine
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.transformers_engine import TransformersThinker
from triton_omni.thinker.transformers_model import TransformersModel

LONG = {"max_tokens": 4000, "ignore_eos": True}


@pytest.fixture
def narrow(model_config: ModelConfig) -> Iterator[TransformersThinker]:
    """An engine of its own that runs two at once."""
    config = ThinkerConfig(dtype="float32", device="cpu", max_num_seqs=2, max_open_requests=4, preprocess_workers=1)
    engine = TransformersThinker(model_config, config)
    yield engine
    engine.close()


def speaking(sink: Answered) -> bool:
    return bool(sink.ids)


def test_a_request_from_first_to_last_event(engine: ThinkerEngine, tokenizer: Any) -> None:
    sink = ask(engine, request("hello", max_tokens=12, ignore_eos=True))
    assert sink.events[0].prompt_token_ids is not None and sink.events[0].prompt_token_ids.dtype == "int32"
    assert all(event.prompt_token_ids is None for event in sink.events[1:])
    assert all(event.token_ids.dtype == "int32" for event in sink.events)
    assert [event.finish_reason for event in sink.events[:-1]] == [None] * (len(sink.events) - 1)
    assert (len(sink.ids), sink.finish_reason) == (12, "length")
    assert sink.text == tokenizer.decode(sink.ids, skip_special_tokens=True)
    assert 2 <= len(sink.events) <= 13  # the prompt, then the tokens as they come


def test_eos_ends_the_answer_and_is_left_out(engine: ThinkerEngine) -> None:
    hot: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 10}
    free = ask(engine, request("hello", ignore_eos=True, **hot)).ids
    stop = next(i for i in range(1, 10) if free[i] not in free[:i])
    sink = ask(engine, request("hello", ignore_eos=True, stop_token_ids=(free[stop],), **hot))
    assert (sink.ids, sink.finish_reason) == (free[:stop], "stop")
    with mock.patch.object(engine, "_eos_ids", frozenset({free[stop]})):
        sink = ask(engine, request("hello", **hot))
    assert (sink.ids, sink.finish_reason) == (free[:stop], "stop")


def test_min_tokens_suppress_the_end(engine: ThinkerEngine) -> None:
    first = ask(engine, request("hello", max_tokens=1, ignore_eos=True)).ids[0]
    assert ask(engine, request("hello", max_tokens=8, stop_token_ids=(first,))).ids == []
    sink = ask(engine, request("hello", max_tokens=8, min_tokens=5, stop_token_ids=(first,)))
    assert 5 <= len(sink.ids) <= 8
    assert first not in sink.ids


def test_max_tokens_ends_with_the_context(model_config: ModelConfig) -> None:
    engine = TransformersThinker(model_config, ThinkerConfig(device="cpu", max_model_len=40))
    sink = ask(engine, request("hello", ignore_eos=True, max_tokens=1000))
    assert (len(sink.prompt) + len(sink.ids), sink.finish_reason) == (40, "length")
    engine.close()


def test_stop_strings(engine: ThinkerEngine) -> None:
    free = ask(engine, request("count", temperature=1.0, seed=3, max_tokens=30, ignore_eos=True))
    at = next(i for i in range(8, len(free.text) - 3) if free.text.find(free.text[i : i + 3]) == i)
    stop = free.text[at : at + 3]
    sink = ask(engine, request("count", temperature=1.0, seed=3, max_tokens=30, ignore_eos=True, stop=(stop, "\0no")))
    assert (sink.text, sink.finish_reason) == (free.text[:at], "stop")
    assert sink.ids == free.ids[: len(sink.ids)]


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_stop_ids_must_exist(engine: ThinkerEngine, token_id: int) -> None:
    sink = ask(engine, request("hello", stop_token_ids=(token_id,)))
    assert isinstance(sink.error, InvalidRequestError) and sink.error.field == "stop_token_ids"


@pytest.mark.parametrize("backwards", [False, True])
def test_neighbours_change_nothing(engine: ThinkerEngine, media: Media, backwards: bool) -> None:
    hot = {"temperature": 1.0, "top_p": 0.95, "top_k": 60, "repetition_penalty": 1.1}
    image, audio = {"type": "image", "media": 0}, {"type": "audio", "media": 0}
    kinds: list[tuple[Any, dict[str, Any]]] = [
        ("hello", {}),
        ("a longer question about the weather of tomorrow", {"seed": 1} | hot),
        ("hello", {"seed": 2} | hot),
        ([image, {"type": "text", "text": "what is this?"}], {"media": (media.image,)}),
        ([audio], {"media": (media.audio,), "seed": 3} | hot),
        ("x" * 300, {}),
        ("hello", {"seed": 4, "stop": ("e", "zz")} | hot),
        ([{"type": "video", "media": 0}], {"media": (media.video,), "use_audio_in_video": True}),
    ]
    common = {"max_tokens": 16, "ignore_eos": True}
    alone = [ask(engine, request(content, **options, **common)) for content, options in kinds]
    order = list(range(8))[:: -1 if backwards else 1]
    together = {i: send(engine, request(kinds[i][0], **kinds[i][1], **common)) for i in order}
    for i, sink in together.items():
        sink.done()
        assert sink.prompt == alone[i].prompt
        assert (sink.ids, sink.text, sink.finish_reason) == (alone[i].ids, alone[i].text, alone[i].finish_reason)
    assert len({tuple(sink.ids) for sink in alone}) > 5  # they are not all the same answer


def test_requests_take_turns(narrow: TransformersThinker) -> None:
    # One by one: prompts that are made at the same time take their places in any order.
    first, second, third, fourth = (
        send(narrow, request("hello", **LONG)).until(lambda sink: bool(sink.events)) for _ in range(4)
    )
    first.until(speaking)
    second.until(speaking)
    assert narrow.stats() == {"running": 2, "waiting": 2}
    assert isinstance(ask(narrow, request("one more")).error, CapacityError)
    narrow.abort(first_id(narrow, first))
    assert first.done().finish_reason == "cancelled"
    third.until(speaking)
    assert fourth.ids == []


def first_id(engine: TransformersThinker, sink: Answered) -> str:
    return next(id_ for id_, sequence in engine._open.items() if sequence.sink is sink)


@pytest.mark.parametrize("stage", ["preparing", "queued", "prefill", "decoding"])
def test_abort_at_any_stage(narrow: TransformersThinker, stage: str) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def held(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            reached.set()
            assert go_on.wait(TIMEOUT_S)
            return function(*args, **kwargs)

        return call

    where = {"preparing": (narrow._prompts, "build"), "prefill": (narrow._model, "prefill")}
    running = [send(narrow, request("hello", **LONG)) for _ in range(2)] if stage == "queued" else []
    for sink in running:
        sink.until(speaking)
    with mock.patch.object(*where[stage], held(getattr(*where[stage]))) if stage in where else mock.MagicMock():
        asked = request("hello", want_rows=True, **LONG)
        sink = send(narrow, asked)
        if stage in where:
            assert reached.wait(TIMEOUT_S)
        elif stage == "queued":
            sink.until(lambda sink: bool(sink.events))
        else:
            sink.until(speaking)
        narrow.abort(asked.request_id)
        if stage == "preparing":
            assert sink.done().finish_reason == "cancelled"  # without waiting for the worker
        go_on.set()
        assert sink.done().finish_reason == "cancelled"
    with pytest.raises(NotFoundError):
        narrow.rows(asked.request_id, 0)
    for id_ in list(narrow._open):
        narrow.abort(id_)
    for other in running:
        other.done()
    after = ask(narrow, request("hello", max_tokens=2, ignore_eos=True))
    assert len(after.ids) == 2
    assert not sink.late
    assert narrow.stats() == {"running": 0, "waiting": 0}
    assert not narrow._shelf._left and not narrow._shelf._open
    assert not narrow._running and not narrow._waiting and not narrow._prepared


def test_abort_of_strangers_is_nothing(engine: ThinkerEngine) -> None:
    done = request("hello", max_tokens=1)
    ask(engine, done)
    engine.abort(done.request_id)
    engine.abort("nobody")


def test_an_open_id_is_not_taken_twice(narrow: TransformersThinker) -> None:
    asked = request("hello", **LONG)
    first = send(narrow, asked)
    again = ask(narrow, asked)
    assert isinstance(again.error, InvalidRequestError) and again.error.field == "request_id"
    first.until(speaking)
    narrow.abort(asked.request_id)
    first.done()


@pytest.mark.parametrize("method", ["prefill", "decode"])
def test_a_failing_step_ends_its_request_alone(narrow: TransformersThinker, method: str) -> None:
    healthy = send(narrow, request("hello", **LONG)).until(speaking)
    original, victims = getattr(TransformersModel, method), []

    def fails_once(self: Any, what: Any, *args: Any, **kwargs: Any) -> Any:
        if not victims and (method == "prefill" or args[0] is not kv):
            victims.append(what)
            raise RuntimeError("out of luck")
        return original(self, what, *args, **kwargs)

    kv = next(iter(narrow._open.values())).generation.kv  # type: ignore[union-attr]
    with mock.patch.object(TransformersModel, method, fails_once):
        ill = ask(narrow, request("hello", **LONG))
    assert isinstance(ill.error, StageError)
    assert "out of luck" in ill.error.message
    so_far = len(healthy.ids)
    healthy.until(lambda sink: len(sink.ids) > so_far + 20)
    narrow.abort(first_id(narrow, healthy))
    assert healthy.done().finish_reason == "cancelled"
    assert ask(narrow, request("hello", max_tokens=1)).error is None


def test_a_failing_sink_frees_its_request(narrow: TransformersThinker) -> None:
    told = threading.Event()

    def broken(event: Any) -> None:
        if getattr(event, "finish_reason", None) == "cancelled":
            told.set()
        raise ValueError("gone")

    narrow.submit(request("hello", **LONG), broken)
    assert told.wait(TIMEOUT_S)
    assert ask(narrow, request("hello", max_tokens=1)).error is None
    assert narrow.stats() == {"running": 0, "waiting": 0}


def test_an_engine_that_dies_tells_everybody(narrow: TransformersThinker) -> None:
    open_ = [send(narrow, request("hello", **LONG)) for _ in range(3)]
    open_[0].until(speaking)
    with mock.patch.object(narrow, "_step", side_effect=RuntimeError("broken")):
        for sink in open_:
            assert isinstance(sink.done().error, StageError)
    assert isinstance(ask(narrow, request("hello")).error, StageError)


def test_close_ends_open_requests(model_config: ModelConfig) -> None:
    engine = TransformersThinker(model_config, ThinkerConfig(device="cpu", max_num_seqs=1))
    first = send(engine, request("hello", **LONG))
    first.until(speaking)  # before the others come: prompts are made in any order, and only one request runs
    sinks = [first, *(send(engine, request("hello", **LONG)) for _ in range(3))]
    engine.close()
    for sink in sinks:
        assert isinstance(sink.done().error, StageError)
    assert isinstance(ask(engine, request("hello")).error, StageError)
    assert engine.stats() == {"running": 0, "waiting": 0}
    engine.close()


def test_preprocessing_does_not_hold_up_others(narrow: TransformersThinker) -> None:
    running = send(narrow, request("hello", **LONG)).until(speaking)
    busy, go_on = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        busy.set()
        assert go_on.wait(TIMEOUT_S)
        raise InvalidRequestError("messages", "enough")

    with mock.patch.object(narrow._prompts, "build", slow):
        slow_one = send(narrow, request("hello"))
        assert busy.wait(TIMEOUT_S)
        so_far = len(running.ids)
        running.until(lambda sink: len(sink.ids) > so_far + 20)
        assert not slow_one.events
        go_on.set()
        slow_one.done()
    narrow.abort(first_id(narrow, running))
    running.done()
