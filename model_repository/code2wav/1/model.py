"""code2wav in Triton: a sequence is an utterance; ``execute`` decodes all chunks that wait in one forward pass.

``execute`` works while it is called, on purpose: requests gather meanwhile and form the next batch, and the chunks of
one utterance stay in order.
"""

from __future__ import annotations

import importlib.util
import locale
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

locale.setlocale(locale.LC_CTYPE, "C.UTF-8")  # the stub reads text as ASCII, and so would what is imported below
if importlib.util.find_spec("triton_omni") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import triton_python_backend_utils as pb_utils

from triton_omni.errors import OmniError, StageError
from triton_omni.pipeline.stages import Code2WavEngine, CodesChunk
from triton_omni.triton.code2wav_wire import audio_tensors, read_chunk
from triton_omni.triton.lifetime import end_with_server, end_without_engine
from triton_omni.triton.metrics import StatsMetrics
from triton_omni.triton.parameters import Instance, initializer
from triton_omni.triton.responder import Responder, ResponseStream
from triton_omni.triton.tensors import arrays

logger = logging.getLogger(__name__)

CANCEL_POLL_S = 1.0


class TritonPythonModel:
    """One code2wav engine. Triton makes sure that a sequence's requests reach the instance that has its state."""

    @initializer
    def initialize(self, args: dict[str, str]) -> None:
        end_with_server()
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        instance = Instance.from_args(args)
        self._died = threading.Event()
        self._engine = _engine(instance, self._died.set)
        self._responder = Responder(instance.name, poll_s=CANCEL_POLL_S)
        self._metrics = StatsMetrics(instance, self._engine.stats, self._responder.messages)

    def execute(self, requests: list[Any]) -> None:
        streams: list[ResponseStream[Any]] = []
        chunks: list[CodesChunk] = []
        for request in requests:
            stream = self._responder.open(request, lambda waves: [audio_tensors(wave) for wave in waves])
            with stream.guard("code2wav"):
                chunks.append(_chunk(request))
                streams.append(stream)
        if not chunks:
            return
        try:
            results = self._engine.decode(chunks)
        except Exception as error:
            logger.exception("code2wav could not decode")
            results = [StageError("code2wav", str(error))] * len(chunks)
        for stream, result in zip(streams, results, strict=True):
            if isinstance(result, OmniError):
                stream.fail(result)
            else:
                stream.send(result, final=True)
        if self._died.is_set():
            end_without_engine(self._responder)

    def finalize(self) -> None:
        self._engine.close()
        self._metrics.close()
        self._responder.close()


def _chunk(request: Any) -> CodesChunk:
    flags = request.flags()
    return read_chunk(
        arrays(request.inputs()),
        str(request.correlation_id()),
        start=bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
        end=bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
    )


def _engine(instance: Instance, on_death: Callable[[], None]) -> Code2WavEngine:
    if instance.uses_null_engine:
        from triton_omni.pipeline.null import NullCode2Wav, NullCode2WavConfig

        return NullCode2Wav(instance.null_config(NullCode2WavConfig))
    model = instance.checkpoint()
    if not model.speaks:
        from triton_omni.pipeline.no_speech import NoCode2Wav

        return NoCode2Wav()
    from triton_omni.code2wav.config import Code2WavConfig
    from triton_omni.code2wav.factory import load_code2wav

    return load_code2wav(model, instance.config(Code2WavConfig), on_death)
