"""Each Triton-language kernel equals the same thing written in PyTorch: on a GPU in its own dtypes, else in Triton's
interpreter, which must be chosen before triton is imported and so gets a process of its own.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.talker.kernel_values import (
    DEVICE,
    EPS,
    INTERPRETED,
    ON_GPU,
    close,
    fresh_stream,
    gains,
    is_stream_of,
    normal,
    rms_norm,
    stream,
    unwritten,
)
from triton_omni.model_config import ModelConfig
from triton_omni.sampling import TalkerSampling
from triton_omni.talker.prefill import Prefill
from triton_omni.talker.random_weights import random_talker
from triton_omni.talker.runner import Piece, Prompt, TalkerRunner
from triton_omni.talker.shape import TalkerShape
from triton_omni.talker.slots import Slots

pytest.importorskip("triton")
needs_kernels = pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="runs in the interpreter's process, or on a GPU")
DTYPES = [torch.float32, *([torch.bfloat16] if ON_GPU else [])]

if INTERPRETED or ON_GPU:
    from triton_omni.talker import sampler
    from triton_omni.talker.fused import PRECISE_TILES, FusedStep
    from triton_omni.talker.kernels import attention, linear, moe, rows, sampling
    from triton_omni.talker.kernels.linear import Tile

    TILE = Tile(16, 16, 32, 4, 2)


@pytest.mark.timeout(900)  # half a minute of an idle core
@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="this is the process that starts the interpreter's")
def test_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in run.stdout


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 5, 33])
def test_products(dtype: torch.dtype, count: int) -> None:
    k, n = 96, 80
    x, w, gain = normal(count, k, dtype=dtype), normal(n, k, dtype=dtype), gains(k, dtype)
    out = unwritten(count, n, dtype=dtype)
    linear.linear(x, w, out, TILE)
    close(out, x.float() @ w.float().T)

    residual = stream(normal(count, k), gain)
    normed = rms_norm(residual.hidden, gain)
    out = unwritten(count, n, dtype=dtype)
    linear.norm_linear(residual, EPS, w, out, TILE)
    close(out, normed @ w.float().T)

    both, out = normal(2 * n, k, dtype=dtype), unwritten(count, n, dtype=dtype)
    linear.norm_swiglu(residual, EPS, both, out, TILE)
    gate, up = both.float()[:n], both.float()[n:]
    close(out, F.silu(normed @ gate.T) * (normed @ up.T))

    before, next_gain = normal(count, n), gains(n, dtype)
    after = fresh_stream(count, n, n // TILE.block_n, dtype)
    linear.residual_linear(x, w, before, next_gain, after, TILE)
    is_stream_of(after, before + x.float() @ w.float().T, next_gain, dtype)


HEADS, KV_HEADS, HEAD_DIM, SLOTS, CONTEXT = 4, 2, 32, 7, 150


def rotary_table(positions: int) -> torch.Tensor:
    exponents = torch.arange(0, HEAD_DIM, 2, device=DEVICE).float() / HEAD_DIM
    angles = torch.arange(positions, device=DEVICE)[:, None] * (1e6**-exponents)[None]
    return torch.cat([angles.cos(), angles.sin()], 1).contiguous()


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [heads, D] turned by ``angles`` [D]: cosines, then sines."""
    (cos, sin), (a, b) = angles.chunk(2), x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attended(
    qkv: torch.Tensor, q_gain: torch.Tensor, k_gain: torch.Tensor, angles: torch.Tensor, past: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output [heads * D], new key, new value [kv_heads, D]) of one row behind ``past`` [2, kv_heads, L, D]."""
    q, k, v = qkv.float().view(-1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS])
    q, k = turned(rms_norm(q, q_gain), angles), turned(rms_norm(k, k_gain), angles)
    keys = torch.cat([past[0].float(), k[:, None]], 1)
    values = torch.cat([past[1].float(), v[:, None]], 1)
    scores = q.view(KV_HEADS, -1, HEAD_DIM) @ keys.transpose(1, 2) * HEAD_DIM**-0.5
    return (scores.softmax(-1) @ values).reshape(-1), k, v


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_slot", [True, False])
def test_decode_attention_reads_its_slot_and_nothing_beyond(dtype: torch.dtype, by_slot: bool) -> None:
    slots, lengths = torch.tensor([6, 2, 0, 1, 4]), torch.tensor([5, 0, 140, 33, 128])
    positions = torch.tensor([3, 0, 70, 10, 64])
    cache = normal(SLOTS, 2, KV_HEADS, CONTEXT, HEAD_DIM, dtype=dtype)
    for slot, length in zip(slots, lengths, strict=True):
        cache[slot, :, :, length:] = float("nan")
    qkv = normal(5, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
    q_gain, k_gain, rotary = gains(HEAD_DIM, dtype), gains(HEAD_DIM, dtype), rotary_table(CONTEXT)
    before, out = cache.clone(), unwritten(5, HEADS * HEAD_DIM, dtype=dtype)
    given = (positions, lengths)
    if by_slot:
        given = tuple(torch.full((SLOTS,), -1).index_put_((slots,), each) for each in given)
    at, counts = (each.to(DEVICE) for each in given)
    attention.decode_attention(
        qkv, q_gain, k_gain, EPS, rotary, at, counts, slots.to(DEVICE), cache, out, by_slot=by_slot
    )
    for i, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        expected, key, value = attended(qkv[i], q_gain, k_gain, rotary[positions[i]], before[slot, :, :, :length])
        close(out[i], expected)
        close(cache[slot, 0, :, length], key)
        close(cache[slot, 1, :, length], value)
        before[slot, :, :, length] = cache[slot, :, :, length]
    assert torch.equal(cache.nan_to_num(9.0), before.nan_to_num(9.0))  # and nothing else was written


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_prompt_attend_to_each_other(dtype: torch.dtype) -> None:
    """Two slots' rows in one prefill, the second one's behind rows that are there."""
    slots = torch.tensor([3, 3, 3, 5, 5], device=DEVICE)
    index = torch.tensor([0, 1, 2, 17, 18], device=DEVICE)
    cache = normal(SLOTS, 2, KV_HEADS, CONTEXT, HEAD_DIM, dtype=dtype)
    qkv = normal(5, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
    q_gain, k_gain = gains(HEAD_DIM, dtype), gains(HEAD_DIM, dtype)
    rotary = rotary_table(CONTEXT)[[4, 9, 9, 30, 2]].contiguous()
    before, out = cache.clone(), unwritten(5, HEADS * HEAD_DIM, dtype=dtype)
    attention.write_keys(qkv, k_gain, EPS, rotary, index, slots, cache)
    each = torch.arange(5, device=DEVICE)
    attention.decode_attention(
        qkv, q_gain, k_gain, EPS, rotary, each, index, slots, cache, out, by_slot=False, write=False
    )
    for i, (slot, at) in enumerate(zip(slots.tolist(), index.tolist(), strict=True)):
        expected, key, value = attended(qkv[i], q_gain, k_gain, rotary[i], before[slot, :, :, :at])
        before[slot, 0, :, at], before[slot, 1, :, at] = key.to(dtype), value.to(dtype)
        close(out[i], expected)
    close(cache, before)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_within_a_frame(dtype: torch.dtype) -> None:
    cache = torch.zeros(3, 2, KV_HEADS, 16, HEAD_DIM, device=DEVICE, dtype=dtype)
    q_gain, k_gain, rotary = gains(HEAD_DIM, dtype), gains(HEAD_DIM, dtype), rotary_table(16)
    for token in range(3):
        qkv = normal(3, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
        out = unwritten(3, HEADS * HEAD_DIM, dtype=dtype)
        attention.frame_attention(qkv, q_gain, k_gain, EPS, rotary, token, cache, out)
        for i in range(3):
            close(out[i], attended(qkv[i], q_gain, k_gain, rotary[token], cache[i, :, :, :token])[0])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "normalise"), [(1, True), (5, True), (21, False)])
def test_mixture_of_experts(dtype: torch.dtype, count: int, normalise: bool) -> None:
    """1 row: a program per assignment; more: per expert; 21: more rows of an expert than one tile holds."""
    hidden, width, experts, top_k, shared = 96, 48, 8, 2, 2
    chosen = top_k + shared
    gain, next_gain = gains(hidden, dtype), gains(hidden, dtype)
    x = stream(normal(count, hidden), gain)
    router = normal(experts + 1, hidden, dtype=dtype)
    gate_up = (normal(experts + shared, 2 * width, hidden) * 0.1).to(dtype)
    down = (normal(experts + shared, hidden, width) * 0.1).to(dtype)
    ids = torch.full((count, chosen), -7, device=DEVICE, dtype=torch.int32)
    scales, weights = unwritten(count), unwritten(count, chosen)
    logits = unwritten(count, experts + 1)
    moe.route(x, EPS, router, shared, top_k, normalise, logits, scales, ids, weights, TILE)
    normed = rms_norm(x.hidden, gain)
    close(x.scaled * scales[:, None], normed.to(dtype))
    best, where = logits[:, :experts].softmax(-1).topk(top_k)
    assert torch.equal(ids[:, :top_k].long(), where)
    assert ids[:, top_k:].tolist() == [[experts, experts + 1]] * count
    close(logits.to(dtype), normed @ router.float().T)
    close(weights[:, :top_k], best / best.sum(-1, keepdim=True) if normalise else best)
    close(weights[:, top_k], logits[:, experts].sigmoid())

    act, parts = unwritten(count * chosen, width, dtype=dtype), unwritten(count * chosen, hidden, dtype=dtype)
    groups = moe.Groups(
        torch.full((count * chosen,), -7, device=DEVICE, dtype=torch.int32),
        torch.full((experts + shared,), -7, device=DEVICE, dtype=torch.int32),
    )
    moe.group(ids, groups)
    assert torch.equal(groups.order.long(), ids.flatten().sort(stable=True).indices)
    moe.expert_products(x.scaled, scales, ids, groups, gate_up, act, gated=True, tile=TILE)
    moe.expert_products(act, None, ids, groups, down, parts, gated=False, tile=TILE)
    after = fresh_stream(count, hidden, 3, dtype)
    moe.combine(parts, weights, x.hidden, next_gain, after)
    expected = x.hidden.clone()
    for i in range(count):
        for expert, weight in zip(ids[i].tolist(), weights[i], strict=True):
            gate, up = (gate_up[expert].float() @ normed[i]).chunk(2)
            expected[i] += weight * (down[expert].float() @ (F.silu(gate) * up))
    is_stream_of(after, expected, next_gain, dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_of_codes_text_and_other_rows(dtype: torch.dtype) -> None:
    hidden, groups, size = 48, 5, 11
    codec, text, other = (normal(n, hidden, dtype=dtype) for n in (groups * size, 9, 4))
    offsets = torch.arange(groups, device=DEVICE) * size
    codes = torch.randint(0, size, (6, groups), device=DEVICE)
    codes[2] = torch.tensor([7, -1, -1, -1, -1])
    codes[4] = -1
    slots, text_ids = torch.tensor([2, 5, 4, 0], device=DEVICE), torch.tensor([3, 0, 8, -1], device=DEVICE)
    gain, out = gains(hidden, dtype), fresh_stream(4, hidden, 1, dtype)
    rows.embed_step(slots, text_ids, codes, offsets, codec, text, gain, out, other_rows=other)
    here = codes[slots]
    sums = (codec[(here.clamp(min=0) + offsets)].float() * (here >= 0)[..., None]).sum(1)
    heard = torch.where((text_ids >= 0)[:, None], text[text_ids.clamp(min=0)], other).float()
    is_stream_of(out, sums + heard, gain, torch.float32)
    plain = fresh_stream(3, hidden, 1, dtype)
    rows.embed_step(slots[:3], text_ids[:3], codes, offsets, codec, text, gain, plain)
    assert torch.equal(plain.hidden, out.hidden[:3])


@needs_kernels
def test_norm_of_rows_and_the_end_of_a_step() -> None:
    hidden, groups = 48, 5
    gain, next_gain = gains(hidden), gains(hidden)
    x, normed, out = stream(normal(3, hidden), gain), unwritten(3, hidden), fresh_stream(3, hidden, 1, torch.float32)
    rows.norm_rows(x, gain, EPS, normed, next_gain, out)
    close(normed, rms_norm(x.hidden, gain))
    is_stream_of(out, normed, next_gain, torch.float32)

    slots, spare = torch.tensor([3, 4, 0], device=DEVICE), 4
    codes, frames = torch.full((5, groups), -1, device=DEVICE), torch.arange(3 * groups, device=DEVICE).view(3, groups)
    counters = torch.tensor([[7] * 5, [8] * 5, [9] * 5], device=DEVICE)
    rows.finish_step(slots, frames, codes, *counters, spare)
    assert torch.equal(codes[slots], frames) and (codes[[1, 2]] == -1).all()
    assert counters.tolist() == [[8, 7, 7, 8, 7], [9, 8, 8, 9, 8], [10, 9, 9, 10, 9]]


def states(vocab: int) -> sampler.RowSampling:
    """Six slots: greedy, sampled with every mixture of filters, some at a frame before their ``min_frames``."""
    return sampler.RowSampling(
        temperature=torch.tensor([0.0, 0.9, 1.2, 0.7, 0.9, 0.9], device=DEVICE),
        top_k=torch.tensor([50, 50, 0, 5, 1, 300], device=DEVICE),
        top_p=torch.tensor([1.0, 1.0, 0.7, 0.9, 1.0, 0.3], device=DEVICE),
        repetition_penalty=torch.tensor([1.05, 1.3, 1.0, 1.05, 2.0, 1.0], device=DEVICE),
        min_frames=torch.tensor([0, 5, 0, 0, 0, 0], device=DEVICE),
        seed=torch.tensor([1, 2, 3, 2**62, 5, 7], device=DEVICE),
        frame=torch.tensor([0, 3, 9, 100, 4000, 1], device=DEVICE),
        seen=torch.rand(6, vocab, device=DEVICE) < 0.3,
    )


@needs_kernels
@pytest.mark.parametrize("trial", range(2))
def test_sampling_draws_the_reference_codes(trial: int) -> None:
    torch.manual_seed(trial)
    vocab, hidden, groups, eos = 1600, 64, 16, 900
    state, slots = states(vocab), torch.tensor([3, 1, 0, 2, 5, 4], device=DEVICE)
    logits = normal(6, vocab) * 3
    logits[:, eos] += 8
    here = dataclasses.replace(
        state, **{f.name: getattr(state, f.name)[slots].clone() for f in dataclasses.fields(state)[:-1]}
    )
    expected = sampler.sample_layer0(logits, here, eos)
    codes = torch.full((6, groups), -1, device=DEVICE)
    table, gain, out = normal(vocab, hidden), gains(hidden), fresh_stream(6, hidden, 1, torch.float32)
    sampling.sample_layer0(logits, slots, state, eos, codes, table, gain, out)
    assert torch.equal(codes[:, 0], expected)
    assert torch.equal(out.hidden, table[expected])
    is_stream_of(out, table[expected], gain, torch.float32)
    assert (
        state.seen[slots, expected].all() and state.seen.sum() == (here.seen.scatter(1, expected[:, None], True)).sum()
    )

    residual, table = normal(6, 512) * 2, normal(512, hidden)
    for group in (1, 7, 15):
        expected = sampler.sample_residual(residual, here, group)
        sampling.sample_residual(residual, slots, state, group, codes, table, gain, out)
        assert torch.equal(codes[:, group], expected)
        assert torch.equal(out.hidden, table[expected])


@pytest.fixture(scope="module")
def small(model_config: ModelConfig) -> TalkerShape:
    """The demo's talker with two layers and three code groups: a step of it is a few dozen launches."""
    shape = TalkerShape.read(model_config)
    return dataclasses.replace(
        shape,
        groups=3,
        backbone=dataclasses.replace(shape.backbone, layers=2),
        predictor=dataclasses.replace(shape.predictor, layers=2, vocab=200),
    )


