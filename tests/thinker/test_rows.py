"""What the talker gets of a media prompt, and when."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from tests.thinker.support import TIMEOUT_S, Media, ask, request, send
from triton_omni.errors import InvalidRequestError, NotFoundError, RequestTimeoutError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import ThinkerEngine
from triton_omni.thinker.transformers_engine import TransformersThinker

CONTENT = [{"type": "audio", "media": 0}, {"type": "image", "media": 1}, {"type": "text", "text": "both?"}]


def asked(media: Media, **changes: Any) -> Any:
    return request(CONTENT, media=(media.audio, media.image), max_tokens=3, ignore_eos=True, want_rows=True, **changes)


def test_rows_equal_a_direct_forward(
    transformers_engine: TransformersThinker, media: Media, model_config: ModelConfig
) -> None:
    engine = transformers_engine
    what = asked(media)
    sink = ask(engine, what)
    rows = engine.rows(what.request_id, TIMEOUT_S)
    prompt = engine._prompts.build(what)
    model = engine._model._model
    with torch.inference_mode():
        output = model(
            input_ids=torch.tensor([sink.prompt]),
            attention_mask=torch.ones(1, len(sink.prompt), dtype=torch.long),
            output_hidden_states=True,
            **prompt.features,
        )
        positions, _ = model.get_rope_index(
            torch.tensor([sink.prompt]),
            prompt.features["image_grid_thw"],
            None,
            torch.ones(1, len(sink.prompt)),
            False,
            prompt.features["feature_attention_mask"].sum(1),
        )
    thinker = model_config.thinker
    at = np.isin(sink.prompt, [thinker["audio_token_id"], thinker["image_token_id"]])
    expected = output.hidden_states[model_config.talker["accept_hidden_layer"]][0][torch.from_numpy(at)]
    assert rows.dtype == "float32"
    assert at.sum() > 10
    np.testing.assert_array_equal(rows.rows.view(np.float32).reshape(expected.shape), expected.numpy())
    assert rows.positions.dtype == np.int32
    np.testing.assert_array_equal(rows.positions, positions[:, 0].numpy())


@pytest.mark.parametrize("layer", ["first", "inner", "last"])
def test_any_layer_is_transformers_own(transformers_engine: TransformersThinker, media: Media, layer: str) -> None:
    engine = transformers_engine
    model = engine._model
    chosen = {"first": 0, "inner": 1, "last": len(model._text.layers)}[layer]
    placed = model.place(engine._prompts.build(asked(media)))
    kept, model._rows_layer = model._rows_layer, chosen
    try:
        with torch.inference_mode():
            _, _, rows = model.prefill(placed, want_rows=True)
            output = model._model.model(
                input_ids=torch.from_numpy(placed.encoded.token_ids).long()[None],
                position_ids=placed.positions[:, None],
                output_hidden_states=True,
                **placed.encoded.features,
            )
    finally:
        model._rows_layer = kept
    at = torch.isin(torch.from_numpy(placed.encoded.token_ids).long(), model._media_ids)
    expected = output.hidden_states[chosen][0, at].numpy()
    assert rows is not None
    np.testing.assert_array_equal(rows.rows.view(np.float32).reshape(expected.shape), expected)


def test_rows_are_there_before_the_answer_ends(engine: ThinkerEngine, media: Media) -> None:
    what = request(CONTENT, media=(media.audio, media.image), max_tokens=3000, ignore_eos=True, want_rows=True)
    sink = send(engine, what)
    assert engine.rows(what.request_id, TIMEOUT_S).rows.size
    assert not sink.ended
    with pytest.raises(NotFoundError, match="fetched"):
        engine.rows(what.request_id, 0)
    engine.abort(what.request_id)
    assert sink.done().finish_reason == "cancelled"


def test_rows_outlive_a_short_answer_until_fetched(engine: ThinkerEngine, media: Media) -> None:
    what = asked(media)
    ask(engine, what)
    assert engine.rows(what.request_id, TIMEOUT_S).rows.size
    with pytest.raises(NotFoundError):
        engine.rows(what.request_id, 0)


@pytest.mark.vllm
def test_rows_that_come_after_a_short_answer(vllm_engine: Any, media: Media, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cross from vLLM's process by a way of their own."""
    ended, sink = threading.Event(), vllm_engine._receiver._sink

    def late(*rows: Any) -> None:
        assert ended.wait(TIMEOUT_S)
        sink(*rows)

    monkeypatch.setattr(vllm_engine._receiver, "_sink", late)
    what = asked(media)
    ask(vllm_engine, what)
    ended.set()
    rows = vllm_engine.rows(what.request_id, TIMEOUT_S)
    assert rows.rows.size and rows.positions.shape[0] == 3


def test_unfetched_rows_do_not_pile_up(transformers_engine: TransformersThinker, media: Media) -> None:
    engine = transformers_engine
    requests = [asked(media) for _ in range(engine._config.max_num_seqs + 2)]
    for what in requests:
        ask(engine, what)
    assert len(engine._shelf._left) == engine._config.max_num_seqs
    with pytest.raises(NotFoundError):
        engine.rows(requests[0].request_id, 0)
    for what in requests[2:]:
        engine.rows(what.request_id, 0)
    assert not engine._shelf._left and not engine._shelf._open


def test_a_text_prompt_has_positions_alone(engine: ThinkerEngine) -> None:
    what = request("hello", want_rows=True, max_tokens=1)
    sink = ask(engine, what)
    rows = engine.rows(what.request_id, TIMEOUT_S)
    assert rows.rows.shape == (0,)
    np.testing.assert_array_equal(rows.positions, np.tile(np.arange(len(sink.prompt)), (3, 1)))


def test_rows_nobody_asked_for_or_knows(engine: ThinkerEngine) -> None:
    with pytest.raises(NotFoundError):
        engine.rows("nobody", 0)
    what = request("hello", max_tokens=3000, ignore_eos=True)
    sink = send(engine, what)
    with pytest.raises(InvalidRequestError) as raised:
        engine.rows(what.request_id, 0)
    assert raised.value.field == "want_rows"
    engine.abort(what.request_id)
    sink.done()


def test_waiting_for_rows_has_an_end(engine: Any, media: Media) -> None:
    blockers = [request("hello", max_tokens=3000, ignore_eos=True) for _ in range(engine._config.max_num_seqs)]
    sinks = [send(engine, what).until(lambda sink: bool(sink.ids)) for what in blockers]
    what = asked(media)
    last = send(engine, what)
    with pytest.raises(RequestTimeoutError):
        engine.rows(what.request_id, 0.05)
    for blocker in blockers:
        engine.abort(blocker.request_id)
    for sink in sinks:
        sink.done()
    assert engine.rows(what.request_id, TIMEOUT_S).rows.size
    last.done()


def test_rows_of_a_request_that_is_refused(engine: ThinkerEngine) -> None:
    what = request([{"type": "image", "media": 0}], media=(b"junk",), want_rows=True)
    send(engine, what)
    with pytest.raises(InvalidRequestError):  # the request's own error, or by then not found
        engine.rows(what.request_id, TIMEOUT_S)
