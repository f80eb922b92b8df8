"""Log probabilities of tokens in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from triton_omni.pipeline.stages import TokenLogprob

LEAST_LOGPROB = -9999.0  # OpenAI's word for "never": JSON has no minus infinity
_BYTE_OF = {char: byte for byte, char in bytes_to_unicode().items()}


class LogprobWriter:
    """For byte-level tokenizers. A token that holds a part of a character has it whole in ``bytes`` alone."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
        self._known: dict[int, tuple[str, list[int]]] = {}

    def entry(self, token_id: int, logprob: float, likeliest: Iterable[tuple[int, float]]) -> TokenLogprob:
        """``likeliest``: (id, log probability) of the most likely tokens, in order."""
        return self._one(token_id, logprob) | {"top_logprobs": [self._one(*each) for each in likeliest]}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        token, data = self._known.get(token_id) or self._look_up(token_id)
        return {"token": token, "bytes": data, "logprob": max(logprob, LEAST_LOGPROB)}

    def _look_up(self, token_id: int) -> tuple[str, list[int]]:
        if token_id in self._added:
            data = self._added[token_id].encode()
        else:  # ids past the tokenizer's last are padding of the vocabulary, and have no text
            data = bytes(_BYTE_OF[char] for char in self._tokenizer.convert_ids_to_tokens(token_id) or "")
        self._known[token_id] = data.decode(errors="replace"), list(data)
        return self._known[token_id]
