"""From a profile's name to the model repository that a server loads."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

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
        """The model repository, in place of what ``target`` holds from an earlier start."""
        shutil.rmtree(target, ignore_errors=True)
        return render(
            source,
            target,
            {stage: layout.parameters for stage, layout in self.layouts.items()},
            {stage: layout.replicas for stage, layout in self.layouts.items() if layout.replicas is not None},
        )

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
