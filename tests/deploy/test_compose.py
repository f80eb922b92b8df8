"""compose.yaml says what the image, the server and Compose itself understand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import dockerfile
import pytest
import yaml
from compose_spec import PyCompose

from openai_frontend.routers import metrics
from triton_omni.serve import frontend, tritonserver
from triton_omni.serve.profile import find

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "docker" / "compose.yaml"
TEXT = FILE.read_text()
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
COMMANDS = dockerfile.parse_file(str(FILE.parent / "Dockerfile"))
# What the supervisor takes for a stop beyond the drain.
STOP_S = frontend.CLEAN_UP_S + tritonserver.EXIT_TIMEOUT_S + 3


def composed(**environment: str) -> dict[str, Any]:
    """The file with its variables put in, as Compose does."""
    content = yaml.safe_load(VARIABLE.sub(lambda match: environment.get(match[1], match[2] or ""), TEXT))
    assert isinstance(content, dict)
    return content


def service(name: str, **environment: str) -> dict[str, Any]:
    found = composed(**environment)["services"][name]
    assert isinstance(found, dict)
    return found


def of_dockerfile(command: str) -> list[str]:
    return [word for each in COMMANDS if each.cmd == command for word in each.value]


def test_it_is_a_compose_file() -> None:
    compose = PyCompose.from_yaml(yaml.safe_dump(composed()))
    compose.validate()
    assert compose.service_names() == ["cpu-demo", "gpu", "prometheus"]


def test_nothing_starts_unless_asked_for() -> None:
    profiles = {name: each["profiles"] for name, each in composed()["services"].items()}
    assert profiles == {"cpu-demo": ["cpu-demo"], "gpu": ["gpu"], "prometheus": ["prometheus"]}


@pytest.mark.parametrize("name", ["cpu-demo", "gpu"])
def test_the_build_names_what_the_dockerfile_has(name: str) -> None:
    build = service(name)["build"]
    assert (FILE.parent / build["context"] / build["dockerfile"]).samefile(FILE.parent / "Dockerfile")
    defaults = dict(word.split("=", 1) for word in of_dockerfile("ARG"))
    assert set(build["args"]) <= set(defaults)
    assert build["args"].get("TRITON_IMAGE", defaults["TRITON_IMAGE"]) == defaults["TRITON_IMAGE"]
    assert f"base-{build['args']['VARIANT']}" in of_dockerfile("FROM")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert service(name)["image"].removesuffix("-cpu") == f"triton-omni:{version}"


@pytest.mark.parametrize("name", ["cpu-demo", "gpu"])
def test_the_environment_is_what_the_entry_point_knows(name: str) -> None:
    known = re.search(r"^known=\((.*)\)$", (FILE.parent / "entrypoint.sh").read_text(), re.MULTILINE)
    assert known is not None
    assert set(service(name)["environment"]) <= {f"OMNI_{variable}" for variable in known[1].split()}


def test_the_demo_needs_a_profile_that_exists() -> None:
    assert find(service("cpu-demo")["environment"]["OMNI_PROFILE"]).exists()


def test_the_gpu_service_takes_the_users_choices() -> None:
    chosen = service("gpu", OMNI_CHECKPOINT="mine", OMNI_MODELS="/srv/models", OMNI_GPUS="2", OMNI_PORT="80")
    assert chosen["environment"]["OMNI_CHECKPOINT"] == "/models/mine"
    models = chosen["volumes"][0]
    assert (models["source"], models["target"], models["read_only"]) == ("/srv/models", "/models", True)
    (device,) = chosen["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", "2", ["gpu"])
    assert chosen["ports"] == ["127.0.0.1:80:9000"]


@pytest.mark.parametrize("name", ["cpu-demo", "gpu"])
def test_a_stop_leaves_time_for_the_drain(name: str) -> None:
    settings = service(name)
    grace_s = int(settings["stop_grace_period"].removesuffix("s"))
    assert grace_s >= float(settings["environment"]["OMNI_DRAIN_S"]) + STOP_S


@pytest.mark.parametrize("name", ["cpu-demo", "gpu"])
def test_it_can_write_only_where_it_must(name: str) -> None:
    settings = service(name)
    assert settings["read_only"] is True
    mounted = [each["target"] if isinstance(each, dict) else each.split(":")[1] for each in settings["volumes"]]
    assert sorted(mounted)[:2] == ["/cache", "/models"] if name == "gpu" else ["/cache", "/var/log/omni"]
    assert {"/cache", "/var/log/omni"} <= set(mounted) and settings["tmpfs"] == ["/tmp"]
    assert settings["shm_size"] == "8gb"


def test_keys_and_ports_meet() -> None:
    settings = service("gpu", OMNI_API_KEYS_FILE="/etc/omni/keys")
    (secret,) = settings["secrets"]
    assert settings["environment"]["OMNI_API_KEYS_FILE"] == f"/run/secrets/{secret}"
    assert composed(OMNI_API_KEYS_FILE="/etc/omni/keys")["secrets"][secret] == {"file": "/etc/omni/keys"}
    assert {settings["ports"][0].split(":")[-1]} == set(of_dockerfile("EXPOSE"))


def test_prometheus_asks_the_frontend() -> None:
    content = composed()
    config = yaml.safe_load(content["configs"]["prometheus"]["content"])
    (job,) = config["scrape_configs"]
    host, _, port = job["static_configs"][0]["targets"][0].partition(":")
    assert all(host in content["services"][name]["networks"]["default"]["aliases"] for name in ("cpu-demo", "gpu"))
    assert [port] == of_dockerfile("EXPOSE")
    assert "/metrics" in [getattr(route, "path", "") for route in metrics.router.routes]  # Prometheus's default


def test_every_variable_is_told() -> None:
    head, _, body = TEXT.partition("\nname: ")
    assert set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", head)) == {match[1] for match in VARIABLE.finditer(body)}


def test_compose_itself_reads_it() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("no docker compose")
    environment = os.environ | {"OMNI_GPUS": "2"}
    command = [docker, "compose", "-f", FILE, "--profile", "*", "config", "--format", "json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    read = yaml.safe_load(done.stdout)
    assert set(read["services"]) == {"cpu-demo", "gpu", "prometheus"}
    assert read["services"]["gpu"]["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 2
    assert (done.stderr, read["services"]["gpu"]["build"]["context"]) == ("", str(ROOT))
