"""Qwen3-Omni in one process: the three engines of a checkpoint joined by the pipeline, without Triton."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.events import CancelToken, OmniEvent
from triton_omni.pipeline.local import LocalCode2Wav, LocalTalker, LocalThinker
from triton_omni.pipeline.no_speech import NoCode2Wav, NoTalker
from triton_omni.pipeline.pipeline import OmniPipeline, PipelineConfig
from triton_omni.pipeline.request import RequestParser
from triton_omni.pipeline.stages import Code2WavEngine, TalkerEngine, ThinkerEngine

if TYPE_CHECKING:
    from triton_omni.code2wav.config import Code2WavConfig
    from triton_omni.talker.config import TalkerConfig
    from triton_omni.thinker.config import ThinkerConfig


class LocalOmni:
    """Answers requests with the engines of one checkpoint, which load with the first request or with ``load``. A
    checkpoint without speech output gets a thinker only.

        with LocalOmni(ModelConfig.load("checkpoint")) as omni:
            for event in omni.generate({"messages": [{"role": "user", "content": "Hi"}], "modalities": ["audio"]}):
                event.text, event.audio  # the delta; int16 samples at 24 kHz
    """

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        thinker: ThinkerConfig | None = None,
        talker: TalkerConfig | None = None,
        code2wav: Code2WavConfig | None = None,
        pipeline: PipelineConfig | None = None,
    ) -> None:
        self._model_config = model_config
        self._thinker_config = thinker
        self._talker_config = talker
        self._code2wav_config = code2wav
        self._pipeline_config = pipeline
        self._parser = RequestParser(model_config)
        self._lock = threading.Lock()
        self._engines: dict[str, ThinkerEngine | TalkerEngine | Code2WavEngine] = {}
        self._pipeline: OmniPipeline | None = None

    def load(self) -> OmniPipeline:
        """The pipeline over the loaded engines; loads them once. Raises CheckpointError or ConfigError."""
        with self._lock:
            if self._pipeline is None:
                self._pipeline = self._load()
            return self._pipeline

    def generate(
        self, request: Mapping[str, Any], media: Sequence[bytes] = (), token: CancelToken | None = None
    ) -> Iterator[OmniEvent]:
        """The events of ``request``, the JSON object of omni_bls's REQUEST; ``media``: the files its messages point
        at. Leaving the iterator early cancels the request.

        Raises: InvalidRequestError at once, other OmniErrors from the iterator.
        """
        checked = self._parser.check(request, media)
        return self.load().stream(checked, token)

    def stats(self) -> dict[str, dict[str, int]]:
        """Gauges of the pipeline and of each engine that is loaded."""
        with self._lock:
            parts = {name: engine.stats() for name, engine in self._engines.items()}
            return {**parts, "pipeline": self._pipeline.stats()} if self._pipeline else parts

    def close(self) -> None:
        """End all requests and the engines."""
        with self._lock:
            if self._pipeline is not None:
                self._pipeline.close()
            for engine in self._engines.values():
                engine.close()
            self._engines.clear()
            self._pipeline = None

    def __enter__(self) -> LocalOmni:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self) -> OmniPipeline:
        from triton_omni.thinker.config import ThinkerConfig
        from triton_omni.thinker.factory import load_thinker

        thinker = load_thinker(self._model_config, self._thinker_config or ThinkerConfig())
        self._engines["thinker"] = thinker
        if not self._model_config.speaks:
            nothing = LocalTalker(NoTalker()), LocalCode2Wav(NoCode2Wav())
            return OmniPipeline(LocalThinker(thinker), *nothing, self._pipeline_config)

        from triton_omni.code2wav.config import Code2WavConfig
        from triton_omni.code2wav.factory import load_code2wav
        from triton_omni.talker.config import TalkerConfig
        from triton_omni.talker.factory import load_talker

        talker = load_talker(self._model_config, self._talker_config or TalkerConfig())
        self._engines["talker"] = talker
        code2wav = load_code2wav(self._model_config, self._code2wav_config or Code2WavConfig())
        self._engines["code2wav"] = code2wav
        return OmniPipeline(LocalThinker(thinker), LocalTalker(talker), LocalCode2Wav(code2wav), self._pipeline_config)
