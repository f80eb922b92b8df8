"""What every router needs, made once by ``create_app``."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from fastapi import Depends, Request

from openai_frontend.drain import Drain
from openai_frontend.engine import Engine
from openai_frontend.media import MediaReader
from openai_frontend.metrics import Metrics
from openai_frontend.probe import Probe
from openai_frontend.settings import Settings
from openai_frontend.transcripts import Transcripts
from triton_omni.errors import NotFoundError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.request import RequestParser


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """``started``: unix time, in seconds, at which the model was announced."""

    settings: Settings
    engine: Engine
    config: ModelConfig
    parser: RequestParser
    media: MediaReader
    transcripts: Transcripts
    started: int
    metrics: Metrics
    drain: Drain
    probe: Probe

    @property
    def voices(self) -> list[str]:
        """Names in lower case, the default one first."""
        if not self.config.speaks:
            return []
        default = self.config.default_speaker
        return [default, *(name for name in self.config.speakers if name != default)]

    def check_model(self, name: str) -> None:
        """Raises NotFoundError unless ``name`` is the model served here."""
        served = self.settings.served_model
        if name != served:
            raise NotFoundError("model", f"The model {name!r} does not exist; this server has {served!r}")


async def get_context(request: Request) -> Context:  # not async, and FastAPI would send it to a thread
    context: Context = request.app.state.context
    return context


ContextDependency = Annotated[Context, Depends(get_context)]