@needs_kernels
def test_fused_prefill_and_steps_equal_plain_pytorch(small: TalkerShape) -> None:
    """Two sessions in pieces, one with media rows, then steps: the first from codec BOS, greedy and sampled."""
    device = torch.device(DEVICE)
    talker = random_talker(small, device, torch.float32)
    slots = Slots(small, 3, 64, device, torch.float32)
    plain, fused = TalkerRunner(talker, slots), FusedStep(talker, slots, 8, overlap=False)
    tiles = dataclasses.replace(PRECISE_TILES, head=Tile(16, 64, 32, 4, 2))
    prefills = [random_prefill(small, 9, media=2), random_prefill(small, 4, media=0)]
    takes = [(2, prefills[0], TalkerSampling(temperature=0.0)), (0, prefills[1], TalkerSampling(seed=5))]

    prompts = [plain.open(slot, prefill, sampling, seed=5) for slot, prefill, sampling in takes]
    plain.prefill([Piece(prompt, 0, prompt.prefill.rows) for prompt in prompts])
    expected = [plain.decode([2, 0], [7 + i, 9], limit=10 + i).read() for i in range(2)]
    kv, length = slots.kv.clone(), slots.length.clone()

    slots.kv.fill_(float("nan"))
    slots.length[slots.spare] = 0
    for slot, prefill, sampling in takes:
        slots.open(slot, sampling, 5, length=prefill.rows, position=prefill.next_position)
    for pieces in ([(0, 0, 5)], [(0, 5, 9), (1, 0, 4)]):
        fill_prompt_inputs(fused, [(prompts[i], first, last) for i, first, last in pieces])
        fused.prefill(8, tiles)
    got = []
    for i in range(2):
        fused.inputs(3)[:] = torch.tensor([[2, 0, slots.spare], [7 + i, 9, 0]])
        fused.step(3, tiles)
        got.append(fused.frames[:2].int().cpu().numpy())
    np.testing.assert_array_equal(got, expected)
    assert torch.equal(slots.length[[2, 0]], length[[2, 0]]) and slots.length[slots.spare] == 0
    for slot in (2, 0):
        count = int(length[slot])
        torch.testing.assert_close(slots.kv[:, slot, :, :, :count], kv[:, slot, :, :, :count], rtol=1e-4, atol=1e-4)


