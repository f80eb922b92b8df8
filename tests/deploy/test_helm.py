"""The Helm chart, rendered by helm: Kubernetes' schemas take what it makes, and the server what it says."""

from __future__ import annotations

import copy
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import dockerfile
import jsonschema
import pytest
import yaml

from openai_frontend.routers import health, metrics
from tests.deploy.chart_tools import CHART, ROOT, Helm, check_kubernetes, unpack_helm
from tests.deploy.entry_point import run
from triton_omni.serve import frontend, tritonserver

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
META = yaml.safe_load((CHART / "Chart.yaml").read_text())
COMMANDS = dockerfile.parse_file(str(ROOT / "deploy" / "docker" / "Dockerfile"))
STOP_S = frontend.CLEAN_UP_S + tritonserver.EXIT_TIMEOUT_S + 3
FULL: dict[str, Any] = {
    "image": {"repository": "registry.internal/triton-omni", "tag": "1"},
    "imagePullSecrets": [{"name": "registry"}],
    "replicas": 2,
    "checkpoint": {"existingClaim": "models", "path": "published"},
    "server": {
        "profile": "two-gpus",
        "set": ["talker.max_sessions=32", "code2wav.devices=[0, 1]"],
        "modelName": "omni",
        "drainSeconds": 90,
        "readyTimeoutSeconds": 600,
        "frontendArgs": ["--workers", "2"],
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
    },
    "apiKeys": {"existingSecret": "omni-keys", "key": "api-keys.txt"},
    "gpus": 2,
    "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "200Gi"}},
    "cache": {"create": {"enabled": True, "storageClassName": "fast", "accessModes": ["ReadWriteMany"]}},
    "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"team": "voice"}},
    "tritonPorts": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "podAnnotations": {"team": "voice"},
    "podLabels": {"team": "voice"},
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {}},
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
}
CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "full": FULL,
    "demo on CPUs": {"gpus": 0, "server": {"profile": "cpu-demo"}},
    "a new claim": {"checkpoint": {"create": {"enabled": True}}},
    "a volume": {"checkpoint": {"volume": {"nfs": {"server": "files.internal", "path": "/models"}}}},
    "recreate": {"strategy": {"type": "Recreate", "rollingUpdate": None}},
}


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    home = tmp_path_factory.mktemp("helm")
    return Helm(unpack_helm(home), home)


