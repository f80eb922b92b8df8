"""The container image: what its Dockerfile takes along suffices, and its entry point says what the environment says."""

from __future__ import annotations

import http.server
import re
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import dockerfile
import pytest

from openai_frontend.routers import health
from tests.deploy.entry_point import environment, run
from triton_omni.serve.command_line import parse_options

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = dockerfile.parse_file(str(ROOT / "deploy" / "docker" / "Dockerfile"))
ENTRYPOINT = Path("deploy/docker/entrypoint.sh")
EXPECTED_OPTIONS = {
    "OMNI_CHECKPOINT": ("checkpoint", Path("/models/omni")),
    "OMNI_PROFILE": ("profile", "two-gpus"),
    "OMNI_SET": ("overrides", ("talker.max_sessions=3", "code2wav.devices=[0, 1]", "omni_bls.replicas=2")),
    "OMNI_MODEL_NAME": ("model_name", "my model"),
    "OMNI_PORT": ("port", 9100),
    "OMNI_DRAIN_S": ("drain_s", 7.5),
    "OMNI_READY_TIMEOUT_S": ("ready_timeout_s", 90.0),
    "OMNI_LOG_DIRECTORY": ("log_directory", Path("/logs")),
    "OMNI_API_KEYS_FILE": ("frontend_arguments", ("--api-keys-file", "/run/keys", "--workers", "2")),
}


def values(command: str) -> list[tuple[str, ...]]:
    return [each.value for each in COMMANDS if each.cmd == command]


def copied() -> list[str]:
    return [source for *sources, _ in values("COPY") for source in sources]


def image_environment() -> dict[str, str]:
    words = [word for value in values("ENV") for word in value]
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.fixture(scope="module")
def image_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """/omni as the image has it."""
    tree = tmp_path_factory.mktemp("image") / "omni"
    for *sources, target in values("COPY"):
        for pattern in sources:
            for source in ROOT.glob(pattern):
                if source.is_dir():
                    shutil.copytree(source, tree / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    (tree / target).mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, tree / target)
    return tree


@pytest.fixture
def stub_tree(image_tree: Path, tmp_path: Path) -> Path:
    """The same with the entry point alone, and in the place of serve.sh what the test writes there."""
    tree = tmp_path / "omni"
    shutil.copytree(image_tree / "deploy", tree / "deploy")
    (tree / "scripts").mkdir()
    return tree


def serve_stub(tree: Path, script: str) -> None:
    (tree / "scripts" / "serve.sh").write_text(f"#!/usr/bin/env bash\nset -eu\n{script}\n")
    (tree / "scripts" / "serve.sh").chmod(0o755)


def test_what_is_copied_exists_and_is_let_through() -> None:
    assert all(list(ROOT.glob(source)) for source in copied())
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = [line[1:] for line in lines if line.startswith("!")]
    assert sorted(let_through) == sorted(copied())
    assert lines.index("*") < lines.index(f"!{let_through[0]}")


