"""The demo talker: random, but it knows what part of its speech was silence, and stops when that part is large enough.

One attention head of the first layer looks at generated frames alone and averages the mark of tts_pad over them; the
codec EOS's logit rises with that average. So speech ends some time after its text, the later the longer the text was,
under greedy decoding and sampling alike.
"""

from __future__ import annotations

from typing import Any

import torch

from triton_omni.demo.thinker import flag_dimension

# Hidden dimensions that no layer but the counting head writes to: frame or not, tts_pad or not, part of silence.
FRAME, SILENCE, PART = range(3)
RESERVED = 3
FRAME_SIZE = 4.0
PART_GAIN = 3.0
EOS_PART, EOS_FRAME = 40.0, 58.0  # EOS overtakes the codes where about half the frames were silence
SPECIAL_SIZE = 1.5
TEXT_GAIN = 2.0  # a text row as large as a frame's sum of embeddings


def shape_talker(talker: Any) -> None:
    """Overwrite sizes and the end of speech in a ``Qwen3OmniMoeTalkerForConditionalGeneration`` of random weights."""
    config = talker.config
    with torch.no_grad():
        _embeddings(talker)
        talker.text_projection.linear_fc2.weight.mul_(TEXT_GAIN)
        for projection in (talker.text_projection, talker.hidden_projection):
            _mark_as_text(projection)
        talker.text_projection.linear_fc1.weight[0] = 0
        talker.text_projection.linear_fc1.bias[0] = 0
        talker.text_projection.linear_fc1.weight[0, flag_dimension()] = 1
        talker.text_projection.linear_fc2.weight[:, 0] = 0
        talker.text_projection.linear_fc2.weight[SILENCE, 0] = 1  # SiLU keeps 98 % of FLAG_SIZE
        for layer in talker.model.layers:
            layer.self_attn.o_proj.weight[:RESERVED] = 0
            layer.mlp.experts.down_proj[:, :RESERVED] = 0
            layer.mlp.shared_expert.down_proj.weight[:RESERVED] = 0
        for norm in (talker.model.norm, talker.model.layers[0].input_layernorm):
            norm.weight[:RESERVED] = 1
        _counting_head(talker.model.layers[0].self_attn)
        talker.codec_head.weight[:, :RESERVED] = 0
        eos = talker.codec_head.weight[config.codec_eos_token_id]
        eos.zero_()
        eos[PART] = EOS_PART
        eos[FRAME] = -EOS_FRAME


def _embeddings(talker: Any) -> None:
    """A frame's 16 embeddings sum to about the size of a text row; special ids stand alone and are as large."""
    groups, codes = talker.config.num_code_groups, talker.config.code_predictor_config.vocab_size
    table = talker.model.codec_embedding.weight
    table[:codes].mul_(groups**-0.5)
    table[codes:].mul_(SPECIAL_SIZE)
    table[:, :RESERVED] = 0
    table[:codes, FRAME] = FRAME_SIZE
    table[talker.config.codec_bos_id, FRAME] = FRAME_SIZE
    for embedding in talker.code_predictor.model.codec_embedding:
        embedding.weight.mul_(groups**-0.5)
        embedding.weight[:, :RESERVED] = 0


def _mark_as_text(projection: Any) -> None:
    """Half a frame's mark below zero: a row of text or media alone is no frame, added to a frame it leaves it one."""
    projection.linear_fc2.weight[:RESERVED] = 0
    projection.linear_fc2.bias[:RESERVED] = 0
    projection.linear_fc2.bias[FRAME] = -FRAME_SIZE / 2


def _counting_head(attention: Any) -> None:
    """Key/value head 0 and its queries. Positions with frames get score +12, others -12; nothing depends on distance,
    because the last rotary frequency turns by less than a degree in thousands of positions.
    """
    size = attention.head_dim
    slow = size // 2 - 1
    shared = attention.num_key_value_groups
    for weight in (attention.q_proj.weight[: shared * size], attention.k_proj.weight[:size]):
        weight.zero_()
        weight[slow::size, FRAME] = 1
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight[slow] = 1.5
    attention.v_proj.weight[:size] = 0
    attention.v_proj.weight[0, SILENCE] = 1
    attention.o_proj.weight[:, : shared * size] = 0
    attention.o_proj.weight[PART, 0] = PART_GAIN
