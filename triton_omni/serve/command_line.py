"""The command line of scripts/serve.sh."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from openai_frontend.command_line import parse_settings
from openai_frontend.settings import Settings
from triton_omni.serve.processes import host_for_clients
from triton_omni.serve.profile import names as profile_names

ROOT = Path(__file__).resolve().parents[2]
DEMO_CHECKPOINT = ROOT / "checkpoints" / "demo"


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The command line. ``checkpoint`` None: the demo checkpoint."""

    checkpoint: Path | None
    host: str
    port: int
    model_name: str | None
    triton_host: str
    grpc_port: int
    http_port: int
    metrics_port: int
    model_repository: Path
    profile: str | None
    overrides: tuple[str, ...]
    dry_run: bool
    render: Path | None
    log_directory: Path
    ready_timeout_s: float
    drain_s: float
    frontend_arguments: tuple[str, ...]

    @property
    def url(self) -> str:
        """Where a client on this machine reaches the frontend."""
        scheme = "https" if any(a.startswith("--ssl-certfile") for a in self.frontend_arguments) else "http"
        return f"{scheme}://{host_for_clients(self.host)}:{self.port}"

    def frontend_settings(self) -> Settings:
        """What the frontend will make of its options; ends the program on wrong ones, as the frontend would."""
        checkpoint = str(self.checkpoint or DEMO_CHECKPOINT)
        return parse_settings(["--checkpoint", checkpoint, *self.frontend_arguments])


def parse_options(arguments: Sequence[str]) -> Options:
    """The command line as Options; Triton's ports follow the frontend's unless given. Ends the program on errors.

    What comes after ``--`` is the frontend's.
    """
    cut = list(arguments).index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="serve.sh",
        description="Serve a Qwen3-Omni checkpoint: text and speech over an OpenAI-compatible API.",
        epilog="Options of the frontend follow after --: serve.sh -- --help lists them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, help="directory of a Qwen3-Omni checkpoint; none: a small demo checkpoint is made")
    add("--host", default="127.0.0.1", help="address of the OpenAI API")
    add("--port", type=_port, default=9000, help="port of the OpenAI API")
    add("--model-name", help="what clients write as model; none: the name of the checkpoint's directory")
    add("--triton-host", default="127.0.0.1", help="address of Triton's own ports")
    add("--grpc-port", type=_port, help="Triton's gRPC port; none: --port plus 1")
    add("--http-port", type=_port, help="Triton's HTTP port; none: --port plus 2")
    add("--metrics-port", type=_port, help="Triton's metrics port; none: --port plus 3")
    add("--profile", help=f"a layout: {', '.join(profile_names())}, or a file; none: by the devices that are there")
    add("--set", action="append", dest="overrides", default=[], metavar="STAGE.KEY=VALUE", help="changes the profile")
    add("--dry-run", action="store_true", help="say what would be loaded, and end")
    add("--render", type=Path, help="write what would be loaded to this directory, for a bare tritonserver, and end")
    add("--model-repository", type=Path, default=ROOT / "model_repository", help="what the profile is applied to")
    add("--log-directory", type=Path, default=ROOT / ".cache" / "logs", help="where logs and applied profile go")
    add("--ready-timeout-s", type=_positive, default=1800.0, help="how long loading may take")
    add("--drain-s", type=_positive, default=5.0, help="how long open requests may go on after a stop")
    values = vars(parser.parse_args(arguments[:cut]))
    values["overrides"] = tuple(values["overrides"])
    for offset, name in enumerate(("grpc_port", "http_port", "metrics_port"), start=1):
        if values[name] is None:
            values[name] = values["port"] + offset
    return Options(**values, frontend_arguments=tuple(arguments[cut + 1 :]))


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 65_532:
        raise argparse.ArgumentTypeError(f"must be a port from 1 to 65532, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (value := float(text)) > 0:
            return value
    raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
