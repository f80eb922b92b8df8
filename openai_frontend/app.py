"""The application: routers, middleware and error shape around one engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from openai_frontend import errors, openapi
from openai_frontend.access import KeyMiddleware, LimitMiddleware
from openai_frontend.context import Context
from openai_frontend.drain import Drain, DrainMiddleware
from openai_frontend.engine import Engine
from openai_frontend.keys import KeyRing
from openai_frontend.media import media_reader
from openai_frontend.metrics import MeasuredEngine, Metrics, MetricsMiddleware
from openai_frontend.middleware import BodyLimitMiddleware, RequestIdMiddleware
from openai_frontend.probe import Probe
from openai_frontend.routers import chat, completions, health, models, page, realtime, speech, transcriptions
from openai_frontend.routers import metrics as metrics_router
from openai_frontend.settings import Settings
from openai_frontend.transcripts import Transcripts
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.request import RequestParser


def create_app(settings: Settings, engine: Engine) -> FastAPI:
    """``engine`` is closed when the application shuts down. Raises CheckpointError when the checkpoint's
    configuration cannot be read, ConfigError for media settings that cannot be used.
    """
    config = ModelConfig.load(settings.checkpoint)
    metrics, drain = Metrics(), Drain(settings.drain_s)
    transcripts = Transcripts.of_all_workers(settings.audio_id_lifetime_s)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        metrics.close_dead()
        async with drain.on_stop_signals():
            yield
        await engine.close()
        transcripts.close()
        metrics.close()

    # FastAPI's own pages load their scripts from the network; ours is in routers/page.py.
    app = FastAPI(title="Triton-Omni", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.context = Context(
        settings=settings,
        engine=MeasuredEngine(engine, metrics),
        config=config,
        parser=RequestParser(config),
        media=media_reader(settings),
        transcripts=transcripts,
        started=int(time.time()),
        metrics=metrics,
        drain=drain,
        probe=Probe(engine, speaks=config.speaks),
    )
    modules = (chat, completions, speech, transcriptions, realtime, models, health, metrics_router, page)
    routers = [module.router for module in modules]
    for router in routers:
        app.include_router(router)
    paths = [getattr(route, "path", "") for router in routers for route in router.routes]
    _add_middleware(app, settings, metrics, drain, [*paths, str(app.openapi_url)])
    errors.install(app)
    openapi.install(app)
    return app


def _add_middleware(app: FastAPI, settings: Settings, metrics: Metrics, drain: Drain, paths: Sequence[str]) -> None:
    """From the inside out: the last one meets a request first. ``paths``: of all routes, for the metrics."""
    app.add_middleware(BodyLimitMiddleware, max_bytes=settings.max_body_bytes)
    app.add_middleware(
        LimitMiddleware,
        requests_per_minute=settings.requests_per_minute,
        max_concurrent=settings.max_concurrent_requests,
    )
    protected = ("/metrics",) if settings.protect_metrics else ()
    app.add_middleware(KeyMiddleware, keys=KeyRing(settings.api_keys), protected=protected)
    app.add_middleware(DrainMiddleware, drain=drain)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(MetricsMiddleware, metrics=metrics, paths=paths)
    app.add_middleware(RequestIdMiddleware)
