"""Sessions that all come at once, and again once they have ended: how long each waits for its first codes."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import numpy as np

from triton_omni.bench.figures import playback
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import NO_IDS, Int32, TalkerStart
from triton_omni.talker.config import TalkerConfig
from triton_omni.talker.engine import LocalTalkerEngine
from triton_omni.talker.measure.sessions import FRAME_S, TEXT_TOKENS, Listener, Row, start_of
from triton_omni.talker.session import Phase, Session


@dataclasses.dataclass(frozen=True, slots=True)
class Burst:
    """``sessions`` come within ``spread_s``, each with a prompt of ``rows`` rows; every one that has said its
    ``frames`` frames is followed by the next, ``rounds`` in turn. The thinker has a token for each every ``token_s``,
    the first one ``lead_s`` after the prompt.
    """

    sessions: int
    rounds: int
    rows: int
    frames: int
    spread_s: float
    chunk_frames: tuple[int, ...]
    token_s: float = 0.0108
    lead_s: float = 0.0


class BurstEngine(LocalTalkerEngine):
    """Notes for how long a frame was waited for: from the frame before it, or from its text if that came later."""

    def __init__(self, runner: Any, config: TalkerConfig) -> None:
        self._ready_s: dict[str, float] = {}
        self.waited_s: list[float] = []
        super().__init__(runner, config)

    def append(self, session_id: str, token_ids: Int32, text_finished: bool) -> None:
        with self._changed:
            session = self._sessions.get(session_id)
            if session is not None and session.frames and not session.text.has_next:
                self._ready_s[session_id] = time.perf_counter()
        super().append(session_id, token_ids, text_finished)

    def _hand_out(self, sessions: list[Session], frames: Int32) -> None:
        now_s = time.perf_counter()
        for session in sessions:
            ready_s = self._ready_s.get(session.session_id)
            if ready_s is not None and session.phase is not Phase.ENDED:
                self.waited_s.append(now_s - ready_s)
            self._ready_s[session.session_id] = now_s
        super()._hand_out(sessions, frames)


class Player(Listener):
    """A sink that keeps what a player would have got, and when. Its session has so many ``tokens`` of text, and no more
    before ``text_from_s``; it begins with the first.
    """

    def __init__(self, tokens: int, text_from_s: float) -> None:
        super().__init__()
        self.audio: list[tuple[float, float]] = []
        self.tokens, self.text_from_s = tokens, text_from_s

    def __call__(self, event: Any) -> None:
        codes = getattr(event, "codes", ())
        if len(codes):
            self.audio.append((time.perf_counter(), len(codes) * FRAME_S))
        super().__call__(event)


def burst(runner: Any, config: TalkerConfig, model: ModelConfig, given: Burst) -> Row:
    """What ``given`` is like with an engine of ``config``."""
    count = given.sessions * given.rounds
    starts = [start_of(model, given.rows, given.frames, seed=i, chunks=given.chunk_frames) for i in range(count)]
    engine = BurstEngine(runner, config)
    players = _play(engine, starts, given)
    engine.close()
    firsts_ms = [1e3 * (player.first_s - player.began_s) for player in players]
    heard = [playback(player.audio) for player in players]
    return {
        "prefill_chunk": config.prefill_chunk,
        "prefill_chunks_per_step": config.prefill_chunks_per_step,
        "sessions": given.sessions,
        "rounds": given.rounds,
        "prompt_rows": given.rows,
        "frames": given.frames,
        "spread_ms": round(1e3 * given.spread_s),
        "prompt_lead_ms": round(1e3 * given.lead_s),
        "chunk_frames": list(given.chunk_frames),
        "mean_first_chunk_ms": round(statistics.mean(firsts_ms), 1),
        "p99_first_chunk_ms": round(float(np.percentile(firsts_ms, 99)), 1),
        "mean_rtf": round(statistics.mean((p.ended_s - p.began_s) / (given.frames * FRAME_S) for p in players), 4),
        "max_frame_wait_ms": round(1e3 * max(engine.waited_s), 1),
        "stalled_sessions": sum(each.stalls > 0 for each in heard),
        "stalled_ms": round(1e3 * sum(each.stalled_s for each in heard), 1),
    }


def _play(engine: LocalTalkerEngine, starts: list[TalkerStart], given: Burst) -> list[Player]:
    """Run the sessions, at the thinker's ticks: a token for each session that has room for one, and new sessions."""
    due_s = np.zeros(len(starts))
    due_s[: given.sessions] = sorted(np.random.default_rng(0).uniform(0, given.spread_s, given.sessions))
    players: list[Player] = []
    began_s, tick = time.perf_counter(), 0
    while len(players) < len(starts) or not all(player.ended.is_set() for player in players):
        tick_s = tick * given.token_s
        time.sleep(max(0.0, began_s + tick_s - time.perf_counter()))  # the thinker's step
        for i, player in enumerate(players):
            if player.tokens < TEXT_TOKENS and not player.ended.is_set() and player.text_from_s <= tick_s:
                if not player.tokens:
                    player.began_s = time.perf_counter()
                player.tokens += 1
                engine.append(str(i), np.array([20 + player.tokens], np.int32), player.tokens == TEXT_TOKENS)
        room = given.sessions - sum(not player.ended.is_set() for player in players)
        for i in range(len(players), min(len(players) + room, len(starts))):
            if due_s[i] > tick_s:
                break
            start = dataclasses.replace(starts[i], token_ids=NO_IDS) if given.lead_s else starts[i]
            players.append(Player(start.token_ids.size, tick_s + given.lead_s))
            engine.start(str(i), start, players[-1])
        tick += 1
    for player in players:
        player.wait()
    return players
