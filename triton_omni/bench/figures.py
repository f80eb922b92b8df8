"""From records to the figures of one level of load. ``DEFINITIONS`` says what each is; times and sums are exact."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from triton_omni.bench.record import Record

# vLLM-Omni calls an answer continuous when its underrun stays at or below this.
CONTINUITY_THRESHOLD_S = 0.1
DEFINITIONS = """\
All times are the client's, from the moment a request is sent; means and percentiles are over completed requests
(percentiles interpolate linearly). As vLLM-Omni's benchmark defines them:
  ttft       arrival of the first event that brings text
  tpot       mean gap between text tokens after that event (tokens of one event share its gap)
  ttfp       arrival of the first piece of audio
  rtf        arrival of the last piece of audio / seconds of audio (its audio_rtf)
  e2e        arrival of the last event before the end of the stream
  req/s      completed requests / wall time, from the first request sent to the end of the last; so is audio s/s
  underrun   deepest deficit of a player that starts with the first piece and whose clock never stops (its
             audio_underrun); "audible": requests in which it exceeds 0.1 s
Ours:
  stalls     requests in which a player that starts with the first piece has to wait at least once (underruns in a row),
             and for how long in all; such a player waits for the next piece, then goes on
  gap        time between two pieces of audio of one answer, over all of them
  failed     no 200, an error in the stream, a stream without its end, or without the text or audio that was asked for
  client     CPU time / wall time of the busiest client process: near 1 the client itself limits what is measured"""


@dataclasses.dataclass(frozen=True, slots=True)
class Playback:
    """What two players would have done; see DEFINITIONS. ``gaps_s``: between neighbouring pieces."""

    stalls: int
    stalled_s: float
    underrun_s: float
    gaps_s: tuple[float, ...]


def playback(audio: Sequence[tuple[float, float]]) -> Playback:
    """``audio``: (arrival, length) of each piece, in seconds."""
    stalls, stalled_s, underrun_s, gaps_s = 0, 0.0, 0.0, []
    first_s = last_s = empty_s = audio[0][0] if audio else 0.0
    received_s = 0.0
    for index, (now_s, length_s) in enumerate(audio):
        if index:
            gaps_s.append(now_s - last_s)
            underrun_s = max(underrun_s, now_s - first_s - received_s)
            if now_s > empty_s + 1e-9:
                stalls += 1
                stalled_s += now_s - empty_s
                empty_s = now_s
        empty_s += length_s
        received_s += length_s
        last_s = now_s
    return Playback(stalls, stalled_s, underrun_s, tuple(gaps_s))


def spread(name: str, unit: str, values: Sequence[float], scale: float = 1.0) -> dict[str, float | None]:
    """Mean under ``name + unit``, p50, p95 and p99 under ``name_p50 + unit`` …; None where there is no value."""
    keys = (f"{name}{unit}", *(f"{name}_p{q}{unit}" for q in (50, 95, 99)))
    if not values:
        return dict.fromkeys(keys)
    scaled = np.asarray(values, dtype=np.float64) * scale
    return dict(zip(keys, (float(scaled.mean()), *map(float, np.percentile(scaled, (50, 95, 99)))), strict=True))


def tpot_s(record: Record) -> float | None:
    """None with less than two events of text."""
    if len(record.text) < 2:
        return None
    return (record.text[-1][0] - record.text[0][0]) / sum(tokens for _, tokens in record.text[1:])


def figures(records: Sequence[Record]) -> dict[str, Any]:
    """Of one level, whose warm-ups are not among ``records``. Times in ms unless their name says otherwise."""
    good = [record for record in records if record.error is None]
    spoken = [record for record in good if record.audio]
    plays = [playback(record.audio) for record in spoken]
    wall_s = max(r.end_s for r in records) - min(r.sent_s for r in records) if records else 0.0

    def rate(total: float) -> float:
        return total / wall_s if wall_s else 0.0

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values) if values else 0.0

    return {
        "completed": len(good),
        "failed": len(records) - len(good),
        "wall_s": wall_s,
        "req_s": rate(len(good)),
        "audio_s_per_s": rate(sum(r.audio_s for r in spoken)),
        "text_tokens_per_s": rate(sum(r.text_tokens for r in good)),
        "chunks_per_s": rate(sum(len(r.text) + len(r.audio) for r in good)),
        "prompt_tokens": mean([r.prompt_tokens for r in good]),
        "text_tokens": mean([r.text_tokens for r in good]),
        "text_chunks": mean([len(r.text) for r in good]),
        "audio_s": mean([r.audio_s for r in spoken]),
        "audio_chunks": mean([len(r.audio) for r in spoken]),
        **spread("ttft", "_ms", [r.text[0][0] for r in good if r.text], 1e3),
        **spread("tpot", "_ms", [t for r in good if (t := tpot_s(r)) is not None], 1e3),
        **spread("ttfp", "_ms", [r.audio[0][0] for r in spoken], 1e3),
        **spread("e2e", "_ms", [r.e2e_s for r in good], 1e3),
        **spread("rtf", "", [r.audio[-1][0] / r.audio_s for r in spoken]),
        **spread("gap", "_ms", [gap_s for play in plays for gap_s in play.gaps_s], 1e3),
        "gap_max_ms": max((1e3 * gap_s for play in plays for gap_s in play.gaps_s), default=None),
        **spread("underrun", "_ms", [play.underrun_s for play in plays], 1e3),
        "audible_underruns": sum(play.underrun_s > CONTINUITY_THRESHOLD_S for play in plays),
        "underruns": sum(play.stalls > 0 for play in plays),
        "stalls": sum(play.stalls for play in plays),
        "stalled_s": sum(play.stalled_s for play in plays),
        "sent_late_max_ms": max((1e3 * r.late_s for r in records), default=0.0),
        "errors": dict(Counter(r.error for r in records if r.error is not None)),
    }
