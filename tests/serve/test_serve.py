"""scripts/serve.sh as a newcomer uses it: start, the printed examples, and every way to the end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import wave
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from safetensors.torch import load_file, save_file

from triton_omni.serve.processes import STUB, check_ports_free, child_pids
from triton_omni.serve.reaper import SHARED_MEMORY
from triton_omni.serve.tritonserver import free_ports

pytestmark = [pytest.mark.triton, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
STOP_TIMEOUT_S = 120
LOAD_TIMEOUT_S = 240


@dataclasses.dataclass
class Served:
    """A running serve.sh. ``printed`` is its standard output up to the line that names the logs."""

    process: subprocess.Popen[str]
    ports: list[int]
    stderr_path: Path
    printed: str = ""

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            if line.startswith("# logs:"):
                return
        pytest.fail(f"serve.sh ended with code {self.process.wait()}\n{self.stderr}")

    def example(self, language: str) -> str:
        """The lines below the printed heading of ``language``."""
        return self.printed.split(f"# {language}")[1].split("\n", 1)[1].split("\n# ")[0]

    def processes(self) -> dict[int, str]:
        """Process id -> program of everything that runs below serve.sh, itself included."""
        found = [self.process.pid]
        for pid in found:
            found.extend(child_pids(pid))
        return {pid: command for pid in found if (command := program(pid))}

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)


def program(pid: int) -> str:
    """The command line with spaces, empty when the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ").strip()
    return ""


def shared_memory(processes: dict[int, str]) -> set[Path]:
    """The blocks that the stubs among ``processes`` were given."""
    commands = [command.split() for command in processes.values()]
    return {SHARED_MEMORY / words[2] for words in commands if words[0].endswith(STUB) and len(words) > 2}


def assert_nothing_left(served: Served, processes: dict[int, str], blocks: set[Path]) -> None:
    assert {pid: command for pid, command in processes.items() if program(pid) == command} == {}
    assert {block for block in blocks if block.exists()} == set()
    check_ports_free([(f"port {i}", "127.0.0.1", port) for i, port in enumerate(served.ports)])


def arguments(checkpoint: Path, ports: list[int], logs: Path) -> list[str]:
    options = ["--port", "--grpc-port", "--http-port", "--metrics-port"]
    pairs = [word for option, port in zip(options, ports, strict=True) for word in (option, str(port))]
    script = str(ROOT / "scripts" / "serve.sh")
    quick = ["--set", "thinker.engine=transformers"]  # vLLM, where it is installed, starts three processes more
    return [script, "--checkpoint", str(checkpoint), "--log-directory", str(logs), *quick, *pairs]


