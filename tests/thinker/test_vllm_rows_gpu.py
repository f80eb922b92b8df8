"""On a GPU, under CUDA graphs: the rows that leave vLLM are what a hook sees of transformers' own layer.

The weights are random, in shapes that take the kernels of the published model (heads of 128, experts in one launch).
All experts are taken for every token, so that rounding chooses none.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.thinker.support import Answered, png, request, send, wav
from triton_omni.demo import checkpoint as demo
from triton_omni.demo.config import config as demo_config
from triton_omni.demo.tokenizer import write_processor
from triton_omni.demo.weights import fill
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import PromptRows, ThinkerRequest
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.factory import load_thinker
from triton_omni.thinker.prompt import EncodedPrompt, PromptBuilder

log = logging.getLogger(__name__)
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DEVICE = "cuda"
HIDDEN = 1024
SEQS = 16
SHAPES = {
    "text_config": {
        "hidden_size": HIDDEN,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "moe_intermediate_size": 256,
        "num_experts_per_tok": 8,
        "rope_scaling": {"mrope_section": [24, 20, 20]},
    },
    "audio_config": {
        "d_model": 256,
        "encoder_ffn_dim": 512,
        "downsample_hidden_size": 128,
        "output_dim": HIDDEN,
    },
    "vision_config": {"hidden_size": 256, "intermediate_size": 512, "out_hidden_size": HIDDEN},
}
SIZES = [1, 2, 4, 8, SEQS]
WHOLE_PROMPTS = [*SIZES, 256, 512]
# A token for each of 15 answers leaves one of a prompt to a step: a batch as of decoding, so a full graph.
SMALL_STEPS = {"max_num_batched_tokens": SEQS}
ENGINES: dict[str, dict[str, Any]] = {
    "whole": {"compilation_config": {"cudagraph_capture_sizes": WHOLE_PROMPTS}, "prefills_in": "PIECEWISE"},
    "small_compiled": SMALL_STEPS | {"prefills_in": "PIECEWISE"},
    "small_eager": SMALL_STEPS
    | {
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES},
        "prefills_in": "FULL",
    },
    "two_gpus": {
        "tensor_parallel_size": 2,
        "compilation_config": {"cudagraph_capture_sizes": WHOLE_PROMPTS},
        "prefills_in": "PIECEWISE",
    },
}
AUDIO, IMAGE = {"type": "audio", "media": 0}, {"type": "image", "media": 1}
CASES = {
    "audio": [{"role": "user", "content": [AUDIO]}],
    "image": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "what is this?"}]}],
    "both in two turns": [
        {"role": "user", "content": [IMAGE, AUDIO]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [AUDIO, {"type": "text", "text": "and now?"}]},
    ],
}
Rows = npt.NDArray[np.float32]
Errors = npt.NDArray[np.float64]
BOUND = np.array([2.0, 3.0])  # times what transformers itself is off by in bfloat16


@dataclasses.dataclass(frozen=True)
class Shaped:
    """A checkpoint of SHAPES and transformers' thinker with its weights, bfloat16 on CPU."""

    config: ModelConfig
    thinker: Any


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Shaped:
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    config = demo._merged(demo_config(), {"thinker_config": SHAPES, "talker_config": {"thinker_hidden_size": HIDDEN}})
    out = tmp_path_factory.mktemp("shaped")
    model = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**config)).eval()
    fill(model.thinker, seed=0)
    model.to(torch.bfloat16).save_pretrained(out)
    written = demo._merged(demo._published_form(model.config.to_dict()), config)
    (out / "config.json").write_text(json.dumps(written))
    write_processor(out)
    return Shaped(ModelConfig.load(out), model.thinker)


@pytest.fixture(scope="module")
def files() -> tuple[bytes, bytes]:
    rng = np.random.default_rng(3)
    return wav(rng.normal(0, 0.1, 80_000)), png(rng.integers(0, 255, (192, 256, 3), dtype=np.uint8))


def asked(case: str, files: tuple[bytes, bytes], **changes: Any) -> ThinkerRequest:
    options = {"max_tokens": 4, "ignore_eos": True, "want_rows": True} | changes
    return request(None, messages=CASES[case], media=files, **options)


