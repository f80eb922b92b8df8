"""The thinker as transformers has it: one sequence, one forward, its own KV cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache, Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

from triton_omni.checkpoint import Checkpoint
from triton_omni.errors import CheckpointError, ConfigError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import PromptRows
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.prompt import EncodedPrompt

_TRANSFORMERS = "5.21"  # the first whose thinker is laid out as this module takes it


@dataclasses.dataclass(slots=True)
class KvState:
    """A sequence's KV cache and the M-RoPE position of its next token."""

    cache: DynamicCache
    next_position: int


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """A prompt with its M-RoPE ``positions`` int64 [3, P], one row each for time, height and width."""

    encoded: EncodedPrompt
    positions: torch.Tensor


class TransformersModel:
    """Weights on one device. Stateless: all that belongs to a sequence is in its KvState.

    Raises: CheckpointError naming tensors that are missing, extra or of another shape; ConfigError for the device.
    """

    def __init__(self, model_config: ModelConfig, config: ThinkerConfig) -> None:
        self.device = _device(config.device)
        self._model = _load(model_config, config).to(self.device)
        self._text = self._model.model.language_model
        thinker = self._model.config
        self._media_ids = torch.tensor([thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id])
        self._rows_layer = int(model_config.talker["accept_hidden_layer"]) if model_config.speaks else None
        if self._rows_layer is not None and self._rows_layer > len(self._text.layers):
            raise CheckpointError(
                f"talker_config.accept_hidden_layer is {self._rows_layer}, above the {len(self._text.layers)} layers"
            )

    def place(self, prompt: EncodedPrompt) -> PlacedPrompt:
        """Give a prompt its positions. May run in any thread."""
        ids = torch.from_numpy(prompt.token_ids).long()[None]  # [1, P]
        features = prompt.features
        audio_mask = features.get("feature_attention_mask")
        positions, _ = self._model.get_rope_index(
            ids,
            features.get("image_grid_thw"),
            features.get("video_grid_thw"),
            torch.ones_like(ids),
            prompt.use_audio_in_video,
            None if audio_mask is None else audio_mask.sum(-1),
            features.get("video_second_per_grid"),
        )
        return PlacedPrompt(prompt, positions[:, 0].long())  # [3, 1, P] float -> [3, P]

    def prefill(self, prompt: PlacedPrompt, *, want_rows: bool) -> tuple[torch.Tensor, KvState, PromptRows | None]:
        """Logits [V] behind the prompt, the sequence's state and, if wanted, what the talker needs of the prompt."""
        positions = prompt.positions
        state = KvState(DynamicCache(config=self._text.config), int(positions.max()) + 1)
        ids = torch.from_numpy(prompt.encoded.token_ids).long()
        at = torch.isin(ids, self._media_ids).nonzero()[:, 0]
        with _LayerRows(self._text, self._rows_layer if want_rows and len(at) else None) as layer:
            features = {name: value.to(self.device) for name, value in prompt.encoded.features.items()}
            hidden = self._forward(ids, positions, state, **features)
        rows = None
        if want_rows:
            taken = layer.value[0, at.to(self.device)] if layer.value is not None else hidden.new_empty(0, 0)
            rows = PromptRows(
                positions=positions.numpy().astype(np.int32),
                rows=taken.cpu().contiguous().view(torch.uint8).numpy().reshape(-1),
                dtype=str(taken.dtype).removeprefix("torch."),
            )
        return self._logits(hidden), state, rows

    def decode(self, token_id: int, state: KvState) -> torch.Tensor:
        """Logits [V] behind one more token."""
        positions = torch.full((3, 1), state.next_position)
        hidden = self._forward(torch.tensor([token_id]), positions, state)
        state.next_position += 1
        return self._logits(hidden)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, state: KvState, **features: Any) -> torch.Tensor:
        # Positions are always given: left to itself the model keeps ``rope_deltas`` of whichever prompt came last.
        output = self._model.model(
            input_ids=ids[None].to(self.device),  # [1, T]
            position_ids=positions[:, None].to(self.device),  # [3, 1, T]
            cache=state.cache,
            use_cache=True,
            **features,
        )
        hidden: torch.Tensor = output.last_hidden_state  # [1, T, H]
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.lm_head(hidden[0, -1])  # [V], of the last position only
        return logits


class _LayerRows:
    """Keeps ``hidden_states[layer]`` of the next forward as transformers records it, without keeping all layers.

    That is the output of decoder layer ``layer - 1`` before DeepStack is added, the embeddings for layer 0, and the
    normed output for the last one.
    """

    def __init__(self, text: torch.nn.Module, layer: int | None) -> None:
        self.value: torch.Tensor | None = None
        self._text = text
        self._layer = layer
        self._hook: Any = None

    def __enter__(self) -> _LayerRows:
        layers: Any = self._text.layers
        if self._layer is None:
            return self
        if self._layer == 0:
            self._hook = layers[0].register_forward_pre_hook(lambda _module, args: self._keep(args[0]))
        else:
            source: Any = self._text.norm if self._layer == len(layers) else layers[self._layer - 1]
            self._hook = source.register_forward_hook(lambda _module, _args, output: self._keep(output))
        return self

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _keep(self, value: Any) -> None:
        self.value = value[0] if isinstance(value, tuple) else value


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"must be auto, cpu or a CUDA device of this host, got {name!r}: {error}", field="device"
        ) from None
    return device


def _load(model_config: ModelConfig, config: ThinkerConfig) -> Any:
    if not hasattr(modeling_qwen3_omni_moe, "Qwen3OmniMoeThinkerModel"):
        raise ConfigError(
            f"transformers takes the package of that name from {_TRANSFORMERS} on, this is {transformers.__version__}; "
            "vllm takes older ones",
            field="engine",
        )
    dtype = config.dtype
    if dtype == "auto":
        dtype = model_config.raw.get("dtype") or model_config.raw.get("torch_dtype") or "auto"
    if config.weights == "random":
        thinker = Qwen3OmniMoeThinkerConfig.from_pretrained(model_config.path)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Qwen3OmniMoeThinkerForConditionalGeneration._from_config(thinker, dtype=dtype).eval()
    try:
        model, info = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
            model_config.path,
            dtype=dtype,
            key_mapping={r"^thinker\.": ""},
            output_loading_info=True,
            local_files_only=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        _raise_named(model_config)
        raise CheckpointError(f"{model_config.path}: the thinker cannot be loaded: {error}") from error
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        _raise_named(model_config)
        raise CheckpointError(f"{model_config.path}: tensors of the thinker do not fit: {info}")
    return model.eval()


def _raise_named(model_config: ModelConfig) -> None:
    """transformers logs which tensors do not fit; Checkpoint raises it. Slow (it reads them all), so only then."""
    thinker = Qwen3OmniMoeThinkerConfig.from_pretrained(model_config.path)
    with torch.device("meta"):
        skeleton = Qwen3OmniMoeThinkerForConditionalGeneration(thinker)
    Checkpoint(model_config).load(skeleton, "thinker.", dtype=torch.float32, device="meta", rename=_module_name)


def _module_name(name: str) -> str:
    """The checkpoint's name to transformers'."""
    head, _, rest = name.partition(".")
    return {"audio_tower": f"model.{name}", "visual": f"model.{name}", "model": f"model.language_model.{rest}"}.get(
        head, name
    )
