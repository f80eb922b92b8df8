"""One long request: what each part of a long answer costs, which must not grow with what was said before."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from triton_omni.bench.command_line import make_target
from triton_omni.bench.figures import figures
from triton_omni.bench.fleet import Fleet
from triton_omni.bench.load import shares
from triton_omni.bench.record import Record
from triton_omni.bench.report import Row
from triton_omni.bench.workload import Workload

WORKLOAD = Workload(prompt_tokens=2500, text_tokens=900, audio_frames=1960)
REQUESTS = 2
# Prompt and frames of one session must fit into its slot.
SETTINGS = ("talker.max_context=6144", "talker.max_sessions=8")
QUARTERS = 4


def measure(work: Workload, url: str, api: str, model: str, timeout_s: float) -> Row:
    """Figures of REQUESTS after one as a warm-up, and ``rtf_by_quarter``: time per second of speech in each quarter of
    an answer, without the time to its first piece.
    """
    target = functools.partial(make_target, api, url, "", timeout_s, work.modalities)
    bodies = [work.body(api, model, prompt) for prompt in work.prompts(1 + REQUESTS)]
    records: list[Record] = []
    with Fleet(target, 1) as fleet:
        cpu = fleet.run(shares(bodies, 1, 1, ()), records.append)
    measured = records[1:]
    quarters = [rtf_by_quarter(record.audio) for record in measured if record.error is None]
    return {
        **figures(measured),
        "failed": sum(record.error is not None for record in records),
        "rtf_by_quarter": [round(sum(part) / len(part), 5) for part in zip(*quarters, strict=True)],
        "requests": REQUESTS,
        "processes": 1,
        "client_cpu": cpu,
    }


def rtf_by_quarter(audio: Sequence[tuple[float, float]]) -> list[float]:
    """``audio``: (arrival, length) of each piece in seconds. A piece belongs to the quarter in which it ends."""
    total_s = sum(length_s for _, length_s in audio)
    spent_s, heard_s = [0.0] * QUARTERS, [0.0] * QUARTERS
    before_s, received_s = audio[0][0], 0.0
    for now_s, length_s in audio:
        received_s += length_s
        quarter = min(QUARTERS - 1, int(QUARTERS * (received_s - 1e-9) / total_s))
        spent_s[quarter] += now_s - before_s
        heard_s[quarter] += length_s
        before_s = now_s
    return [spent / heard if heard else 0.0 for spent, heard in zip(spent_s, heard_s, strict=True)]