@contextlib.contextmanager
def serving(checkpoint: Path, folder: Path, *options: str) -> Iterator[Served]:
    ports = free_ports(4)
    stderr_path = folder / "stderr"
    with stderr_path.open("w") as stderr:
        process = subprocess.Popen(
            [*arguments(checkpoint, ports, folder / "logs"), *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    with process:
        served = Served(process, ports, stderr_path)
        try:
            yield served
        finally:
            if process.poll() is None:
                served.stop(signal.SIGTERM)


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    with serving(checkpoint, folder, "--set", "code2wav.replicas=2") as served:
        served.wait_ready()
        yield served


def assert_speaks(path: Path) -> None:
    with wave.open(str(path)) as wav:
        assert (wav.getnchannels(), wav.getsampwidth(), wav.getframerate()) == (1, 2, 24_000)
        samples = np.frombuffer(wav.readframes(wav.getnframes()), "<i2") / 32_768
    assert len(samples) >= 4 * 1_920
    assert np.sqrt(np.mean(samples**2)) > 0.01


def test_one_line_says_ready_and_progress_was_visible(served: Served) -> None:
    assert [line for line in served.printed.splitlines() if line.startswith("ready: ")] == served.printed.splitlines()[
        :1
    ]
    for model in ("thinker", "talker", "code2wav", "omni_bls"):
        assert f"loaded {model}" in served.stderr
    assert "warming up" in served.stderr
    assert re.search(
        r"^(cpu|cuda|rocm|xpu): .*; profile [\w-]+ \(chosen by what is there\)$", served.stderr, re.MULTILINE
    )


def test_the_printed_curl_command_writes_speech(served: Served, tmp_path: Path) -> None:
    done = subprocess.run(["bash", "-c", served.example("curl")], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert_speaks(tmp_path / "answer.wav")


def test_the_printed_python_program_writes_speech(served: Served, tmp_path: Path) -> None:
    program_path = tmp_path / "example.py"
    program_path.write_text(served.example("python"))
    done = subprocess.run([sys.executable, str(program_path)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert_speaks(tmp_path / "answer.wav")


def test_a_taken_port_ends_a_second_server_before_anything_starts(
    served: Served, checkpoint: Path, tmp_path: Path
) -> None:
    done = subprocess.run(arguments(checkpoint, served.ports, tmp_path / "logs"), capture_output=True, text=True)
    assert done.returncode == 1
    assert f"port {served.ports[0]} on 127.0.0.1 cannot be taken" in done.stderr
    assert "--port" in done.stderr
    assert not (tmp_path / "logs").exists()


def test_a_killed_replica_is_started_again_and_the_server_goes_on(
    served: Served, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    stubs = [pid for pid, command in served.processes().items() if STUB in command and "/code2wav/" in command]
    assert len(stubs) == 2
    os.kill(stubs[0], signal.SIGKILL)
    eventually(lambda: "is there again" not in served.stderr, within_s=LOAD_TIMEOUT_S)
    assert f"process {stubs[0]}) died, and its sessions with it; replicas of code2wav left: 1" in served.stderr
    test_the_printed_curl_command_writes_speech(served, tmp_path)


def test_ctrl_c_leaves_nothing_behind(served: Served) -> None:
    processes = served.processes()
    blocks = shared_memory(processes)
    assert len(blocks) >= 4 and all(block.exists() for block in blocks)
    os.killpg(served.process.pid, signal.SIGINT)
    assert served.process.wait(STOP_TIMEOUT_S) == 0
    assert_nothing_left(served, processes, blocks)


def without_speech(checkpoint: Path, out: Path) -> Path:
    """``checkpoint`` as the published ones that only write: no talker, no code2wav, and none of their tensors."""
    shutil.copytree(checkpoint, out)
    config = json.loads((out / "config.json").read_text())
    del config["talker_config"], config["code2wav_config"]
    (out / "config.json").write_text(json.dumps({**config, "enable_audio_output": False}))
    for path in out.glob("*.safetensors"):
        tensors = {name: tensor for name, tensor in load_file(path).items() if name.startswith("thinker.")}
        save_file(tensors, path, {"format": "pt"})
    index = json.loads((out / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name.startswith("thinker.")}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


def test_a_checkpoint_without_speech_is_served_and_writes(checkpoint: Path, tmp_path: Path) -> None:
    with serving(without_speech(checkpoint, tmp_path / "writes"), tmp_path) as served:
        served.wait_ready()
        for command in (["bash", "-c", served.example("curl")], [sys.executable, "-c", served.example("python")]):
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()
        with pytest.raises(openai.BadRequestError, match="no speech output"):
            openai.OpenAI(base_url=f"http://127.0.0.1:{served.ports[0]}/v1", api_key="unused").chat.completions.create(
                model="writes", messages=[{"role": "user", "content": "Hi"}], modalities=["text", "audio"]
            )
        with urllib.request.urlopen(f"http://127.0.0.1:{served.ports[0]}/health/probe") as response:
            assert json.load(response)["status"] == "ok"


def test_a_killed_model_ends_everything_with_the_reason(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path) as served:
        served.wait_ready()
        processes = served.processes()
        blocks = shared_memory(processes)
        (talker,) = (pid for pid, command in processes.items() if STUB in command and "/talker/" in command)
        os.kill(talker, signal.SIGKILL)
        assert served.process.wait(STOP_TIMEOUT_S) == 1
        assert f"a process of the model 'talker' (process {talker}) ended by itself" in served.stderr
        assert "last lines of" in served.stderr
        assert_nothing_left(served, processes, blocks)


def test_sigterm_while_models_load_leaves_nothing_behind(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path) as served:
        wait_for_stubs(served)
        processes = served.processes()
        assert served.stop(signal.SIGTERM) == 0
        assert "stopped" in served.stderr
        assert_nothing_left(served, processes, shared_memory(processes))


def wait_for_stubs(served: Served) -> None:
    deadline = time.monotonic() + LOAD_TIMEOUT_S
    while not shared_memory(served.processes()):
        assert served.process.poll() is None and time.monotonic() < deadline, served.stderr
        with contextlib.suppress(subprocess.TimeoutExpired):
            served.process.wait(0.1)


def test_a_killed_supervisor_takes_its_children_with_it(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path) as served:
        wait_for_stubs(served)
        processes = served.processes()
        blocks = shared_memory(processes)
        served.process.kill()
        served.process.wait()
        deadline = time.monotonic() + LOAD_TIMEOUT_S  # tritonserver may end when its models are loaded, not before
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                left_s = max(0.0, deadline - time.monotonic())
                assert select.select([os.pidfd_open(pid)], [], [], left_s)[0], processes[pid]
        assert_nothing_left(served, processes, blocks)
