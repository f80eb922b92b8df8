"""The talker in Triton: a sequence is a session of its engine."""

from __future__ import annotations

import importlib.util
import locale
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

locale.setlocale(locale.LC_CTYPE, "C.UTF-8")  # the stub reads text as ASCII, and so would what is imported below
if importlib.util.find_spec("triton_omni") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import triton_python_backend_utils as pb_utils

from triton_omni.pipeline.stages import CodesEvent, TalkerEngine
from triton_omni.sampling import TalkerSampling
from triton_omni.triton.lifetime import end_with_server, end_without_engine
from triton_omni.triton.metrics import StatsMetrics
from triton_omni.triton.parameters import Instance, initializer
from triton_omni.triton.responder import Responder
from triton_omni.triton.talker_wire import TalkerDefaults, codes_tensors, read_append, read_start
from triton_omni.triton.tensors import Arrays, arrays

CANCEL_POLL_S = 0.5


class TritonPythonModel:
    """One talker engine. Triton makes sure that a sequence's requests reach the instance that has its session."""

    @initializer
    def initialize(self, args: dict[str, str]) -> None:
        end_with_server()
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        instance = Instance.from_args(args)
        model = instance.checkpoint()
        speaker, code_groups = (model.default_speaker, model.code_groups) if model.speaks else ("", 0)
        self._defaults = TalkerDefaults(speaker, TalkerSampling.defaults(model.generation))
        self._opened = CodesEvent(np.empty((0, code_groups), np.int32))
        self._responder = Responder(instance.name, poll_s=CANCEL_POLL_S)
        self._engine = _engine(instance, partial(end_without_engine, self._responder))
        self._metrics = StatsMetrics(instance, self._engine.stats, self._responder.messages)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            session_id = str(request.correlation_id())
            inputs = arrays(request.inputs())
            end = bool(request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self._start(request, session_id, inputs, end)
            else:
                self._append(request, session_id, inputs, end)

    def _start(self, request: Any, session_id: str, inputs: Arrays, end: bool) -> None:
        cancel = partial(self._engine.cancel, session_id)
        stream = self._responder.open(request, codes_tensors, on_cancel=cancel)
        with stream.guard("talker"):
            start = read_start(inputs, self._defaults, end=end)
            stream.send(self._opened)
            self._engine.start(session_id, start, stream.sink)
            if stream.taken_back:  # before the engine knew the session
                cancel()

    def _append(self, request: Any, session_id: str, inputs: Arrays, end: bool) -> None:
        stream = self._responder.open(request, codes_tensors)
        with stream.guard("talker"):
            append = read_append(inputs, end=end)
            if append.cancel:
                self._engine.cancel(session_id)
            else:
                self._engine.append(session_id, append.token_ids, append.text_finished)
            stream.send(final=True)

    def finalize(self) -> None:
        self._engine.close()
        self._metrics.close()
        self._responder.close()


def _engine(instance: Instance, on_death: Callable[[], None]) -> TalkerEngine:
    if instance.uses_null_engine:
        from triton_omni.pipeline.null import NullTalker, NullTalkerConfig

        return NullTalker(instance.null_config(NullTalkerConfig))
    model = instance.checkpoint()
    if not model.speaks:
        from triton_omni.pipeline.no_speech import NoTalker

        return NoTalker()
    from triton_omni.talker.config import TalkerConfig
    from triton_omni.talker.factory import load_talker

    return load_talker(model, instance.config(TalkerConfig), on_death)
