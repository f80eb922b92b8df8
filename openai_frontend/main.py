"""The frontend as a process: ``python -m openai_frontend.main --checkpoint DIR [--port 9000] …``.

With several workers this process accepts the connections and hands them out, and each worker runs ``worker_app``, with
the same command line; their metrics come together in files of a directory that goes with this process.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
from typing import Any

import uvicorn
from fastapi import FastAPI

from openai_frontend.acceptor import Acceptor
from openai_frontend.app import create_app
from openai_frontend.command_line import parse_settings, told
from openai_frontend.metrics import SHARED_DIRECTORY_VARIABLE
from openai_frontend.settings import Settings
from openai_frontend.transcripts import Transcripts
from openai_frontend.triton_client import TritonEngine
from openai_frontend.workers import Workers
from triton_omni.errors import ConfigError

# How long answers that are cut off may take to clean up; the drain has ended before.
CLEAN_UP_S = 1
# A worker that says nothing for so long is replaced; it is silent while it starts, which a loaded machine makes long.
WORKER_START_S = 60


def worker_app() -> FastAPI:
    """The application by this process's command line."""
    settings = parse_settings()
    _log(settings)
    return _app(settings)


def _app(settings: Settings) -> FastAPI:
    engine = TritonEngine(settings.triton_url, stall_timeout_s=settings.stall_timeout_s)
    app = create_app(settings, engine)
    gc.freeze()  # what lives as long as the process need not be looked through again and again
    return app


def _log(settings: Settings) -> None:
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _options(settings: Settings) -> dict[str, Any]:
    """uvicorn's."""
    return {
        "host": settings.host,
        "port": settings.port,
        "ssl_certfile": settings.ssl_certfile or None,
        "ssl_keyfile": settings.ssl_keyfile or None,
        "log_config": None,
        "log_level": settings.log_level,
        "timeout_graceful_shutdown": CLEAN_UP_S,
        "timeout_worker_healthcheck": WORKER_START_S,
    }


def _serve_with_workers(settings: Settings) -> None:
    """Processes of uvicorn's; an acceptor hands them their connections."""
    options = _options(settings) | {"factory": True, "workers": settings.workers}
    config = uvicorn.Config("openai_frontend.main:worker_app", loop="openai_frontend.worker_loop:WorkerLoop", **options)
    with Acceptor(config.bind_socket()) as acceptor:
        Workers(config, acceptor).run()


def main() -> None:
    settings = parse_settings()
    _log(settings)
    try:
        app = _app(settings)  # also with workers: what is wrong with the settings is told once, and ends this process
        if settings.workers == 1:
            return uvicorn.run(app, **_options(settings))
        with tempfile.TemporaryDirectory(prefix="openai_frontend_") as directory:
            os.environ[SHARED_DIRECTORY_VARIABLE] = directory
            Transcripts.of_all_workers(settings.audio_id_lifetime_s).close()  # the workers find their file made
            _serve_with_workers(settings)
    except ConfigError as error:
        sys.exit(f"openai_frontend: error: {told(error)}")


if __name__ == "__main__":
    main()
