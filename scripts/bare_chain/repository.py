"""The model repository of the bare chain."""

from __future__ import annotations

from pathlib import Path

MODEL = Path(__file__).resolve().with_name("model.py")
ROLES = {"bare_omni": "omni", "bare_text": "source", "bare_codes": "source", "bare_audio": "audio"}
_INPUTS = {
    "omni": ("TEXT_DUE_MS FP32 -1", "TEXT_FRAMES INT32 -1", "CODES_DUE_MS FP32 -1", "CODES_FRAMES INT32 -1"),
    "source": ("DUE_MS FP32 -1", "FRAMES INT32 -1"),
    "audio": ("CODES INT32 -1,-1",),
}
_OUTPUTS = {
    "omni": ("TEXT INT32 -1,-1", "AUDIO INT16 -1,-1"),
    "source": ("CODES INT32 -1,-1",),
    "audio": ("AUDIO INT16 -1",),
}


def bare_repository(target: Path, instances: int) -> Path:
    """Written into ``target``: four models that hand on pieces and do nothing else."""
    for model, role in ROLES.items():
        (target / model / "1").mkdir(parents=True)
        (target / model / "1" / "model.py").symlink_to(MODEL)
        batched = "max_batch_size: 64 dynamic_batching {}" if role == "audio" else "max_batch_size: 0"
        lines = ['backend: "python"', batched, "model_transaction_policy { decoupled: true }"]
        for kind, tensors in (("input", _INPUTS[role]), ("output", _OUTPUTS[role])):
            for name, dtype, dims in (tensor.split() for tensor in tensors):
                ragged = " allow_ragged_batch: true" if (kind, role) == ("input", "audio") else ""
                lines.append(f'{kind} {{ name: "{name}" data_type: TYPE_{dtype} dims: [ {dims} ]{ragged} }}')
        lines.append(f"instance_group {{ kind: KIND_CPU count: {instances if role == 'omni' else 1} }}")
        lines.append(f'parameters {{ key: "role" value: {{ string_value: "{role}" }} }}')
        (target / model / "config.pbtxt").write_text("\n".join(lines) + "\n")
    return target
