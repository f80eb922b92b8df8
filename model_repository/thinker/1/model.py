"""The thinker in Triton: requests into its engine, events out."""

from __future__ import annotations

import importlib.util
import locale
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

locale.setlocale(locale.LC_CTYPE, "C.UTF-8")  # the stub reads text as ASCII, and so would what is imported below
if importlib.util.find_spec("triton_omni") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from triton_omni.errors import OmniError
from triton_omni.pipeline.stages import PromptRows, ThinkerEngine
from triton_omni.pipeline.workers import Workers
from triton_omni.sampling import ThinkerSampling
from triton_omni.thinker.siblings import Siblings
from triton_omni.triton.lifetime import end_with_server, end_without_engine
from triton_omni.triton.metrics import StatsMetrics
from triton_omni.triton.parameters import Instance, initializer
from triton_omni.triton.responder import Responder, ResponseStream
from triton_omni.triton.tensors import arrays
from triton_omni.triton.thinker_wire import event_tensors, read_call, rows_tensors

CANCEL_POLL_S = 0.5
ROWS_THREADS = 64
ROWS_TIMEOUT_S = 600.0


class TritonPythonModel:
    """One thinker engine."""

    @initializer
    def initialize(self, args: dict[str, str]) -> None:
        end_with_server()
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        instance = Instance.from_args(args)
        self._defaults = ThinkerSampling.defaults(instance.checkpoint().generation)
        self._responder = Responder(instance.name, poll_s=CANCEL_POLL_S)
        self._engine = _engine(instance, partial(end_without_engine, self._responder))
        self._rows = Workers("rows", ROWS_THREADS)  # rows() waits for the prefill
        self._siblings = Siblings(self._engine, ROWS_TIMEOUT_S)
        self._metrics = StatsMetrics(instance, self._engine.stats, self._responder.messages)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            try:
                call = read_call(arrays(request.inputs()), self._defaults)
            except OmniError as error:
                self._responder.open(request, event_tensors).fail(error)
                continue
            if call.generate is not None:
                abort = partial(self._engine.abort, call.request_id)
                stream = self._responder.open(request, event_tensors, on_cancel=abort)
                with stream.guard("thinker"):
                    self._engine.submit(call.generate, stream.sink)
            elif call.op == "rows":
                rows = self._responder.open(request, lambda each: [rows_tensors(r) for r in each])
                self._rows.submit(partial(self._send_rows, call.request_id, rows))
            else:
                answer = self._responder.open(request, event_tensors)
                with answer.guard("thinker"):
                    self._siblings.abort(call.request_id)
                    answer.send(final=True)

    def _send_rows(self, request_id: str, stream: ResponseStream[PromptRows]) -> None:
        with stream.guard("thinker"):
            stream.send(self._siblings.rows(request_id), final=True)

    def finalize(self) -> None:
        self._siblings.close()
        self._engine.close()
        self._rows.close(timeout_s=1)
        self._metrics.close()
        self._responder.close()


def _engine(instance: Instance, on_death: Callable[[], None]) -> ThinkerEngine:
    if instance.uses_null_engine:
        from triton_omni.pipeline.null import NullThinker, NullThinkerConfig

        return NullThinker(instance.null_config(NullThinkerConfig))
    from triton_omni.thinker.config import ThinkerConfig
    from triton_omni.thinker.factory import load_thinker

    return load_thinker(instance.checkpoint(), instance.config(ThinkerConfig), on_death)
