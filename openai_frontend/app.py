"""The application: routers, middleware and error shape around one engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from fastapi import FastAPI

from openai_frontend import errors
from openai_frontend.context import Context
from openai_frontend.engine import Engine
from openai_frontend.middleware import BodyLimitMiddleware, RequestIdMiddleware
from openai_frontend.routers import chat, health, models
from openai_frontend.settings import Settings
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.request import RequestParser


def create_app(settings: Settings, engine: Engine) -> FastAPI:
    """``engine`` is closed when the application shuts down. Raises CheckpointError when the checkpoint's
    configuration cannot be read.
    """
    config = ModelConfig.load(settings.checkpoint)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    app = FastAPI(title="Triton-Omni", lifespan=lifespan)
    app.state.context = Context(
        settings=settings, engine=engine, config=config, parser=RequestParser(config), started=int(time.time())
    )
    for module in (chat, models, health):
        app.include_router(module.router)
    app.add_middleware(BodyLimitMiddleware, max_bytes=settings.max_body_bytes)
    app.add_middleware(RequestIdMiddleware)
    errors.install(app)
    return app
