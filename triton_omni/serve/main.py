"""The supervisor behind scripts/serve.sh: tritonserver and the OpenAI frontend, from start to a clean end.

    python -m triton_omni.serve.main [--checkpoint DIR] [--port 9000] [--host 127.0.0.1] [-- FRONTEND OPTIONS]

Progress goes to stderr, the line that says "ready" and the examples to stdout, the children's output to log files.
"""

from __future__ import annotations

import fcntl
import json
import logging
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from triton_omni.errors import ConfigError
from triton_omni.model_config import ModelConfig
from triton_omni.serve.command_line import DEMO_CHECKPOINT, ROOT, Options, parse_options
from triton_omni.serve.deployment import Deployment
from triton_omni.serve.examples import curl_example, python_example
from triton_omni.serve.frontend import FrontendProcess, tail
from triton_omni.serve.processes import Watched, check_ports_free
from triton_omni.serve.replicas import Replicas
from triton_omni.serve.signals import StopRequested, StopSignals
from triton_omni.serve.tritonserver import TritonServer

logger = logging.getLogger(__name__)


def serve(options: Options, signals: StopSignals) -> None:
    """Run until a stop signal (StopRequested) or until a part ends by itself (ConfigError with its last log lines)."""
    deployment = Deployment.choose(options.profile, options.overrides, demo=options.checkpoint is None)
    if options.dry_run or options.render is not None:
        _describe(options, deployment)
        return
    check_ports_free(
        [
            ("--port", options.host, options.port),
            ("--grpc-port", options.triton_host, options.grpc_port),
            ("--http-port", options.triton_host, options.http_port),
            ("--metrics-port", options.triton_host, options.metrics_port),
        ]
    )
    checkpoint = options.checkpoint or _demo_checkpoint(signals)
    config = ModelConfig.load(checkpoint)
    deployment.check_memory(checkpoint)
    repository = deployment.render(options.model_repository, options.log_directory / f"repository-{options.port}")
    with _tritonserver(options, repository, checkpoint) as server:
        logger.info("loading %s; log: %s", checkpoint, server.log_path)
        started = time.monotonic()
        with signals.interruptible():
            server.wait_ready(
                options.ready_timeout_s,
                lambda model, step: logger.info("%6.1f s  %s %s", time.monotonic() - started, step, model),
            )
        voice = config.default_speaker if config.speaks else None
        with Replicas(server, options.ready_timeout_s) as replicas, _frontend(options, server, checkpoint) as frontend:
            with signals.interruptible():
                logger.info("warming up: a first answer")
                _warm_up(server, speech=config.speaks, timeout_s=options.ready_timeout_s)
                frontend.wait_ready(options.ready_timeout_s)
                logger.info("%6.1f s  warm", time.monotonic() - started)
            model = options.model_name or checkpoint.resolve().name
            _announce(options, model, voice, demo=options.checkpoint is None)
            with signals.interruptible():
                ended = replicas.watch([Watched("the frontend", frontend.pid), Watched("tritonserver", server.pid)])
            log_path = frontend.log_path if ended.pid == frontend.pid else server.log_path
            raise ConfigError(f"{ended.name} (process {ended.pid}) ended by itself\n{tail(log_path)}")


def _describe(options: Options, deployment: Deployment) -> None:
    """On standard output, for a --dry-run or a --render, which keeps the repository."""
    if options.checkpoint is not None:
        deployment.check_memory(options.checkpoint)
    with tempfile.TemporaryDirectory(prefix="triton_omni_") as scratch:
        target = options.render or Path(scratch) / "repository"
        if target.exists():
            raise ConfigError(f"{target} exists already; name a new directory", field="--render")
        repository = deployment.render(options.model_repository, target)
        sys.stdout.write(deployment.describe(repository) + "\n")


def _tritonserver(options: Options, repository: Path, checkpoint: Path) -> TritonServer:
    return TritonServer(
        repository,
        checkpoint=checkpoint,
        address=options.triton_host,
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        metrics_port=options.metrics_port,
        log_path=options.log_directory / f"tritonserver-{options.port}.log",
        environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},  # the order in which the profile's numbers count
    )


