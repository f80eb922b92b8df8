"""Ways in which a talker could be wrong, done to the reference: a parity test that does not notice one is no test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

Mutation = Callable[[Any], contextlib.AbstractContextManager[Any]]


def _assistant(change: Callable[[Any, Any, Any, Any], tuple[Any, Any]]) -> Mutation:
    """``change(prefill rows [1, 9, D], trailing rows [1, T, D] with tts_eos last, tts_pad and tts_bos [1, 1, D])``."""

    def mutation(model: Any) -> contextlib.AbstractContextManager[Any]:
        original = model._get_talker_assistant_parts

        def parts(*args: Any) -> Any:
            rows, ids, trailing = original(*args)
            rows, trailing = change(rows.clone(), trailing, args[4], args[5])
            return rows, ids, trailing

        return mock.patch.object(model, "_get_talker_assistant_parts", parts)

    return mutation


def _first_token_replaced(model: Any) -> contextlib.AbstractContextManager[Any]:
    codec_bos = model.talker.get_input_embeddings()(torch.tensor([[model.config.talker_config.codec_bos_id]]))

    def change(rows: Any, trailing: Any, pad: Any, bos: Any) -> tuple[Any, Any]:
        rows[:, -1:] = bos + codec_bos
        return rows, trailing

    return _assistant(change)(model)


def _media_rows_zeroed(model: Any) -> contextlib.AbstractContextManager[Any]:
    project = model.talker.hidden_projection.forward
    return mock.patch.object(model.talker.hidden_projection, "forward", lambda rows: project(rows * 0))


def _other_layer(model: Any) -> contextlib.AbstractContextManager[Any]:
    talker = model.config.talker_config
    return mock.patch.object(talker, "accept_hidden_layer", talker.accept_hidden_layer - 1)


def _linear_positions(model: Any) -> contextlib.AbstractContextManager[Any]:
    def linear(ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length = ids.shape
        return torch.arange(length).expand(3, batch, -1), torch.zeros(batch, 1, dtype=torch.long)

    return mock.patch.object(model.talker, "get_rope_index", linear)


@contextlib.contextmanager
def _predictor_rope(model: Any) -> Iterator[None]:
    rotary = model.talker.code_predictor.model.rotary_emb
    saved = rotary.inv_freq.clone()
    half = saved.numel()
    rotary.inv_freq.copy_(1e4 ** -(torch.arange(half) / half))
    try:
        yield
    finally:
        rotary.inv_freq.copy_(saved)


MUTATIONS: dict[str, Mutation] = {
    "last text token dropped": _assistant(lambda r, t, pad, _: (r, torch.cat([t[:, :-2], t[:, -1:]], 1))),
    "no tts_eos": _assistant(lambda r, t, pad, _: (r, t[:, :-1])),
    "first token replaced": _first_token_replaced,
    "text one step late": _assistant(lambda r, t, pad, _: (r, torch.cat([pad, t], 1))),
    "media rows zeroed": _media_rows_zeroed,
    "rows of another layer": _other_layer,
    "linear positions": _linear_positions,
    "predictor rope 1e4": _predictor_rope,
}
