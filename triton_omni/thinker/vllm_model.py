"""vLLM's thinker with two changes: rows for the talker, and transformers' M-RoPE positions. Imports vLLM."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import vllm
from vllm.distributed import get_pp_group, get_tp_group
from vllm.model_executor.models import qwen3_omni_moe_thinker as upstream

from triton_omni.errors import ConfigError
from triton_omni.lifetime import end_with_starter
from triton_omni.thinker import last_words
from triton_omni.thinker.mrope import MRope
from triton_omni.thinker.vllm_rows_cache import RowsCache, layer_name
from triton_omni.thinker.vllm_workers import end_together


class OmniThinker(upstream.Qwen3OmniMoeThinkerForConditionalGeneration):  # type: ignore[misc]
    """Writes layer ``accept_hidden_layer`` (residual included) into a cache of its own, which is laid out, shared and
    freed exactly as the KV blocks are; a KV connector reads it. Checkpoints without speech have no such cache.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        end_with_starter()
        last_words.keep()
        config = vllm_config.model_config.hf_config
        speaks = vllm_config.kv_transfer_config is not None
        if speaks and not has_layer_outputs():
            upstream.Qwen3MoeLLMModel.forward = _forward_with_layer_outputs  # before anything compiles it
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        end_together(get_tp_group())
        self._mrope = MRope.of(config.thinker_config.to_dict())
        self.rows_cache: RowsCache | None = None
        if speaks:
            text = config.thinker_config.text_config
            # The language model's own: this class has it from 0.29 on only.
            self.language_model.set_aux_hidden_state_layers((config.talker_config.accept_hidden_layer,))
            self.rows_cache = RowsCache(
                num_heads=1,
                head_size=text.hidden_size,
                cache_config=vllm_config.cache_config,
                prefix=layer_name(text.num_hidden_layers),
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if isinstance(output, tuple):
            output, layers = output
            assert self.rows_cache is not None
            self.rows_cache(layers[0].unsqueeze(1))  # [T, 1, H]
        return output

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Each embedding to the pads of its kind, in order, as transformers does it. vLLM's own goes by ranges, and
        fails where the sound of a video lies between frames that have DeepStack features.

        Runs before every step, so it also empties what the step before has left of such features: a full CUDA graph
        replays ``forward`` without its Python, which would have done that, and they would be added to whatever tokens
        come next, of any request.
        """
        self._clear_deepstack_input_embeds(getattr(self, "deepstack_input_embeds_num_tokens", 0))
        if not multimodal_embeddings or is_multimodal is None or not self.deepstack_num_level:
            plain: torch.Tensor = super().embed_input_ids(input_ids, multimodal_embeddings, is_multimodal=is_multimodal)
            return plain
        embedded: torch.Tensor = super().embed_input_ids(input_ids, is_multimodal=is_multimodal)  # [T, H]
        tokens, hidden = embedded.shape
        is_audio = is_multimodal & (input_ids.to(is_multimodal.device) == self.config.audio_token_id)
        audio = [one for one in multimodal_embeddings if one.shape[-1] == hidden]
        vision = [one for one in multimodal_embeddings if one.shape[-1] != hidden]
        if audio:
            embedded[_at(is_audio, embedded)] = torch.cat(audio).to(embedded.dtype)
        if vision:
            levels = self.deepstack_num_level
            features = torch.cat(vision).to(embedded.dtype)  # [pads, H * (1 + levels)]
            at = _at(is_multimodal & ~is_audio, embedded)
            embedded[at] = features[:, :hidden]
            deepstack = embedded.new_zeros(levels, tokens, hidden)
            deepstack[:, at] = features[:, hidden:].reshape(-1, levels, hidden).transpose(0, 1)
            self._set_deepstack_input_embeds(deepstack)
        return embedded

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        """As transformers counts: vLLM 0.26 to 0.30 place images and videos one position late."""
        images, videos = [], []
        for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset):
            if feature.modality == "image":
                images.append(tuple(feature.data["image_grid_thw"].data.tolist()))
            elif feature.modality == "video":
                step_s = float(feature.data["second_per_grid_ts"].data)
                videos.append((tuple(feature.data["video_grid_thw"].data.tolist()), step_s))
        positions = torch.from_numpy(self._mrope.positions(input_tokens, images, videos)).long()
        return positions, int(positions.max()) + 1 - len(input_tokens)


def _at(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return mask.nonzero()[:, 0].to(like.device, non_blocking=True)


def check_layers_can_be_named() -> None:
    """Before anything is started. Raises ConfigError for a vLLM that gives no layer's output to anybody."""
    hooks = (
        (upstream.Qwen3MoeLLMForCausalLM, "set_aux_hidden_state_layers"),
        (upstream.Qwen3MoeLLMModel, "_maybe_add_hidden_state"),
    )
    for holder, name in hooks:
        if not hasattr(holder, name):
            raise ConfigError(
                f"is vllm {vllm.__version__}, whose {holder.__name__} has no {name}: the talker could not hear or see "
                "what a prompt shows; transformers does without it",
                field="engine",
            )


def has_layer_outputs() -> bool:
    """Whether this vLLM's decoder hands out the layers that ``set_aux_hidden_state_layers`` names (from 0.29 on)."""
    return "_maybe_add_hidden_state" in inspect.getsource(upstream.Qwen3MoeLLMModel.forward)


def _forward_with_layer_outputs(
    self: Any,
    input_ids: torch.Tensor | None,
    positions: torch.Tensor,
    intermediate_tensors: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    deepstack_input_embeds: Any = None,
) -> Any:
    """The decoder of 0.26 to 0.28 with what 0.30's hands out: a layer's output after DeepStack, residual added."""
    if get_pp_group().is_first_rank:
        hidden_states = inputs_embeds if inputs_embeds is not None else self.embed_input_ids(input_ids)
        residual = None
    else:
        hidden_states, residual = intermediate_tensors["hidden_states"], intermediate_tensors["residual"]
    kept = self._maybe_add_hidden_state([], self.start_layer, hidden_states, residual)
    for offset, layer in enumerate(self.layers[self.start_layer : self.end_layer]):
        index = offset + self.start_layer
        hidden_states, residual = layer(positions, hidden_states, residual)
        if deepstack_input_embeds is not None and index < len(deepstack_input_embeds):
            hidden_states = hidden_states + deepstack_input_embeds[f"deepstack_input_embeds_{index}"]
        kept = self._maybe_add_hidden_state(kept, index + 1, hidden_states, residual)
    if not get_pp_group().is_last_rank:
        return upstream.IntermediateTensors({"hidden_states": hidden_states, "residual": residual})
    hidden_states, _ = self.norm(hidden_states, residual)
    return (hidden_states, kept) if kept else hidden_states