def _frontend(options: Options, server: TritonServer, checkpoint: Path) -> FrontendProcess:
    arguments = ["--host", options.host, "--port", str(options.port), "--drain-s", str(options.drain_s)]
    arguments += ["--triton-url", server.grpc_target, "--triton-metrics-url", server.metrics_url]
    arguments += ["--checkpoint", str(checkpoint)]
    if options.model_name is not None:
        arguments += ["--model-name", options.model_name]
    arguments += options.frontend_arguments
    log_path = options.log_directory / f"frontend-{options.port}.log"
    return FrontendProcess(options.url, arguments, log_path=log_path, drain_s=options.drain_s)


def _demo_checkpoint(signals: StopSignals) -> Path:
    """The demo checkpoint, written when it is not there; one writer at a time."""
    if not (DEMO_CHECKPOINT / "config.json").exists():
        DEMO_CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
        logger.info("writing the demo checkpoint to %s", DEMO_CHECKPOINT)
        with (DEMO_CHECKPOINT.parent / ".lock").open("w") as lock, signals.interruptible():
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (DEMO_CHECKPOINT / "config.json").exists():
                script = ROOT / "scripts" / "make_tiny_checkpoint.py"
                command = [sys.executable, str(script), "--out", str(DEMO_CHECKPOINT)]
                if subprocess.run(command, stdout=sys.stderr).returncode != 0:
                    raise ConfigError(f"{script} failed; its message is above")
    return DEMO_CHECKPOINT


def _warm_up(server: TritonServer, *, speech: bool, timeout_s: float) -> None:
    """One short answer through every stage, asked for at Triton's own door. Raises ConfigError when it fails."""
    request: dict[str, object] = {
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
        "modalities": ["text", "audio"] if speech else ["text"],
        "thinker": {"max_tokens": 4},
        "talker": {"max_frames": 4},
    }
    url = f"{server.http_url}/v2/models/omni_bls/generate_stream"
    body = json.dumps({"REQUEST": json.dumps(request)}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=timeout_s) as response:
            answer = response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        answer = error.read().decode(errors="replace")
    except OSError as error:
        answer = str(error)
    if not _ends_well(answer):
        raise ConfigError(f"the first request failed: {answer.strip()}\n{tail(server.log_path)}")


def _ends_well(answer: str) -> bool:
    """Whether the last server-sent event is the end of an answer; an error is an event, too."""
    events = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: ")]
    return bool(events) and json.loads(events[-1].get("EVENT", "{}")).get("type") == "end"


def _announce(options: Options, model: str, voice: str | None, *, demo: bool) -> None:
    keyed = bool(options.frontend_settings().api_keys)
    examples = [example(options.url, model, voice, keyed=keyed) for example in (curl_example, python_example)]
    parts = [
        f"ready: {options.url}/v1, model {model} (Triton: gRPC {options.grpc_port}, HTTP {options.http_port}, "
        f"metrics {options.metrics_port}); Ctrl-C stops it\n",
        f"# curl\n{examples[0]}",
        f"# python, with the package openai ({sys.executable} has it)\n{examples[1]}",
        f"# logs: {options.log_directory}\n",
    ]
    if demo:
        parts.insert(1, "# the demo checkpoint is made, not trained: invented sentences, and sound that is no voice\n")
    sys.stdout.write("\n".join(parts))
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 after a stop signal or a dry run, 1 when something failed, 2 for a wrong command line."""
    options = parse_options(sys.argv[1:] if arguments is None else arguments)
    options.frontend_settings()  # what is wrong with them is told now, not when the models have loaded
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    with StopSignals() as signals:
        try:
            serve(options, signals)
            return 0
        except StopRequested:
            logger.info("stopped")
            return 0
        except ConfigError as error:
            logger.error("error: %s%s", f"{error.field}: " if error.field else "", error)
    return 1


if __name__ == "__main__":
    sys.exit(main())
