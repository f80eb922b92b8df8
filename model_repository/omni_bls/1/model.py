"""omni_bls in Triton: requests into the pipeline, whose stages are the other three models, and events out."""

from __future__ import annotations

import importlib.util
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

if importlib.util.find_spec("triton_omni") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from triton_omni.errors import OmniError
from triton_omni.pipeline.events import CancelToken, OmniEvent
from triton_omni.pipeline.pipeline import OmniPipeline, PipelineConfig
from triton_omni.pipeline.request import RequestParser
from triton_omni.triton.bls import BlsCode2Wav, BlsTalker, BlsThinker, ChildRequests
from triton_omni.triton.bls_config import BlsConfig
from triton_omni.triton.cancel_keys import CancelKeys
from triton_omni.triton.lifetime import end_with_server
from triton_omni.triton.metrics import StatsMetrics
from triton_omni.triton.omni_wire import SIGN_OF_LIFE, event_tensors, read_life_parameter, read_request
from triton_omni.triton.parameters import Instance, initializer
from triton_omni.triton.responder import Responder, ResponseStream
from triton_omni.triton.tensors import arrays
from triton_omni.triton.wakeups import WakeupReader

CANCEL_POLL_S = 0.2


class TritonPythonModel:
    """One orchestrator process."""

    @initializer
    def initialize(self, args: dict[str, str]) -> None:
        end_with_server()
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        instance = Instance.from_args(args)
        bls, pipeline = instance.split_config(BlsConfig, PipelineConfig)
        self._wakeups = WakeupReader()
        self._cancel_keys = CancelKeys(self._wakeups)
        children = ChildRequests(self._wakeups)
        self._parser = RequestParser(
            instance.checkpoint(),
            chunk_frames=bls.chunk_frames,
            chunk_policy=bls.chunk_policy,
            async_chunk=bls.async_chunk,
        )
        self._pipeline = OmniPipeline(
            BlsThinker(children, bls.thinker_model),
            BlsTalker(children, bls.talker_model),
            BlsCode2Wav(children, bls.code2wav_model),
            pipeline,
        )
        self._responder = Responder(instance.name, poll_s=CANCEL_POLL_S, senders_may_wait=True)
        self._metrics = StatsMetrics(instance, self._pipeline.stats, self._responder.messages)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            token = CancelToken()
            stream = self._responder.open(
                request, event_tensors, is_last=_is_end, on_cancel=token.cancel, is_sound=_is_sound
            )
            with stream.guard("omni_bls"):
                text, media, key = read_request(arrays(request.inputs()))
                if key and not text:
                    self._cancel_keys.cancel(key)
                    stream.send(final=True)
                    continue
                parsed = self._parser.parse(text, media)
                if (every_s := read_life_parameter(request.parameters())) is not None:
                    stream.show_life(SIGN_OF_LIFE, every_s)
                self._cancel_keys.add(key, token)
                self._pipeline.submit(parsed, partial(self._emit, stream, key), token)

    def _emit(self, stream: ResponseStream[OmniEvent], key: str, event: OmniEvent | OmniError) -> None:
        if isinstance(event, OmniError) or event.is_end:
            self._cancel_keys.discard(key)
        stream.sink(event)

    def finalize(self) -> None:
        self._pipeline.close()
        self._wakeups.close()
        self._metrics.close()
        self._responder.close()


def _is_end(event: OmniEvent) -> bool:
    return event.is_end


def _is_sound(event: OmniEvent) -> bool:
    return event.audio.size > 0