def random_prefill(shape: TalkerShape, count: int, media: int) -> Prefill:
    random = np.random.default_rng(count)
    text_ids, codec_ids = random.integers(0, 200, count), np.full(count, -1)
    media_at = np.sort(random.choice(count - 2, media, replace=False))
    text_ids[media_at], codec_ids[-2:] = -1, random.integers(0, 100, 2)
    positions = np.sort(random.integers(0, 2 * count, (3, count)), axis=1)
    return Prefill(text_ids, codec_ids, positions, media_at, torch.randn(media, shape.thinker_hidden), [])


def fill_prompt_inputs(fused: FusedStep, pieces: list[tuple[Prompt, int, int]]) -> None:
    given = fused.prompt_inputs(8)
    given.zero_()
    given[0], given[2] = fused.state.spare, -1
    at = 0
    for prompt, first, last in pieces:
        plan, span = prompt.prefill, slice(at, at + last - first)
        given[0, span], given[3, span] = prompt.slot, torch.arange(first, last)
        for row, values in ((1, plan.text_ids), (2, plan.codec_ids), (slice(4, 7), plan.positions)):
            given[row, span] = torch.from_numpy(values[..., first:last]).to(given.device)
        fused.media[span] = prompt.rows[first:last]  # where they are not media rows, nobody reads them
        at = span.stop