def errors(got: Rows, exact: Rows) -> Errors:
    """Of all rows together and of the worst one, in parts of their length."""
    off, length = np.linalg.norm(got - exact, axis=-1), np.linalg.norm(exact, axis=-1)
    return np.array([np.linalg.norm(off) / np.linalg.norm(length), (off / length).max()])


def floats(rows: PromptRows) -> Rows:
    taken = torch.frombuffer(bytearray(rows.rows), dtype=getattr(torch, rows.dtype))
    return taken.view(-1, HIDDEN).float().numpy()


@dataclasses.dataclass(frozen=True)
class Running:
    """A thinker on vLLM, and what its engine was given."""

    engine: Any
    options: dict[str, Any]

    def answers(self, whats: list[ThinkerRequest]) -> list[tuple[Answered, PromptRows]]:
        with ThreadPoolExecutor(len(whats)) as threads:
            sinks = [send(self.engine, what) for what in whats]
            rows = list(threads.map(lambda what: self.engine.rows(what.request_id, 300), whats))
            return [(sink.done(), one) for sink, one in zip(sinks, rows, strict=True)]

    def forget_prompts(self) -> None:
        assert self._call(self.engine._llm.reset_prefix_cache())

    def graphs(self) -> dict[str, int]:
        """How many graphs of each kind have run since the last call, in the first worker."""
        counts, *_ = self._call(self.engine._llm.collective_rpc(count_graphs))
        return dict(counts)

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.engine._loop).result(60)


class Hooked:
    """transformers' thinker in ``dtype``: positions, and rows of a prompt's media at them."""

    def __init__(self, shaped: Shaped, dtype: torch.dtype) -> None:
        self.thinker = copy.deepcopy(shaped.thinker).to(DEVICE, dtype)
        layers = [each for each in self.thinker.modules() if type(each).__name__.endswith("ThinkerTextDecoderLayer")]
        layers[shaped.config.talker["accept_hidden_layer"] - 1].register_forward_hook(self._keep)
        thinker = shaped.config.thinker
        self.media_ids = [thinker["audio_token_id"], thinker["image_token_id"]]

    def positions(self, prompt: EncodedPrompt) -> torch.Tensor:
        """int64 [3, P]"""
        ids, features = torch.from_numpy(prompt.token_ids).long()[None], prompt.features
        sounds = features["feature_attention_mask"].sum(-1) if "feature_attention_mask" in features else None
        given = (features.get("image_grid_thw"), None, torch.ones_like(ids), False, sounds)
        return self.thinker.get_rope_index(ids, *given)[0][:, 0].long()

    @torch.inference_mode()
    def rows(self, prompt: EncodedPrompt, positions: torch.Tensor) -> Rows:
        ids = torch.from_numpy(prompt.token_ids).long()
        features = {
            name: value.to(DEVICE, self.thinker.dtype if value.is_floating_point() else value.dtype)
            for name, value in prompt.features.items()
        }
        self.thinker(input_ids=ids[None].to(DEVICE), position_ids=positions[:, None].to(DEVICE), **features)
        return self.kept[np.isin(prompt.token_ids, self.media_ids)]

    def _keep(self, _module: Any, _args: Any, output: Any) -> None:
        self.kept = (output[0] if isinstance(output, tuple) else output).reshape(-1, HIDDEN).float().cpu().numpy()


class Expected:
    """``exact``: rows in float32; ``bounds``: how far off those of bfloat16 may be."""

    def __init__(self, shaped: Shaped, files: tuple[bytes, bytes]) -> None:
        self.exact: dict[str, Rows] = {}
        self.positions: dict[str, npt.NDArray[np.int32]] = {}
        rounded, misplaced = [], []
        prompts = PromptBuilder(shaped.config, ThinkerConfig())
        wide, narrow = Hooked(shaped, torch.float32), Hooked(shaped, torch.bfloat16)
        for case in CASES:
            prompt = prompts.build(asked(case, files))
            positions = wide.positions(prompt)
            self.positions[case] = positions.numpy().astype(np.int32)
            self.exact[case] = exact = wide.rows(prompt, positions)
            rounded.append(errors(narrow.rows(prompt, positions), exact))
            misplaced.append(errors(wide.rows(prompt, positions + (positions > 8)), exact))
        self.bounds = BOUND * np.max(rounded, axis=0)
        log.info("bounds %s; one position off %s", self.bounds, np.min(misplaced, axis=0))
        assert (self.bounds < np.min(misplaced, axis=0)).all()

    def check(self, case: str, rows: PromptRows) -> None:
        assert rows.dtype == "bfloat16"
        np.testing.assert_array_equal(rows.positions, self.positions[case])
        off = errors(floats(rows), self.exact[case])
        log.info("%s: off by %s", case, off)
        assert (off < self.bounds).all(), (case, off, self.bounds)


