"""From a profile's name to the model repository that a server loads."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from triton_omni.code2wav.config import Code2WavConfig
from triton_omni.errors import ConfigError
from triton_omni.pipeline.pipeline import PipelineConfig
from triton_omni.serve.layout import StageLayout, lay_out
from triton_omni.serve.machine import Machine
from triton_omni.serve.profile import Profile, default_name
from triton_omni.serve.repository import CONFIG, read_config, render

logger = logging.getLogger(__name__)
DEMO_PROFILE = "cpu-demo"


@dataclasses.dataclass(frozen=True, slots=True)
class Deployment:
    """A profile laid out on this machine."""

    machine: Machine
    profile: Profile
    layouts: Mapping[str, StageLayout]

    @classmethod
    def choose(cls, name: str | None, overrides: Sequence[str], *, demo: bool) -> Deployment:
        """``name`` None: the shipped profile for the number of devices; the demo checkpoint needs none of them.

        Raises: ConfigError.
        """
        machine = Machine.detect()
        chosen = name or (DEMO_PROFILE if demo else default_name(machine))
        profile = Profile.load(chosen, machine.platform, overrides)
        logger.info("%s; profile %s%s", machine, profile.name, "" if name else " (chosen by what is there)")
        return cls(machine, profile, lay_out(profile, machine))

    def check_memory(self, checkpoint: Path) -> None:
        """Raises ConfigError when stages that share a GPU do not fit on it together."""
        if self.machine.platform == "cuda":
            from triton_omni.serve.memory import check_memory  # late: it loads torch

            for line in check_memory(self.layouts, self.machine, checkpoint):
                logger.info("%s", line)

    def render(self, source: Path, target: Path) -> Path:
        """The model repository, in place of what ``target`` holds from an earlier start. Raises ConfigError."""
        shutil.rmtree(target, ignore_errors=True)
        render(
            source,
            target,
            {stage: layout.parameters for stage, layout in self.layouts.items()},
            {stage: layout.replicas for stage, layout in self.layouts.items() if layout.replicas is not None},
        )
        _check_timeouts(target)
        if self.layouts["code2wav"].config is not None:  # the null engine has room for all
            _check_places(target)
        return target

    def describe(self, repository: Path) -> str:
        """The merged profile, and what Triton gets of it."""
        parts = [f"# {self.machine}", f"# {self.profile.path}", str(self.profile)]
        for stage in self.layouts:
            config = read_config(repository / stage)
            groups = ", ".join(
                f"{group.name} {group.Kind.Name(group.kind)}" + (f" gpu {group.gpus[0]}" if group.gpus else "")
                for group in config.instance_group
            )
            values = [f"{key} = {parameter.string_value}" for key, parameter in sorted(config.parameters.items())]
            parts.append("\n".join([f"\n# {stage}/{CONFIG}", f"instances: {groups}", *values]))
        return "\n".join(parts)


def _check_timeouts(repository: Path) -> None:
    """No session may be taken for a forgotten one while its request can still run."""
    omni_bls = _parameters(repository, "omni_bls")
    timeout_s = float(omni_bls.get("request_timeout_s", PipelineConfig().request_timeout_s))
    for stage in ("talker", "code2wav"):
        idle_s = read_config(repository / stage).sequence_batching.max_sequence_idle_microseconds / 1e6
        _check_below(timeout_s, idle_s, f"max_sequence_idle_microseconds of {stage}'s {CONFIG}")
    idle_s = float(_parameters(repository, "code2wav").get("idle_timeout_s", Code2WavConfig().idle_timeout_s))
    _check_below(timeout_s, idle_s, "code2wav.idle_timeout_s")


def _check_places(repository: Path) -> None:
    """Each request that runs may have a session in code2wav, where nobody waits for a place."""
    instances = sum(group.count for group in read_config(repository / "omni_bls").instance_group)
    each = int(_parameters(repository, "omni_bls").get("max_requests", PipelineConfig().max_requests))
    places = int(_parameters(repository, "code2wav").get("max_sessions", Code2WavConfig().max_sessions))
    if places < instances * each:
        logger.warning(
            "code2wav.max_sessions is %d, and omni_bls runs up to %d requests: with more than %d answers that speak at "
            "once some end with a 429",
            *(places, instances * each, places),
        )


def _parameters(repository: Path, stage: str) -> dict[str, str]:
    parameters = read_config(repository / stage).parameters
    return {key: parameter.string_value for key, parameter in parameters.items()}


def _check_below(timeout_s: float, idle_s: float, what: str) -> None:
    if timeout_s >= idle_s:
        raise ConfigError(
            f"must be below {idle_s:g} s, the {what}, after which a session counts as forgotten, got {timeout_s:g}",
            field="omni_bls.request_timeout_s",
        )
