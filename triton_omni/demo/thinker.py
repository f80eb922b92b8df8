"""The demo thinker speaks the language of ``text``: which words may follow is certain, the network picks one."""

from __future__ import annotations

from typing import Any

import torch

from triton_omni.demo.text import FULL_STOPS, SMILE, grammar
from triton_omni.demo.tokenizer import token_ids
from triton_omni.demo.weights import normal

# Hidden dimensions [0, grammar().states) hold the state of the text, the next one marks tts_pad; no layer writes there.
# After the final norm a state is about 3: an allowed word gets logit 20 +- 1.4, any other token 0 +- 1.4 or less.
STATE_SIZE = 8.0
FLAG_SIZE = 4.0
ALLOWED_LOGIT = 6.5
RESTART_LOGIT = 0.6 * ALLOWED_LOGIT  # after the end, only where EOS is forbidden
END_BONUS = 0.1  # texts of one clause shall be common
WORD_SPREAD = 0.13
OTHER_SPREAD = 0.04
LAYER_GAIN = 0.6
ENDS = (*(stop.encode() for stop in FULL_STOPS), SMILE[0])


def flag_dimension() -> int:
    """The hidden dimension that is FLAG_SIZE for tts_pad and 0 for every other token."""
    return grammar().states


def shape_thinker(thinker: Any, seed: int) -> None:
    """Overwrite what carries the language in a ``Qwen3OmniMoeThinkerForConditionalGeneration`` of random weights."""
    language, ids = grammar(), token_ids()
    reserved = flag_dimension() + 1
    embedding, head = thinker.model.language_model.embed_tokens.weight, thinker.lm_head.weight
    eos = ids[b"<|im_end|>"]
    with torch.no_grad():
        embedding[:, :reserved] = 0
        embedding[:, language.start] = STATE_SIZE  # whatever is no word of the language lets a text begin
        embedding[ids[b"<tts_pad>"], flag_dimension()] = FLAG_SIZE
        head.copy_(normal(seed, "lm_head", *head.shape, std=OTHER_SPREAD))
        head[:, :reserved] = 0
        for token, state in language.leads_to.items():
            row = ids[token]
            embedding[row, language.start] = 0
            embedding[row, state] = STATE_SIZE
            head[row] *= WORD_SPREAD / OTHER_SPREAD
            head[row, list(language.follows[token])] = ALLOWED_LOGIT + (END_BONUS if token in ENDS else 0)
            if language.start in language.follows[token]:
                head[row, language.end] = RESTART_LOGIT
        head[eos, language.end] = ALLOWED_LOGIT
        thinker.model.language_model.norm.weight[:reserved] = 1
        for layer in thinker.model.language_model.layers:
            layer.self_attn.o_proj.weight.mul_(LAYER_GAIN)
            layer.mlp.experts.down_proj.mul_(LAYER_GAIN)
            layer.self_attn.o_proj.weight[:reserved] = 0
            layer.mlp.experts.down_proj[:, :reserved] = 0
