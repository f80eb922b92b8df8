#!/usr/bin/env python3
"""Whether the talker's bfloat16 kernels drift: teacher-forced logits over long speech against float32 PyTorch.

    scripts/talker_numerics.py                    # true shape, random weights, one GPU: about a minute
    scripts/talker_numerics.py --checkpoint DIR   # a checkpoint's weights

Random codes are forced on three talkers with the same bfloat16 weights: float32 PyTorch (the reference), bfloat16
PyTorch, and, on a GPU, the fused kernels step by step. By range of positions: mean cosine of the logits with the
reference's, and how often the best code is the same. Prints a table and writes docs/performance/talker_numerics.json.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triton_omni.checkpoint import Checkpoint
from triton_omni.model_config import ModelConfig
from triton_omni.sampling import TalkerSampling
from triton_omni.talker.factory import THINKER_EMBEDDINGS
from triton_omni.talker.model import Talker
from triton_omni.talker.random_weights import random_talker
from triton_omni.talker.shape import TalkerShape
from triton_omni.talker.slots import Slots

ROOT = Path(__file__).resolve().parent.parent
SHAPE = ROOT / "scripts" / "shapes" / "qwen3_omni_30b_a3b.json"
RANGES = 4

Logits = list[Tensor]  # of each code group, [frames, vocabulary]


class CausalCache:
    """Keys and values of one whole sequence."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.visible = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()[None, None]

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return keys.transpose(1, 2), values.transpose(1, 2), self.visible


def plain_logits(talker: Talker, codes: Tensor, text_ids: Tensor) -> Logits:
    """``codes`` [frames, groups] forced in one pass of PyTorch."""
    before = torch.full_like(codes, -1)
    before[0, 0] = talker.shape.codec.bos
    before[1:] = codes[:-1]
    x = talker.embed_codes(before) + talker.text_table[text_ids]
    positions = torch.arange(len(codes), device=codes.device)
    hidden = talker.model(x[None], positions[None], CausalCache(len(codes), codes.device))[0]
    logits = [talker.codec_head(hidden).float()]

    def pick(scores: Tensor, group: int) -> Tensor:
        logits.append(scores.float())
        return codes[:, group]

    talker.code_predictor(hidden, talker.model.codec_embedding(codes[:, 0]), pick)
    return logits


def fused_logits(talker: Talker, codes: Tensor, text_ids: Tensor) -> Logits:
    """``codes`` forced step by step through the fused kernels, in a CUDA graph of one row."""
    from triton_omni.talker.fused import TILES, FusedStep

    class ForcedStep(FusedStep):
        """Keeps each group's logits, then makes the forced code the best one."""

        def _force(self, group: int, logits: Tensor) -> None:
            kept[group].copy_(logits)
            logits.zero_().scatter_(1, forced[:, group : group + 1], 1.0)

        def _pick_first(self, logits: Tensor, *rest: Any) -> None:
            self._force(0, logits)
            super()._pick_first(logits, *rest)

        def _pick_residual(self, group: int, logits: Tensor, *rest: Any) -> None:
            self._force(group, logits)
            super()._pick_residual(group, logits, *rest)

    shape, device = talker.shape, codes.device
    vocabularies = [shape.backbone.vocab] + [shape.predictor.vocab] * (shape.groups - 1)
    kept = [torch.zeros(1, size, device=device) for size in vocabularies]
    out = [torch.zeros(len(codes), size, device=device) for size in vocabularies]
    forced = torch.zeros(1, shape.groups, dtype=torch.long, device=device)
    slots = Slots(shape, 1, len(codes) + 1, device, talker.codec_head.weight.dtype)
    step = ForcedStep(talker, slots, 1, overlap=torch.cuda.get_device_capability(device) >= (9, 0))
    step.step(1, TILES)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.step(1, TILES)
    slots.open(0, TalkerSampling(temperature=0.0, repetition_penalty=1.0), seed=0)
    inputs = step.inputs(1)
    inputs.zero_()
    for i in range(len(codes)):
        forced.copy_(codes[i : i + 1])
        inputs[1].copy_(text_ids[i : i + 1])
        graph.replay()
        for whole, one in zip(out, kept, strict=True):
            whole[i] = one[0]
    assert torch.equal(slots.codes[0], codes[-1]), "the forced codes were not taken"
    return out


def compared(got: Logits, expected: Logits, first: int, last: int) -> dict[str, float]:
    """Layer 0 and the residual groups apart, then all groups together."""
    cosines, agreements = [], []
    for mine, reference in zip(got, expected, strict=True):
        a, b = mine[first:last], reference[first:last]
        cosines.append(torch.cosine_similarity(a.double(), b.double(), dim=-1).mean())
        agreements.append((a.argmax(-1) == b.argmax(-1)).double().mean())
    cosine, agreement = torch.stack(cosines), torch.stack(agreements)
    found = {
        "cosine_layer0": cosine[0],
        "cosine": cosine.mean(),
        "agreement_layer0": agreement[0],
        "agreement": agreement.mean(),
    }
    return {name: round(float(value), 6) for name, value in found.items()}


def load(options: argparse.Namespace, device: torch.device) -> Talker:
    if options.checkpoint is None:
        model = ModelConfig(SHAPE, json.loads(SHAPE.read_text(encoding="utf-8")), {})
        return random_talker(TalkerShape.read(model), device, torch.bfloat16)
    model = ModelConfig.load(options.checkpoint)
    with torch.device("meta"):
        talker = Talker(TalkerShape.read(model))
    checkpoint = Checkpoint(model)
    checkpoint.load(talker, "talker.", dtype=torch.bfloat16, device=device)
    talker.to(device).eval().requires_grad_(False)
    talker.prepare(checkpoint.tensor(THINKER_EMBEDDINGS))
    return talker


@torch.inference_mode()
def main() -> None:
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    talker = load(options, device)
    shape, generator = talker.shape, torch.Generator(device).manual_seed(1)
    size = (options.frames, shape.groups)
    codes = torch.randint(0, shape.predictor.vocab, size, generator=generator, device=device)
    text_ids = torch.randint(0, 250, size[:1], generator=generator, device=device)
    text_ids[options.frames // 4 :] = shape.text.tts_pad

    reference = copy.deepcopy(talker).float()
    expected = plain_logits(reference, codes, text_ids)
    del reference
    found = {"bfloat16 PyTorch": plain_logits(talker, codes, text_ids)}
    if device.type == "cuda":
        found["fused kernels"] = fused_logits(talker, codes, text_ids)
    print("positions      what              cosine: layer 0      all  agreement: layer 0     all")
    rows = []
    borders = [options.frames * i // RANGES for i in range(RANGES + 1)]
    for first, last in [*itertools.pairwise(borders), (0, options.frames)]:
        for name, logits in found.items():
            row = compared(logits, expected, first, last)
            rows.append({"what": name, "from": first, "to": last, **row})
            shown = (first, last, name, *row.values())
            print("{:5}..{:<6} {:18} {:13.6f} {:11.6f} {:14.4f} {:10.4f}".format(*shown), flush=True)
    said = {
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "none",
        "command": shlex.join(["scripts/talker_numerics.py", *sys.argv[1:]]),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**said, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {options.out}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="use its weights instead of random ones of the true shape")
    parser.add_argument("--frames", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "performance" / "talker_numerics.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
