"""Sampling parameters of the thinker and the talker: one place for defaults and ranges."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from triton_omni.errors import InvalidRequestError
from triton_omni.response_format import check_response_format

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024  # as many as vLLM's sampler on GPUs has room for; one more ends its engine
MAX_STOP_TOKEN_IDS = 64  # there is room for 128, with the checkpoint's own
MAX_STOP_STRINGS = 64


def _between(field: str, value: float | None, low: float, high: float, *, open_low: bool = False) -> None:
    if value is None:
        return
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequestError(field, f"must lie in {bracket}{low:g}, {high:g}], got {value:g}")


def _at_least(field: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise InvalidRequestError(field, f"must be at least {low}, got {value}")


def _at_most(field: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise InvalidRequestError(field, f"must hold at most {most} {what}, got {count}")


@dataclasses.dataclass(frozen=True, slots=True)
class ThinkerSampling:
    """How the thinker picks text tokens, with OpenAI's and vLLM's meanings. ``temperature`` 0 is greedy; ``top_k`` 0
    means no limit; ``min_p`` is relative to the likeliest token's probability.

    ``presence_penalty`` and ``frequency_penalty`` look at the answer's tokens, ``repetition_penalty`` at the prompt's
    too. ``logit_bias``: what is added to the logit of each token id. ``logprobs``: None, or how many likeliest
    alternatives are told beside each token's log probability. ``response_format``: see ``response_format.py``.
    ``max_tokens`` None: what the context leaves, capped by the checkpoint's ``thinker_max_new_tokens``.
    ``stop`` strings end the text before they appear in it; ``stop_token_ids`` end it like EOS.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    response_format: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _between("temperature", self.temperature, 0, 2)
        _between("top_p", self.top_p, 0, 1, open_low=True)
        _at_least("top_k", self.top_k, 0)
        _between("min_p", self.min_p, 0, 1)
        _between("repetition_penalty", self.repetition_penalty, 0, 2, open_low=True)
        _between("frequency_penalty", self.frequency_penalty, -2, 2)
        _between("presence_penalty", self.presence_penalty, -2, 2)
        self._check_logit_bias()
        _at_least("max_tokens", self.max_tokens, 1)
        _at_least("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                "min_tokens", f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        _at_most("stop", len(self.stop), MAX_STOP_STRINGS, "strings")
        _at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS, "token ids")
        if any(not s for s in self.stop):
            raise InvalidRequestError("stop", "must hold non-empty strings")
        _between("seed", self.seed, 0, MAX_SEED)
        _between("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        check_response_format(self.response_format)

    def _check_logit_bias(self) -> None:
        _at_most("logit_bias", len(self.logit_bias), MAX_LOGIT_BIASES, "token ids")
        for token_id, bias in self.logit_bias.items():
            _between(f"logit_bias.{token_id}", bias, -100, 100)

    @classmethod
    def defaults(cls, generation_config: Mapping[str, Any]) -> ThinkerSampling:
        """The checkpoint's temperature, top_p, top_k and repetition_penalty where it samples, else greedy."""
        g = generation_config
        limit = g.get("thinker_max_new_tokens", g.get("max_new_tokens", 1024))
        if not g.get("do_sample", False):
            return cls(repetition_penalty=g.get("repetition_penalty", 1.0), max_tokens=limit)
        return cls(
            temperature=g.get("temperature", 1.0),
            top_p=g.get("top_p", 1.0),
            top_k=g.get("top_k", 0),
            repetition_penalty=g.get("repetition_penalty", 1.0),
            max_tokens=limit,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class TalkerSampling:
    """How the talker picks layer-0 codes. ``temperature`` 0 makes the talker and its code predictor greedy;
    otherwise the predictor samples with its own fixed top-k 50, top-p 0.8, temperature 1 (transformers' generate).

    ``max_frames`` and ``min_frames`` count codec frames (80 ms each); EOS is suppressed before ``min_frames``.
    """

    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    max_frames: int = 4096
    min_frames: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        _between("temperature", self.temperature, 0, 2)
        _at_least("top_k", self.top_k, 0)
        _between("top_p", self.top_p, 0, 1, open_low=True)
        _between("repetition_penalty", self.repetition_penalty, 0, 2, open_low=True)
        _at_least("max_frames", self.max_frames, 1)
        _at_least("min_frames", self.min_frames, 0)
        if self.min_frames > self.max_frames:
            raise InvalidRequestError(
                "min_frames", f"must be at most max_frames ({self.max_frames}), got {self.min_frames}"
            )
        _between("seed", self.seed, 0, MAX_SEED)

    @classmethod
    def defaults(cls, generation_config: Mapping[str, Any]) -> TalkerSampling:
        """The checkpoint's ``talker_*`` values where it has them."""
        g, own = generation_config, cls()
        return cls(
            temperature=g.get("talker_temperature", own.temperature) if g.get("talker_do_sample", True) else 0.0,
            top_k=g.get("talker_top_k", own.top_k),
            top_p=g.get("talker_top_p", own.top_p),
            repetition_penalty=g.get("talker_repetition_penalty", own.repetition_penalty),
            max_frames=g.get("talker_max_new_tokens", own.max_frames),
        )