def pod(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = objects["Deployment"]["spec"]["template"]["spec"]
    assert isinstance(found, dict)
    return found


def environment(objects: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in pod(objects)["containers"][0]["env"]}


def test_lint(helm: Helm) -> None:
    done = helm.run("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", ["1.25", "1.34"])
@pytest.mark.parametrize("case", CASES)
def test_kubernetes_takes_it(helm: Helm, case: str, version: str) -> None:
    objects = helm.render(CASES[case])
    monitor = objects.pop("ServiceMonitor", None)  # the operator's own kind, of which there is no schema here
    assert (monitor is not None) == (case == "full")
    check_kubernetes(list(objects.values()), version)


def test_the_check_would_see_a_wrong_field(helm: Helm) -> None:
    objects = helm.render()
    pod(objects)["containers"][0]["startupProbe"]["httpGet"]["pth"] = "/"
    with pytest.raises(jsonschema.ValidationError, match="pth"):
        check_kubernetes([objects["Deployment"]], "1.34")


def test_versions_are_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert META["version"] == META["appVersion"] == project["version"]
    assert META["kubeVersion"] == ">=1.25.0-0"  # the oldest that test_kubernetes_takes_it checks


def test_every_value_is_in_the_schema_and_no_other() -> None:
    def walk(values: dict[str, Any], schema: dict[str, Any], path: str) -> None:
        assert schema.get("additionalProperties") is False, path
        assert set(values) == set(schema["properties"]) - {"global"}, path
        for key, value in values.items():
            below = schema["properties"][key]
            if isinstance(value, dict) and "properties" in below:
                walk(value, below, f"{path}.{key}")

    walk(VALUES, SCHEMA, "values")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replica": 2}, "replica"),
        ({"server": {"profil": "one-gpu"}}, "/server"),
        ({"server": {"set": ["max_sessions=32"]}}, "/server/set/0"),
        ({"server": {"frontendArgs": ["--workers", 2]}}, "/server/frontendArgs/1"),
        ({"probes": {"readiness": {"path": "/"}}}, "/probes/readiness"),
        ({"gpus": -1}, "/gpus"),
        ({"sharedMemory": "lots"}, "/sharedMemory"),
        ({"checkpoint": {"path": "/models/published"}}, "/checkpoint/path"),
        (
            {"checkpoint": {"existingClaim": "models", "create": {"enabled": True}}},
            "existingClaim and create.enabled exclude each other",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm: Helm, values: dict[str, Any], named: str) -> None:
    assert named in helm.refusal(values)


def test_the_pod_is_the_images_user_and_can_write_only_where_it_must(helm: Helm) -> None:
    spec = pod(helm.render(FULL))
    (user,) = [each.value[0] for each in COMMANDS if each.cmd == "USER"]
    context = spec["securityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}" and context["fsGroup"] == context["runAsGroup"]
    (container,) = spec["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    written = {path for path, each in mounts.items() if not each.get("readOnly")}
    assert written == {"/dev/shm", "/tmp", "/cache", "/var/log/omni"}
    assert {each["name"] for each in mounts.values()} == {each["name"] for each in spec["volumes"]}
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert volumes["checkpoint"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}


def test_gpus(helm: Helm) -> None:
    assert pod(helm.render(FULL))["containers"][0]["resources"]["limits"] == {"memory": "200Gi", "nvidia.com/gpu": 2}
    assert "limits" not in pod(helm.render(CASES["demo on CPUs"]))["containers"][0]["resources"]


@pytest.mark.parametrize("name", ["checkpoint", "cache"])
def test_a_new_claim_is_the_one_that_the_pod_uses(helm: Helm, name: str) -> None:
    objects = helm.render({name: {"create": {"enabled": True, "size": "5Gi"}}})
    claim = objects["PersistentVolumeClaim"]
    (volume,) = [each for each in pod(objects)["volumes"] if each["name"] == name]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"
    kept = claim["metadata"].get("annotations", {}).get("helm.sh/resource-policy")
    assert kept == ("keep" if name == "checkpoint" else None)


@pytest.mark.parametrize("values", [{}, {"server": FULL["server"]}])
def test_loading_and_stopping_get_their_time(helm: Helm, values: dict[str, Any]) -> None:
    objects = helm.render(values)
    spec, settings = pod(objects), environment(objects)
    container = spec["containers"][0]
    startup = container["startupProbe"]
    ready_s = float(settings["OMNI_READY_TIMEOUT_S"])
    assert startup["periodSeconds"] * startup["failureThreshold"] >= ready_s
    assert objects["Deployment"]["spec"]["progressDeadlineSeconds"] > ready_s
    wait_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] >= wait_s + float(settings["OMNI_DRAIN_S"]) + STOP_S


def test_probes_ask_for_what_there_is(helm: Helm) -> None:
    routes = {getattr(route, "path", "") for module in (health, metrics) for route in module.router.routes}
    objects = helm.render(FULL)
    container = pod(objects)["containers"][0]
    asked = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: each["path"] for name, each in asked.items()} == {
        "startup": "/health/ready",
        "readiness": "/health/ready",
        "liveness": "/health/live",
    }
    (endpoint,) = objects["ServiceMonitor"]["spec"]["endpoints"]
    assert {each["path"] for each in [*asked.values(), endpoint]} <= routes
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert {each["port"] for each in asked.values()} == {"http"}
    assert [str(ports["http"])] == [each.value[0] for each in COMMANDS if each.cmd == "EXPOSE"]
    service = objects["Service"]["spec"]["ports"]
    assert {each["targetPort"] for each in service} == set(ports) and endpoint["port"] in {p["name"] for p in service}


def test_service_and_monitor_find_the_pods(helm: Helm) -> None:
    objects = helm.render(FULL)
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        objects["Deployment"]["spec"]["selector"]["matchLabels"],
        objects["Service"]["spec"]["selector"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    monitor = objects["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= objects["Service"]["metadata"]["labels"].items()


def test_the_server_takes_what_the_pod_says(helm: Helm, checkpoint: Path, tmp_path: Path) -> None:
    """The entry point with the pod's environment and arguments, as a dry run."""
    values = copy.deepcopy(FULL)
    values["server"] |= {"profile": "cpu-demo", "set": ["talker.max_sessions=3", "omni_bls.replicas=2"]}
    objects = helm.render(values)
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    said = environment(objects)
    assert (said["OMNI_CHECKPOINT"], said["OMNI_MODEL_NAME"]) == ("/models/published", "omni")
    (mount,) = [e for e in pod(objects)["containers"][0]["volumeMounts"] if e["name"] == "api-keys"]
    (volume,) = [e for e in pod(objects)["volumes"] if e["name"] == "api-keys"]
    (item,) = volume["secret"]["items"]
    assert (volume["secret"]["secretName"], item["key"]) == ("omni-keys", "api-keys.txt")
    assert said["OMNI_API_KEYS_FILE"] == f"{mount['mountPath']}/{item['path']}"
    here = {
        "OMNI_CHECKPOINT": str(checkpoint),
        "OMNI_API_KEYS_FILE": str(keys),
        "OMNI_LOG_DIRECTORY": str(tmp_path),
        "OMNI_PYTHON": sys.executable,
    }
    entry_point = ROOT / "deploy" / "docker" / "entrypoint.sh"
    done = run(entry_point, "--dry-run", *pod(objects)["containers"][0]["args"], **(said | here))
    assert done.code == 0, done.stderr
    assert "max_sessions: 3" in done.stdout and re.search(r"omni_bls:.*replicas: 2", done.stdout, re.DOTALL)


def test_without_a_volume_the_demo_is_served_and_nothing_is_mounted(helm: Helm) -> None:
    objects = helm.render()
    assert "OMNI_CHECKPOINT" not in environment(objects)
    assert {each["name"] for each in pod(objects)["volumes"]} == {"shm", "tmp", "logs", "cache"}
