"""config.pbtxt's parameters, and what the shipped files say about them."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from pathlib import Path

import pytest

from triton_omni.errors import CheckpointError, ConfigError, InvalidRequestError
from triton_omni.pipeline.null import NullTalkerConfig
from triton_omni.pipeline.pipeline import PipelineConfig
from triton_omni.serve.repository import read_config, render
from triton_omni.triton.parameters import Instance, initializer, typed_value

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    sessions: int = 8
    device: str = "auto"
    eager: bool = False
    rate: float | None = None
    frames: tuple[int, ...] = (4,)


def instance(kind: str = "CPU", device_id: int = 0, **parameters: str) -> Instance:
    declared = {key: {"string_value": value} for key, value in parameters.items()}
    return Instance.from_args(
        {
            "model_config": json.dumps({"parameters": declared}),
            "model_name": "stage",
            "model_instance_name": "stage_0_0",
            "model_instance_kind": kind,
            "model_instance_device_id": str(device_id),
        }
    )


def test_strings_become_what_the_field_is() -> None:
    values = {"sessions": "3", "eager": "TRUE", "rate": "0.5", "frames": "4, 8,16"}
    assert instance(**values).config(Stage) == Stage(sessions=3, eager=True, rate=0.5, frames=(4, 8, 16))
    assert instance(rate="none").config(Stage) == Stage()


def test_what_is_not_the_stages_own_is_left_to_others() -> None:
    assert instance(checkpoint="/x", engine="auto", EXECUTION_ENV_PATH="/env.tar.gz").config(Stage) == Stage()


def test_an_instance_on_a_gpu_gets_that_gpu() -> None:
    assert instance(kind="GPU", device_id=3).config(Stage).device == "cuda:3"
    assert instance(kind="GPU", device_id=3, device="cpu").config(Stage).device == "cpu"
    assert instance(kind="MODEL", device_id=3).config(Stage).device == "auto"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"session": "3"}, "is not known; did you mean 'sessions'?"),
        ({"sessions": "many"}, "must be an integer, got 'many'"),
        ({"eager": "yes"}, "must be true or false, got 'yes'"),
        ({"rate": "fast"}, "must be a number, got 'fast'"),
        ({"frames": "4,x"}, "must be an integer, got 'x'"),
        ({"engine": "vroom"}, "must be auto or null, got 'vroom'"),
    ],
)
def test_a_wrong_parameter_is_named(parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        instance(**parameters).config(Stage)
    assert caught.value.field == f"stage: parameter {next(iter(parameters))}"
    assert message in caught.value.message


def test_initialize_tells_code_and_field_or_that_it_is_done(caplog: pytest.LogCaptureFixture) -> None:
    @initializer
    def initialize(_: object, args: dict[str, str]) -> None:
        instance(**json.loads(args["parameters"])).config(Stage)

    caplog.set_level(logging.INFO)
    with pytest.raises(RuntimeError, match=r"^bad_configuration \[stage: parameter rate\]"):
        initialize(None, {"parameters": '{"rate": "fast"}', "model_instance_name": "stage_0_1"})
    assert not caplog.messages
    initialize(None, {"parameters": '{"rate": "2"}', "model_instance_name": "stage_0_1"})
    assert caplog.messages == ["stage_0_1 is initialized"]


def test_two_classes_share_the_parameters() -> None:
    stage, pipeline = instance(sessions="2", max_requests="5").split_config(Stage, PipelineConfig)
    assert (stage.sessions, pipeline.max_requests) == (2, 5)
    with pytest.raises(ConfigError, match="did you mean 'max_requests'"):
        instance(max_request="5").split_config(Stage, PipelineConfig)


def test_null_engines_take_their_own_parameters_and_max_sessions() -> None:
    config = instance(engine="null", null_frame_ms="2", max_sessions="3", dtype="float32").null_config(NullTalkerConfig)
    assert config == NullTalkerConfig(frame_ms=2.0, max_sessions=3)


def test_the_checkpoint_is_the_parameters_or_the_environments(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    monkeypatch.delenv("OMNI_CHECKPOINT", raising=False)
    assert instance(checkpoint=str(checkpoint)).checkpoint().path == checkpoint
    with pytest.raises(CheckpointError, match="OMNI_CHECKPOINT"):
        instance().checkpoint()
    monkeypatch.setenv("OMNI_CHECKPOINT", str(checkpoint))
    assert instance().checkpoint().path == checkpoint


@pytest.mark.parametrize(
    ("name", "seen", "expected"),
    [
        ("thinker_0_0", None, "0,1"),
        ("thinker_1_0", None, "2"),
        ("thinker_0_0", "4,7,5", "4,7"),
        ("thinker_1_0", "4,7,GPU-5", "GPU-5"),
    ],
)
def test_a_replica_sees_its_devices_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, seen: str | None, expected: str
) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        monkeypatch.setenv(variable, "")  # so that it is put back
        monkeypatch.delenv(variable)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    made = Instance.from_args(_arguments(name, visible_devices="0,1;2"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    assert made.parameters == {"engine": "auto"}


def test_a_replica_without_devices_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="'0,1;2' has nothing for replica 2") as raised:
        Instance.from_args(_arguments("thinker_2_0", visible_devices="0,1;2"))
    assert raised.value.field == "thinker: parameter visible_devices"


def _arguments(name: str, **parameters: str) -> dict[str, str]:
    values = {key: {"string_value": value} for key, value in {"engine": "auto", **parameters}.items()}
    return {
        "model_config": json.dumps({"parameters": values}),
        "model_name": "thinker",
        "model_instance_name": name,
        "model_instance_kind": "MODEL",
        "model_instance_device_id": "0",
    }


def test_an_empty_list_and_a_lone_value() -> None:
    assert typed_value("frames", "25", tuple[int, ...]) == [25]
    with pytest.raises(InvalidRequestError):
        typed_value("frames", "4;8", tuple[int, ...])


def _known(model: str) -> set[str]:
    if model == "omni_bls":
        from triton_omni.triton.bls_config import BlsConfig

        classes = [BlsConfig, PipelineConfig]
    else:
        from triton_omni.code2wav.config import Code2WavConfig
        from triton_omni.talker.config import TalkerConfig
        from triton_omni.thinker.config import ThinkerConfig

        classes = [{"thinker": ThinkerConfig, "talker": TalkerConfig, "code2wav": Code2WavConfig}[model]]
    fields = {field.name for cls in classes for field in dataclasses.fields(cls)}
    return fields | {"checkpoint"} | ({"engine", "visible_devices"} if model != "omni_bls" else set())


@pytest.mark.parametrize("model", ["thinker", "talker", "code2wav", "omni_bls"])
def test_every_parameter_is_documented_in_place(model: str) -> None:
    text = (REPOSITORY / model / "config.pbtxt").read_text()
    block = text[text.index("parameters [") :]
    documented = set(re.findall(r'key: "(\w+)"', block))
    for names in re.findall(r"^  #   ((?:\w+(?:, )?)+)(?:  |\n)", block, re.MULTILINE):
        documented |= set(names.split(", "))
    assert documented == _known(model)


def test_render_changes_parameters_and_counts_and_links_the_code(tmp_path: Path) -> None:
    target = render(REPOSITORY, tmp_path / "r", {"talker": {"max_sessions": "4"}}, {"omni_bls": 3})
    talker, omni_bls = read_config(target / "talker"), read_config(target / "omni_bls")
    assert talker.parameters["max_sessions"].string_value == "4"
    assert talker.parameters["engine"].string_value == "auto"
    assert talker.sequence_batching.oldest.max_candidate_sequences == 1024
    assert [group.count for group in omni_bls.instance_group] == [1, 1, 1]
    assert len({group.host_policy for group in omni_bls.instance_group}) == 3, "each can be taken out alone"
    code = target / "talker" / "1" / "model.py"
    assert code.resolve() == REPOSITORY / "talker" / "1" / "model.py"


def test_render_refuses_unknown_models_and_full_targets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'talker'"):
        render(REPOSITORY, tmp_path / "r", {"talkr": {}})
    render(REPOSITORY, tmp_path / "r")
    with pytest.raises(ConfigError, match="is not empty"):
        render(REPOSITORY, tmp_path / "r")


@pytest.mark.parametrize("model", ["thinker", "omni_bls"])
def test_models_that_batch_by_themselves_are_not_behind_tritons_batcher(model: str) -> None:
    """Its thread can sleep through a free slot: of 32 requests at a time some waited for up to ten seconds."""
    config = read_config(REPOSITORY / model)
    assert not config.HasField("dynamic_batching") and config.max_batch_size == 0
