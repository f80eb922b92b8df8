"""Deploy profiles: every shipped one renders, every wrong one says what is wrong and what would be accepted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triton_omni.errors import ConfigError
from triton_omni.serve.command_line import ROOT
from triton_omni.serve.deployment import Deployment
from triton_omni.serve.layout import lay_out
from triton_omni.serve.machine import PLATFORMS, Device, Machine, Platform
from triton_omni.serve.main import main
from triton_omni.serve.profile import Profile, default_name, names
from triton_omni.serve.repository import read_config

SHAPE = ROOT / "scripts" / "shapes" / "qwen3_omni_30b_a3b.json"


def machine(count: int, platform: Platform = "cuda", gib: int = 141) -> Machine:
    return Machine(platform, (Device("Big", gib << 30),) * count) if count else Machine("cpu")


def deployment(name: str, here: Machine, *overrides: str) -> Deployment:
    profile = Profile.load(name, here.platform, overrides)
    return Deployment(here, profile, lay_out(profile, here))


def rendered(name: str, here: Machine, target: Path, *overrides: str) -> dict[str, Any]:
    """stage -> its ModelConfig."""
    deployment(name, here, *overrides).render(ROOT / "model_repository", target)
    return {stage: read_config(target / stage) for stage in ("thinker", "talker", "code2wav", "omni_bls")}


def places(config: Any) -> list[tuple[str, list[int]]]:
    assert all(group.count == 1 for group in config.instance_group)
    return [(group.Kind.Name(group.kind), list(group.gpus)) for group in config.instance_group]


def values(config: Any) -> dict[str, str]:
    return {key: parameter.string_value for key, parameter in config.parameters.items()}


def test_all_layouts_are_shipped() -> None:
    assert names() == ["cpu-demo", "one-gpu", "thinker-tp2", "three-gpus", "two-gpus"]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", names())
def test_a_shipped_profile_renders_on_every_platform(name: str, platform: Platform, tmp_path: Path) -> None:
    if platform == "cpu":
        if name == "cpu-demo":
            assert places(rendered(name, machine(0), tmp_path)["talker"]) == [("KIND_CPU", [])]
        else:
            with pytest.raises(ConfigError, match="is not there; accepted are auto, cpu"):
                deployment(name, machine(0))
        return
    configs = rendered(name, machine(3, platform), tmp_path)
    used = [gpu for config in configs.values() for _, gpus in places(config) for gpu in gpus]
    assert bool(used) == (platform == "cuda" and name != "cpu-demo"), "KIND_GPU is for NVIDIA's"
    if platform == "xpu" and name != "cpu-demo":
        assert json.loads(values(configs["thinker"])["vllm_args"])["enforce_eager"] is True
        assert values(configs["talker"])["device"] == "xpu"


def test_three_gpus_have_two_of_each_speaking_stage(tmp_path: Path) -> None:
    configs = rendered("three-gpus", machine(3), tmp_path)
    assert places(configs["thinker"]) == [("KIND_MODEL", [])]
    assert values(configs["thinker"])["visible_devices"] == "0"
    for stage in ("talker", "code2wav"):
        assert places(configs[stage]) == [("KIND_GPU", [1]), ("KIND_GPU", [2])]
    assert len(places(configs["omni_bls"])) == 4


def test_tensor_parallel_goes_to_vllm(tmp_path: Path) -> None:
    thinker = rendered("thinker-tp2", machine(2), tmp_path)["thinker"]
    assert json.loads(values(thinker)["vllm_args"])["tensor_parallel_size"] == 2
    assert values(thinker)["visible_devices"] == "0,1"
    assert places(thinker) == [("KIND_MODEL", [])]


def test_replicas_of_a_tensor_parallel_thinker_get_devices_of_their_own(tmp_path: Path) -> None:
    overrides = ("thinker.devices=[0, 1, 2, 3]", "thinker.replicas=2")
    thinker = rendered("thinker-tp2", machine(4), tmp_path, *overrides)["thinker"]
    assert values(thinker)["visible_devices"] == "0,1;2,3"
    assert json.loads(values(thinker)["vllm_args"])["tensor_parallel_size"] == 2


def test_amd_replicas_see_one_device_each(tmp_path: Path) -> None:
    talker = rendered("three-gpus", machine(3, "rocm"), tmp_path)["talker"]
    assert places(talker) == [("KIND_MODEL", [])] * 2
    assert values(talker)["visible_devices"] == "1;2"
    assert values(talker)["cuda_graph"] == "false", "the platform's delta is merged without being asked for"


def test_overrides_win_over_platform_and_file(tmp_path: Path) -> None:
    configs = rendered(
        "two-gpus",
        machine(2, "rocm"),
        tmp_path,
        *("talker.cuda_graph=none", "talker.max_sessions=8", "code2wav.devices=[0, 1]", "code2wav.replicas=4"),
        *("thinker.vllm_args.max_num_batched_tokens=4096", "omni_bls.chunk_frames=[4, 25]", "omni_bls.replicas=3"),
    )
    assert values(configs["talker"])["max_sessions"] == "8"
    assert values(configs["talker"])["cuda_graph"] == "none"
    assert values(configs["code2wav"])["visible_devices"] == "0;1;0;1"
    arguments = json.loads(values(configs["thinker"])["vllm_args"])
    assert arguments == {"gpu_memory_utilization": 0.85, "max_num_batched_tokens": 4096}
    assert values(configs["omni_bls"])["chunk_frames"] == "4,25"
    assert len(places(configs["omni_bls"])) == 3


def test_what_a_profile_does_not_say_stays_as_the_repository_has_it(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("description: nothing\n")
    configs = rendered(str(tmp_path / "empty.yaml"), machine(2), tmp_path / "out")
    assert places(configs["talker"]) == [("KIND_MODEL", [])]
    assert len(places(configs["omni_bls"])) == 2
    assert "device" not in values(configs["talker"])


def test_a_second_start_renders_in_the_same_place(tmp_path: Path) -> None:
    target = tmp_path / "repository-9000"
    rendered("two-gpus", machine(2), target)
    (target / "talker" / "config.pbtxt").write_text("not this")
    (target / "former").mkdir()
    assert values(rendered("two-gpus", machine(2), target)["talker"])["max_sessions"] == "64"
    assert sorted(path.name for path in target.iterdir()) == ["code2wav", "omni_bls", "talker", "thinker"]


@pytest.mark.parametrize(("count", "name"), [(0, "cpu-demo"), (1, "one-gpu"), (2, "two-gpus"), (8, "three-gpus")])
def test_the_default_goes_by_the_devices(count: int, name: str) -> None:
    assert default_name(machine(count)) == name


@pytest.mark.parametrize(
    ("overrides", "field", "message"),
    [
        (["talkr.max_sessions=1"], "--set talkr.max_sessions", "is not known; did you mean 'talker'?"),
        (["max_sessions=1"], "--set", "must be stage.key=value, got 'max_sessions=1'"),
        (["talker.max_sessions"], "--set", "must be stage.key=value"),
        (["talker.max_sessions=[1"], "--set talker.max_sessions", "must have a YAML value"),
        (["talker.vllm_args.x.y=1"], "--set talker.vllm_args.x.y", "must be stage.key=value"),
        (["talker.max_sesions=1"], "talker: parameter max_sesions", "is not known; did you mean 'max_sessions'?"),
        (["talker.max_sessions=many"], "talker: parameter max_sessions", "must be an integer, got 'many'"),
        (["talker.max_sessions=0"], "talker.max_sessions", "must be at least 1, got 0"),
        (["talker.engine=fast"], "talker: parameter engine", "must be auto or null, got 'fast'"),
        (["talker.engine=null", "talker.max_sesions=1"], "talker: parameter max_sesions", "is not known"),
        (["talker.engine=null", "talker.null_frame=1"], "talker: parameter frame", "is not known; did you mean"),
        (["omni_bls.max_request=1"], "omni_bls: parameter max_request", "is not known; did you mean 'max_requests'?"),
        (["omni_bls.devices=[0]"], "omni_bls.devices", "must be cpu or left out"),
        (["talker.device=cuda"], "talker.device", "is set by devices"),
        (["talker.checkpoint=x"], "talker.checkpoint", "is set by --checkpoint"),
        (["talker.devices=[2]"], "talker.devices", "2 is not there; accepted are auto, cpu, 0 (Big), 1 (Big)"),
        (["talker.devices=gpu"], "talker.devices", "must be auto, cpu or a list of device numbers, got 'gpu'"),
        (["talker.devices=[]"], "talker.devices", "must be auto, cpu or a list of device numbers, got []"),
        (["talker.devices=[1, 1]"], "talker.devices", "names a device twice: [1, 1]"),
        (["talker.replicas=0"], "talker.replicas", "must be an integer from 1 to 64, got 0"),
        (["talker.replicas=true"], "talker.replicas", "must be an integer from 1 to 64, got True"),
        (["talker.devices=[0, 1]", "talker.replicas=3"], "talker.replicas", "must be a multiple of the number of dev"),
        (["talker.devices=[0, 1]", "talker.replicas=1"], "talker.replicas", "must be a multiple of the number of dev"),
        (["thinker.devices=[0, 1]"], "thinker.engine", "must be vllm for a replica over 2 devices, got 'auto'"),
        (["thinker.vllm_args=x"], "thinker.vllm_args", "must be a mapping of vLLM's engine arguments, got 'x'"),
        (
            ["thinker.vllm_args.tensor_parallel_size=2"],
            "thinker.vllm_args.tensor_parallel_size",
            "must be 1, the devices of a replica, or left out, got 2",
        ),
    ],
)
def test_a_wrong_override_is_named(overrides: list[str], field: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        deployment("two-gpus", machine(2), *overrides)
    assert raised.value.field == field
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("talkr: {}", "talkr", "is not known; did you mean 'talker'?"),
        ("talker: 5", "talker", "must be a mapping, got 5"),
        ("- talker", "", "must be a mapping with the keys thinker, talker"),
        ("talker: {max_sessions: 4", "--profile", "cannot be read"),
        ("platforms: {cdua: {}}", "platforms.cdua", "is not known; did you mean 'cuda'?"),
        ("platforms: {cuda: {talkr: {}}}", "platforms.cuda.talkr", "is not known; did you mean 'talker'?"),
        ("talker: {max_sessions: {a: 1}}", "talker: parameter max_sessions", "must be an integer"),
        ("talker: {2: 1}", "talker", "must be a mapping"),
    ],
)
def test_a_wrong_file_is_named(text: str, field: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        deployment(str(path), machine(2))
    assert (raised.value.field or "").endswith(field or str(path))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two-gpu", "did you mean 'two-gpus'? Known: cpu-demo, "),
        ("missing/mine.yaml", "missing/mine.yaml does not exist"),
    ],
)
def test_a_profile_that_is_not_there(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Profile.load(name, "cuda")
    assert raised.value.field == "--profile"
    assert message in str(raised.value)


def test_dry_run_prints_what_would_be_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "detect", lambda: machine(2))
    assert main(["--dry-run", "--profile", "two-gpus", "--set", "talker.max_sessions=5"]) == 0
    printed = capsys.readouterr().out
    assert "instances: talker_0 KIND_GPU gpu 1\n" in printed
    assert "max_sessions = 5\n" in printed
    assert main(["--dry-run", "--profile", "two-gpus", "--set", "talker.max_sesions=5"]) == 1


def test_render_writes_what_a_bare_tritonserver_would_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(Machine, "detect", lambda: machine(1))
    target = tmp_path / "new" / "repository"
    assert main(["--render", str(target), "--profile", "one-gpu", "--set", "talker.max_sessions=5"]) == 0
    assert values(read_config(target / "talker"))["max_sessions"] == "5"
    assert json.loads(values(read_config(target / "thinker"))["vllm_args"])["gpu_memory_utilization"] == 0.72
    assert (target / "omni_bls" / "1" / "model.py").is_file()
    kept = sorted(target.rglob("*"))
    assert main(["--render", str(target), "--profile", "one-gpu"]) == 1
    assert f"--render: {target} exists already" in caplog.text
    assert sorted(target.rglob("*")) == kept


def test_checking_a_profile_does_not_wait_for_torch() -> None:
    code = "import sys; from triton_omni.serve.main import main; main(['--dry-run']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        (("omni_bls.request_timeout_s=900",), "max_sequence_idle_microseconds of talker's config.pbtxt"),
        (("code2wav.idle_timeout_s=300",), "code2wav.idle_timeout_s"),
        (("omni_bls.request_timeout_s=100", "code2wav.idle_timeout_s=100"), "code2wav.idle_timeout_s"),
    ],
)
def test_a_request_must_not_outlive_its_sessions(overrides: tuple[str, ...], limit: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"must be below .* s, the {limit}") as caught:
        rendered("cpu-demo", machine(0), tmp_path, *overrides)
    assert caught.value.field == "omni_bls.request_timeout_s"


class TestMemory:
    """At the shape of the published model."""

    @pytest.fixture
    def published(self, tmp_path: Path) -> Path:
        pytest.importorskip("triton")
        shutil.copy(SHAPE, tmp_path / "config.json")
        return tmp_path

    @pytest.mark.parametrize(
        ("name", "count", "gib"),
        [("one-gpu", 1, 94), ("two-gpus", 2, 80), ("three-gpus", 3, 80), ("thinker-tp2", 2, 80)],
    )
    def test_a_shipped_profile_fits_the_cards_that_it_names(
        self, published: Path, name: str, count: int, gib: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level("INFO"):
            deployment(name, machine(count, gib=gib)).check_memory(published)
        assert f"of {gib}.0 GiB" in caplog.text

    def test_what_does_not_fit_is_added_up(self, published: Path) -> None:
        too_much = "thinker.vllm_args.gpu_memory_utilization=0.9"
        with pytest.raises(ConfigError, match=r"thinker 126\.9 GiB \+ talker 1\d\.\d GiB \+ code2wav .* of 141\.0 GiB"):
            deployment("one-gpu", machine(1), too_much).check_memory(published)

    def test_more_sessions_need_more(self, published: Path) -> None:
        deployment("one-gpu", machine(1), "talker.max_sessions=256").check_memory(published)
        with pytest.raises(ConfigError, match=r"lower .*max_sessions"):
            deployment("one-gpu", machine(1), "talker.max_sessions=600").check_memory(published)

    def test_a_thinker_that_shares_must_be_told_how_much(self, published: Path) -> None:
        with pytest.raises(ConfigError, match="must be given, above 0 and at most 1"):
            deployment("one-gpu", machine(1), "thinker.vllm_args.gpu_memory_utilization=").check_memory(published)