@pytest.fixture(scope="module")
def expected(shaped: Shaped, files: tuple[bytes, bytes]) -> Expected:
    return Expected(shaped, files)


@pytest.fixture(scope="module", params=[*ENGINES])
def running(
    request: pytest.FixtureRequest, shaped: Shaped, expected: Expected, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    pytest.importorskip("vllm", exc_type=ImportError)
    options = ENGINES[request.param]
    if torch.cuda.device_count() < options.get("tensor_parallel_size", 1):
        pytest.skip("needs two GPUs")
    small = {
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.1,
        "skip_mm_profiling": True,
        "max_model_len": 2048,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # count_graphs is sent as code
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.getbasetemp() / "vllm"))
        args = json.dumps(small | {name: options[name] for name in options if name != "prefills_in"})
        engine = load_thinker(
            shaped.config, ThinkerConfig(engine="vllm", dtype="bfloat16", max_num_seqs=SEQS, vllm_args=args)
        )
        yield Running(engine, options)
        engine.close()


def count_graphs(worker: Any) -> dict[str, int]:
    """In vLLM's worker: how many steps went through each kind of graph since the last call."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.forward_context import get_forward_context

    counts = getattr(CUDAGraphWrapper, "omni_counts", None)
    if counts is None:
        plain = CUDAGraphWrapper.__call__

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            mode = get_forward_context().cudagraph_runtime_mode
            if mode == self.runtime_mode:
                CUDAGraphWrapper.omni_counts[mode.name] = CUDAGraphWrapper.omni_counts.get(mode.name, 0) + 1
            return plain(self, *args, **kwargs)

        CUDAGraphWrapper.__call__ = counted
    CUDAGraphWrapper.omni_counts = {}
    return counts or {}


def test_alone_and_with_a_warm_prefix(running: Running, expected: Expected, files: tuple[bytes, bytes]) -> None:
    running.forget_prompts()
    running.graphs()
    for case in [*CASES] * 2:
        ((_, rows),) = running.answers([asked(case, files)])
        expected.check(case, rows)
    assert running.graphs().get(running.options["prefills_in"], 0) > 0


def test_eight_at_once(running: Running, expected: Expected, files: tuple[bytes, bytes]) -> None:
    running.forget_prompts()
    crowd = ([*CASES] * 3)[:8]
    for case, (_, rows) in zip(crowd, running.answers([asked(case, files) for case in crowd]), strict=True):
        expected.check(case, rows)


def test_beside_answers_that_fill_all_places_but_one(
    running: Running, expected: Expected, files: tuple[bytes, bytes]
) -> None:
    """In small steps the prompt runs token by token, each in a full graph: the rows are written inside of it."""
    for case in CASES:
        running.forget_prompts()
        long = [request("hello", max_tokens=1500, ignore_eos=True) for _ in range(SEQS - 1)]
        decoding = [send(running.engine, what) for what in long]
        for sink in decoding:
            sink.until(lambda sink: bool(sink.ids))
        running.graphs()
        ((_, rows),) = running.answers([asked(case, files, max_tokens=1)])
        counts = running.graphs()
        assert not any(sink.ended for sink in decoding)
        for what in long:
            running.engine.abort(what.request_id)
        for sink in decoding:
            sink.done()
        log.info("%s: %d rows, steps by kind of graph: %s", case, len(expected.exact[case]), counts)
        if "max_num_batched_tokens" in running.options:
            assert counts["FULL"] >= len(expected.exact[case])
        expected.check(case, rows)
