from __future__ import annotations

from pathlib import Path

from triton_omni.serve.bare_tritonserver import ROOT, command
from triton_omni.serve.installation import Installation
from triton_omni.serve.tritonserver import BACKEND_CONFIG

CONTAINERS = Installation(Path("/opt/tritonserver/bin/tritonserver"))


def test_a_bare_start_loads_this_projects_models_with_the_launchers_backend_settings(tmp_path: Path) -> None:
    words = command(CONTAINERS, [], tmp_path / "backends")
    assert words[0] == str(CONTAINERS.binary)
    assert f"--model-repository={ROOT / 'model_repository'}" in words
    for key, value in BACKEND_CONFIG.items():
        assert f"--backend-config=python,{key}={value}" in words
    assert not any(word.startswith("--backend-directory") for word in words)


def test_given_options_replace_ours(tmp_path: Path) -> None:
    given = ["--model-repository", "elsewhere", "--backend-config=python,thread-pool-size=8", "--http-port=8000"]
    words = command(CONTAINERS, given, tmp_path / "backends")
    assert words[-4:] == given
    assert not any(word.startswith("--model-repository=") for word in words)
    assert [word for word in words if "thread-pool-size" in word] == ["--backend-config=python,thread-pool-size=8"]


def test_the_packages_backend_is_put_together_once(tmp_path: Path) -> None:
    installation = Installation.find()
    if installation.package is None:
        installation = CONTAINERS
    first = command(installation, [], tmp_path / "backends")
    assert command(installation, [], tmp_path / "backends") == first
