"""What each row of the ablation switches on, as settings of a deploy profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from triton_omni.errors import ConfigError
from triton_omni.options import unknown_key_message
from triton_omni.serve.layout import StageLayout, lay_out
from triton_omni.serve.machine import Machine
from triton_omni.serve.profile import Profile

# Switched off below the row of that name; what the last row leaves alone is the profile's own.
_OFF: Mapping[str, tuple[str, ...]] = {
    "batch": ("thinker.max_num_seqs=1", "talker.max_sessions=1"),
    "cuda_graph": ("thinker.vllm_args.enforce_eager=true", "talker.cuda_graph=false", "code2wav.cuda_graph=false"),
    "async_chunk": ("omni_bls.async_chunk=false",),
    "async_output": ("talker.async_output=false",),
    "replicas": (),
}
NO_BATCH = "no_batch"
ROWS = (NO_BATCH, *_OFF)
PROFILE = "profile"  # what serve.sh makes of it, with nothing switched off or placed elsewhere
OTHER = "vllm_omni"  # not ours: a server that runs already, by the same client


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSettings:
    """What a Triton model is loaded with. ``max_batch`` None: the repository's."""

    layout: StageLayout
    max_batch: int | None = None


def known(names: Sequence[str], variants: Sequence[str] = ()) -> list[str]:
    """``names`` as given, each once. Raises ConfigError for one that is no row and none of ``variants``."""
    every = (OTHER, *ROWS, PROFILE, *variants)
    for name in names:
        if name not in every:
            raise ConfigError(unknown_key_message(name, every), field="--rows")
    return list(dict.fromkeys(names))


def overrides(row: str, machine: Machine) -> list[str]:
    """``stage.key=value`` for ``row``, on top of a profile."""
    at = ROWS.index(row)
    found = [setting for later in ROWS[at + 1 :] for setting in _OFF[later]]
    found += _replicas(len(machine.devices)) if row == "replicas" else _one_of_each(len(machine.devices))
    if len(machine.devices) == 2:
        # One replica will share the thinker's GPU; from the first row on, so that the thinker stays as it is.
        found.append("thinker.vllm_args.gpu_memory_utilization=0.7")
    return found


def _one_of_each(devices: int) -> list[str]:
    """Talker and code2wav together, on the second GPU if there is one."""
    return [f"{stage}.devices=[1]" for stage in ("talker", "code2wav")] if devices > 1 else []


def _replicas(devices: int) -> list[str]:
    """Two of each: on the GPUs that the thinker does not need if there are so many, else beside it."""
    if devices < 2:
        return [f"{stage}.replicas=2" for stage in ("talker", "code2wav")]
    where = "[1,2]" if devices > 2 else "[0,1]"
    return [f"{stage}.devices={where}" for stage in ("talker", "code2wav")]


def settings(row: str, profile: str, given: Sequence[str], machine: Machine) -> dict[str, ModelSettings]:
    """Model -> its settings; ``given`` overrides win. Raises ConfigError."""
    if row == PROFILE:
        return of_profile(profile, given, machine)
    found = of_profile(profile, [*overrides(row, machine), *given], machine)
    batch = {"code2wav": 1} if row == NO_BATCH else {}
    return {model: dataclasses.replace(each, max_batch=batch.get(model)) for model, each in found.items()}


def of_profile(profile: str, given: Sequence[str], machine: Machine) -> dict[str, ModelSettings]:
    """Model -> its settings, of a profile that no row changes."""
    layouts = lay_out(Profile.load(profile, machine.platform, given), machine)
    return {model: ModelSettings(layout) for model, layout in layouts.items()}
