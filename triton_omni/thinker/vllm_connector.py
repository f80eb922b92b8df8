"""Takes a prompt's media rows out of vLLM's cache when its last prefill chunk has run. Imports vLLM."""

from __future__ import annotations

import dataclasses
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from triton_omni.lifetime import end_with_starter
from triton_omni.thinker.mrope import MRope
from triton_omni.thinker.rows_channel import RowsSender
from triton_omni.thinker.vllm_rows_cache import RowsCache, is_rows_layer

log = logging.getLogger(__name__)

ROWS_KEY = "omni_rows"
"""In a request's ``SamplingParams.extra_args``: the name under which its rows are sent."""
SOCKET_KEY = "rows_socket"
"""In ``kv_connector_extra_config``: the RowsReceiver's address."""


@dataclasses.dataclass(slots=True)
class _Prompt:
    """A request that wants rows, until they are sent. ``blocks``: those of the rows' cache, in order."""

    name: str
    token_ids: list[int]
    blocks: list[int]


@dataclasses.dataclass(slots=True)
class RowsMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From scheduler to worker, with one step: (name, cache slot of each media position)."""

    take: list[tuple[str, list[int]]] = dataclasses.field(default_factory=list)


class RowsConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads nothing, delays nothing. The scheduler's half follows the blocks of requests that want rows; the worker's
    half of the first tensor-parallel rank reads them in the step that completes the prompt.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        end_with_starter()  # the engine's process, where the model may lie in its workers
        groups = kv_cache_config.kv_cache_groups
        self._group = next(i for i, group in enumerate(groups) if any(map(is_rows_layer, group.layer_names)))
        self._block_size = int(groups[self._group].kv_cache_spec.block_size)
        self._media_ids = MRope.of(vllm_config.model_config.hf_config.thinker_config.to_dict()).media_ids
        self._prompts: dict[str, _Prompt] = {}
        self._cache: torch.Tensor | None = None
        self._writer: _Writer | None = None

    # The scheduler's half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> RowsMetadata:
        metadata = RowsMetadata()
        for new in scheduler_output.scheduled_new_reqs:
            name = ((new.sampling_params and new.sampling_params.extra_args) or {}).get(ROWS_KEY)
            if name is not None:
                self._prompts[new.req_id] = _Prompt(name, new.prompt_token_ids, list(new.block_ids[self._group]))
                self._advance(new.req_id, new.num_computed_tokens, scheduler_output, metadata)
        cached = scheduler_output.scheduled_cached_reqs
        if not self._prompts:
            return metadata
        for i, request_id in enumerate(cached.req_ids):
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue
            new_blocks = cached.new_block_ids[i]
            if new_blocks is not None:
                resumed = request_id in cached.resumed_req_ids  # after a preemption: other blocks
                prompt.blocks = ([] if resumed else prompt.blocks) + list(new_blocks[self._group])
            self._advance(request_id, cached.num_computed_tokens[i], scheduler_output, metadata)
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._prompts.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        layout: str | None = ExampleHiddenStatesConnector.get_required_kvcache_layout(vllm_config)
        return layout

    def _advance(self, request_id: str, computed: int, scheduler_output: Any, metadata: RowsMetadata) -> None:
        prompt = self._prompts[request_id]
        if computed + scheduler_output.num_scheduled_tokens[request_id] < len(prompt.token_ids):
            return
        at = np.flatnonzero(np.isin(prompt.token_ids, self._media_ids))
        slots = np.array(prompt.blocks)[at // self._block_size] * self._block_size + at % self._block_size
        metadata.take.append((prompt.name, slots.tolist()))
        del self._prompts[request_id]

    # The worker's half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = get_layers_from_vllm_config(self._vllm_config, RowsCache, list(kv_caches))
        (name,) = layers
        self._cache = kv_caches[name]
        if get_tensor_model_parallel_rank() == 0:
            self._writer = _Writer(self._vllm_config.kv_transfer_config.kv_connector_extra_config[SOCKET_KEY])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        if self._writer is None or self._cache is None or not self.has_connector_metadata():
            return
        for name, slots in self._get_connector_metadata().take:
            at = torch.tensor(slots, device=self._cache.device)
            self._writer.write(name, extract_from_kv_cache(self._cache, at, len(slots)))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        return None, None

    def shutdown(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Writer:
    """Sends rows from a thread of its own, so that a step never waits for a copy."""

    def __init__(self, address: str) -> None:
        self._sender = RowsSender(address)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="omni-rows")

    def write(self, name: str, rows: torch.Tensor) -> None:
        """``rows`` [R, 1, H], gathered already: their blocks may be written again."""
        copied = None
        if rows.is_cuda:
            host = torch.empty_like(rows, device="cpu", pin_memory=True)
            host.copy_(rows, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            rows = host
        self._thread.submit(self._send, name, rows, copied)

    def close(self) -> None:
        self._thread.shutdown()
        self._sender.close()

    def _send(self, name: str, rows: torch.Tensor, copied: torch.cuda.Event | None) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            dtype = str(rows.dtype).removeprefix("torch.")
            self._sender.send(name, rows.contiguous().view(torch.uint8).numpy().reshape(-1), dtype)
        except Exception:
            log.exception("the rows of %s could not be sent", name)
