"""The frontend as a process: ``python -m openai_frontend.main --checkpoint DIR [--port 9000] …``."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from openai_frontend.app import create_app
from openai_frontend.settings import Settings
from openai_frontend.triton_client import TritonEngine
from triton_omni.errors import ConfigError
from triton_omni.model_config import CHECKPOINT_VARIABLE

_HELP = {
    "checkpoint": f"directory of the checkpoint that tritonserver serves (default: ${CHECKPOINT_VARIABLE})",
    "triton_url": "tritonserver's gRPC address, host:port",
    "host": "address to listen on",
    "port": "port to listen on",
    "model_name": "what clients write in 'model' (default: the name of the checkpoint's directory)",
    "max_body_bytes": "largest request",
    "max_media_bytes": "largest audio or image file in a request",
    "stall_timeout_s": "longest wait for the next piece of an answer",
    "drain_s": "how long open requests may go on after a signal to end",
    "log_level": "debug, info, warning or error",
}


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Settings from the command line: one option per field, its default the field's. Ends the program on errors."""
    parser = argparse.ArgumentParser(
        prog="openai_frontend", description="OpenAI's HTTP API in front of omni_bls", argument_default=argparse.SUPPRESS
    )
    for field in dataclasses.fields(Settings):
        name, text, default = f"--{field.name.replace('_', '-')}", _HELP[field.name], field.default
        if field.name == "checkpoint":
            given = os.environ.get(CHECKPOINT_VARIABLE)
            parser.add_argument(name, type=Path, default=Path(given) if given else None, required=not given, help=text)
        else:
            shown = f"{text} (default: {default})" if default != "" else text
            parser.add_argument(name, type=type(default), help=shown)
    return Settings(**vars(parser.parse_args(arguments)))


def main() -> None:
    settings = parse_settings()
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    engine = TritonEngine(settings.triton_url, stall_timeout_s=settings.stall_timeout_s)
    try:
        app = create_app(settings, engine)
    except ConfigError as error:
        sys.exit(f"openai_frontend: {error}")
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        log_level=settings.log_level,
        timeout_graceful_shutdown=int(settings.drain_s),
    )


if __name__ == "__main__":
    main()