@pytest.mark.parametrize("extras", [e["EXTRAS"] for e in [dict([v]) for v in values("ENV") if v[0] == "EXTRAS"]])
def test_the_extras_exist(extras: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_each_variant_has_a_base() -> None:
    stages = [value[-1] for value in values("FROM") if len(value) == 3]
    assert stages == ["base-gpu", "base-cpu"]
    assert values("FROM")[-1] == ("base-${VARIANT}",)


def test_it_runs_as_a_user_of_its_own_who_owns_what_is_written() -> None:
    assert values("USER") == [("10001:10001",)]
    (made,) = [value[0] for value in values("RUN") if "useradd" in value[0]]
    assert "--uid 10001" in made
    owned = re.search(r"install -d -o omni -g omni (.*)", made)
    assert owned is not None and owned[1].split() == ["/cache", "/var/log/omni"]
    caches = {name: path for name, path in image_environment().items() if "CACHE" in name}
    assert len(caches) == 5 and all(Path(path).is_relative_to("/cache") for path in caches.values())


def test_the_tree_suffices_for_a_dry_run(image_tree: Path, checkpoint: Path, tmp_path: Path) -> None:
    variables = {
        "OMNI_PYTHON": sys.executable,
        "OMNI_LOG_DIRECTORY": str(tmp_path),
        "OMNI_CHECKPOINT": str(checkpoint),
        "OMNI_PROFILE": "cpu-demo",
        "OMNI_SET": "talker.max_sessions=3",
    }
    done = run(image_tree / ENTRYPOINT, "--dry-run", "--", "--workers", "2", **variables)
    assert done.code == 0, done.stderr
    assert f"# {image_tree}/deploy/cpu-demo.yaml\n" in done.stdout
    assert "max_sessions: 3" in done.stdout


def test_the_environment_becomes_options(stub_tree: Path) -> None:
    serve_stub(stub_tree, "printf '%s\\0' \"$@\"")
    variables = {
        "OMNI_CHECKPOINT": "/models/omni",
        "OMNI_PROFILE": "two-gpus",
        "OMNI_SET": "talker.max_sessions=3\ncode2wav.devices=[0, 1];omni_bls.replicas=2;",
        "OMNI_MODEL_NAME": "my model",
        "OMNI_PORT": "9100",
        "OMNI_DRAIN_S": "7.5",
        "OMNI_READY_TIMEOUT_S": "90",
        "OMNI_LOG_DIRECTORY": "/logs",
        "OMNI_API_KEYS_FILE": "/run/keys",
        "OMNI_API_KEYS": "one,two",  # the frontend reads it itself
        "OMNI_PYTHON": "",
    }
    done = run(stub_tree / ENTRYPOINT, "--triton-host", "0.0.0.0", "--", "--workers", "2", **variables)
    options = parse_options(done.stdout.split("\0")[:-1])
    assert options.host == options.triton_host == "0.0.0.0"
    for field, value in EXPECTED_OPTIONS.values():
        assert getattr(options, field) == value


def test_what_is_empty_counts_as_absent(stub_tree: Path) -> None:
    serve_stub(stub_tree, "printf '%s ' \"$@\"; env | grep -c ^OMNI_ || true")
    done = run(stub_tree / ENTRYPOINT, OMNI_PROFILE="", OMNI_SET="", OMNI_API_KEYS_FILE="", OMNI_CHECKPOINT="")
    assert done.stdout == "--host 0.0.0.0 --log-directory /var/log/omni -- 0\n"


def test_an_unknown_variable_is_refused_by_name(stub_tree: Path) -> None:
    serve_stub(stub_tree, "echo started")
    done = run(stub_tree / ENTRYPOINT, OMNI_PROFLIE="one-gpu")
    assert (done.code, done.stdout) == (2, "")
    assert "OMNI_PROFLIE" in done.stderr and "OMNI_PROFILE" in done.stderr


def test_the_entry_point_tells_all_that_it_knows() -> None:
    text = (ROOT / ENTRYPOINT).read_text()
    known = re.search(r"^known=\((.*)\)$", text, re.MULTILINE)
    assert known is not None
    told = re.findall(r"^#   (OMNI_\w+) ", text, re.MULTILINE)
    of_the_image = ["OMNI_PYTHON", "OMNI_LOG_DIRECTORY"]
    assert [f"OMNI_{name}" for name in known[1].split()] == told + of_the_image
    assert set(EXPECTED_OPTIONS) | {"OMNI_API_KEYS"} == {*told, "OMNI_LOG_DIRECTORY"}


def test_both_logs_come_out_and_a_stop_reaches_the_server(stub_tree: Path, tmp_path: Path) -> None:
    """The logs appear after the start, and one of them is begun anew."""
    serve_stub(
        stub_tree,
        """
        trap 'echo stopped; exit 0' TERM
        echo "pid $$"
        cd "$OMNI_LOG_DIRECTORY"
        echo from triton > tritonserver-9000.log
        echo from the frontend > frontend-9000.log
        read -r line
        echo again > tritonserver-9000.log
        while :; do sleep 0.1; done
        """,
    )
    logs = tmp_path / "logs"
    logs.mkdir()
    process = subprocess.Popen(
        [stub_tree / ENTRYPOINT],
        env=environment({"OMNI_LOG_DIRECTORY": str(logs)}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        first = {process.stdout.readline() for _ in range(3)}
        assert first == {f"pid {process.pid}\n", "from triton\n", "from the frontend\n"}
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "again\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopped\n"
        assert process.wait() == 0
        assert process.stdout.read() == ""  # it ends: the logs' reader has gone, too
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(params=[200, 503])
def frontend(request: pytest.FixtureRequest) -> Iterator[tuple[int, int, list[str]]]:
    """Something that answers with the status; its port, and the paths that were asked for."""
    asked: list[str] = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(request.param)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield request.param, server.server_port, asked
        server.shutdown()
        thread.join()


def test_the_health_check_asks_for_readiness(frontend: tuple[int, int, list[str]]) -> None:
    status, port, asked = frontend
    ((kind, _, *arguments),) = values("HEALTHCHECK")
    assert kind == "CMD"
    done = subprocess.run([sys.executable, *arguments], env=environment({"OMNI_PORT": str(port)}))
    assert (done.returncode == 0) == (status == 200)
    assert asked == ["/health/ready"]
    assert asked[0] in [getattr(route, "path", "") for route in health.router.routes]
