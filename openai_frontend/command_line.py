"""Settings from the command line and the environment."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openai_frontend import keys
from openai_frontend.settings import Settings
from triton_omni.errors import ConfigError
from triton_omni.model_config import CHECKPOINT_VARIABLE

_HELP = {
    "checkpoint": f"directory of the checkpoint that tritonserver serves (default: ${CHECKPOINT_VARIABLE})",
    "triton_url": "tritonserver's gRPC address, host:port",
    "host": "address to listen on",
    "port": "port to listen on",
    "model_name": "what clients write in 'model' (default: the name of the checkpoint's directory)",
    "max_body_bytes": "largest request",
    "max_media_bytes": "largest audio, image or video file of a request",
    "stall_timeout_s": "longest wait for the next piece of an answer",
    "drain_s": "how long open requests may go on after a signal to end",
    "log_level": "debug, info, warning or error",
    "triton_metrics_url": "where tritonserver's own metrics are; GET /metrics then has them too",
    "protect_metrics": "let GET /metrics ask for a key, too",
    "requests_per_minute": "of each key, or of each client address when there are no keys; 0: no limit",
    "max_concurrent_requests": "that each key, or client address, may have open; 0: no limit",
    "max_speech_characters": "longest input of /v1/audio/speech",
    "cors_origins": "web pages of these origins may ask (comma-separated; '*': all)",
    "ssl_certfile": "certificate chain, PEM; HTTPS instead of HTTP",
    "ssl_keyfile": "the certificate's private key, PEM",
    "workers": "processes that answer; limits hold in each",
    "allowed_media_domains": "fetch media from these hosts (comma-separated: example.com, *.example.com, "
    "example.com:8443, '*' for any); without it no address is fetched",
    "allowed_local_media_path": "directory that file: URLs may name; without it no file is read",
    "media_fetch_timeout_s": "longest time for one file from another host",
    "audio_id_lifetime_s": "how long a former answer can be named by its audio's id",
    "speech_system_prompt": "system message of chats that ask for speech and bring none, and the instructions that "
    "realtime sessions begin with",
}


def parse_settings(arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    """One option per field of Settings, its default the field's; keys from their file and the environment. Ends the
    program on errors.
    """
    environment = os.environ if environment is None else environment
    parser = argparse.ArgumentParser(
        prog="openai_frontend",
        description="OpenAI's HTTP API in front of omni_bls",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for field in dataclasses.fields(Settings):
        if field.name == "api_keys":
            text = f"file of keys, one a line, # for comments; ${keys.VARIABLE} holds more, separated by commas"
            parser.add_argument("--api-keys-file", type=Path, help=text)
        else:
            parser.add_argument(f"--{field.name.replace('_', '-')}", **_option(field, environment))
    values = vars(parser.parse_args(arguments))
    try:
        values["api_keys"] = keys.load(values.pop("api_keys_file", None), environment)
        return Settings(**values)
    except ConfigError as error:
        parser.error(told(error))


def told(error: ConfigError) -> str:
    """With the option, or the variable of the environment, that it is about."""
    if error.field in (None, "", keys.VARIABLE):
        return f"{error.field}: {error.message}" if error.field else error.message
    return f"--{str(error.field).replace('_', '-')}: {error.message}"


def _option(field: dataclasses.Field[Any], environment: Mapping[str, str]) -> dict[str, Any]:
    text, default = _HELP[field.name], field.default
    if field.name == "checkpoint":
        given = environment.get(CHECKPOINT_VARIABLE)
        return {"type": Path, "help": text, **({"default": Path(given)} if given else {"required": True})}
    if isinstance(default, bool):
        return {"action": argparse.BooleanOptionalAction, "help": text}
    if isinstance(default, tuple):
        return {"type": _words, "help": text}
    return {"type": type(default), "help": f"{text} (default: {default})" if default != "" else text}


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for part in text.split(",") if (word := part.strip()))
