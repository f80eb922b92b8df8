#!/usr/bin/env python3
"""Measures everything around the models: omni_bls over null engines, beside a bare chain of the same messages.

    scripts/bench_plumbing.py                                        # about five minutes; no GPU, no weights
    scripts/bench_plumbing.py --concurrency 64 --bls-instances 1 2 4 # the same for several numbers of instances

A tritonserver serves both: the four models with null engines, and bare_chain/model.py, whose BLS hands on the same
pieces without doing anything else. Rounds of the two take turns. A request is a prompt of 60 tokens, 40 text tokens
and 149 codec frames; its pieces are the text tokens and the chunks of the plan (8 of the default), whether they come
in responses of their own or several together, as they do when a client or the machine is slow.

chunks/s      pieces that reached the client per second; responses/s counts the responses they came in
hop ms        quarter of the time of an answer of one token: client, omni_bls, thinker, omni_bls, client; one at a time
messages      Triton requests and responses per request, those of all models together
stalled       requests whose player, started with the first audio, ran dry
cpu ms        processor time per request, of tritonserver and of each model's processes
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from bare_chain.repository import ROLES, bare_repository
from tritonclient.grpc import service_pb2, service_pb2_grpc

from triton_omni.bench import report
from triton_omni.bench.figures import playback
from triton_omni.model_config import SAMPLE_RATE_HZ
from triton_omni.pipeline.chunk_policy import DEFAULT_CHUNK_FRAMES, ChunkPlan
from triton_omni.serve.processes import model_stubs
from triton_omni.serve.repository import render
from triton_omni.serve.tritonserver import TritonServer

ROOT = Path(__file__).resolve().parents[1]
PROMPT_TOKENS, TEXT_TOKENS, FRAMES = 60, 40, 149
FRAME_SAMPLES, LOOK_AHEAD_SAMPLES = 1920, 555
PLANS = (DEFAULT_CHUNK_FRAMES, (4, 25))
METRICS_PERIOD_S = 0.25
HOPS = 4
ANSWER_TIMEOUT_S = 120
DTYPES = {np.dtype(np.float32): "FP32", np.dtype(np.int32): "INT32"}


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """How fast the null engines, and the sources of the bare chain, are."""

    prefill_ms: float
    token_ms: float
    frame_ms: float

    def frame_due_ms(self, frame: int) -> float:
        """When frame ``frame`` (from 1) is there: it needs the text token of its number, and the frames before it."""
        with_text = min(frame, TEXT_TOKENS)
        return self.prefill_ms + with_text * max(self.token_ms, self.frame_ms) + (frame - with_text) * self.frame_ms


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What one request brought, and when: milliseconds from the request; ``responses`` that carried something;
    ``stalled``: a player that starts with the first audio ran dry.
    """

    text_tokens: int
    samples: int
    responses: int
    first_text_ms: float
    first_audio_ms: float
    total_ms: float
    stalled: bool


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """One of the two sides: how a request of it looks, and how many text tokens a response holds."""

    name: str
    processes: tuple[str, ...]
    request: Callable[[int, tuple[int, ...]], Any]
    text_tokens: Callable[[bytes], int]
    look_ahead_samples: int

    def check(self, answer: Answer, tokens: int, frames: int) -> None:
        samples = max(0, frames * FRAME_SAMPLES - self.look_ahead_samples)
        if (answer.text_tokens, answer.samples) != (tokens, samples):
            raise RuntimeError(
                f"{self.name}: got {answer.text_tokens} tokens and {answer.samples} samples, not {tokens} and {samples}"
            )


def omni_system() -> System:
    prompt = [{"role": "user", "content": "Say something about the sea."}]

    def request(tokens: int, plan: tuple[int, ...]) -> Any:
        speech = {"modalities": ["text", "audio"], "chunk_frames": plan} if plan else {"modalities": ["text"]}
        text = json.dumps({"messages": prompt, "thinker": {"max_tokens": tokens}, **speech}).encode()
        message = service_pb2.ModelInferRequest(model_name="omni_bls")
        message.inputs.add(name="REQUEST", datatype="BYTES", shape=[1])
        message.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
        return message

    return System(
        "omni",
        ("omni_bls", "thinker", "talker", "code2wav"),
        request,
        lambda raw: len(raw[4:].split()),
        LOOK_AHEAD_SAMPLES,
    )


def bare_system(pace: Pace) -> System:
    def request(tokens: int, plan: tuple[int, ...]) -> Any:
        sizes = ChunkPlan(plan).chunks(FRAMES) if plan else []
        borders = np.cumsum(sizes, dtype=np.int32).tolist()
        message = service_pb2.ModelInferRequest(model_name="bare_omni")
        for name, values in (
            ("TEXT_DUE_MS", np.array([pace.prefill_ms + n * pace.token_ms for n in range(tokens)], np.float32)),
            ("TEXT_FRAMES", np.ones(tokens, np.int32)),
            ("CODES_DUE_MS", np.array([pace.frame_due_ms(n) for n in borders], np.float32)),
            ("CODES_FRAMES", np.array(sizes, np.int32)),
        ):
            message.inputs.add(name=name, datatype=DTYPES[values.dtype], shape=values.shape)
            message.raw_input_contents.append(values.tobytes())
        return message

    return System("bare", tuple(ROLES), request, lambda raw: len(raw) // 4, 0)


@contextlib.contextmanager
def serve(options: argparse.Namespace, pace: Pace, instances: int) -> Iterator[TritonServer]:
    null = {"engine": "null"}
    thinker = {f"null_{f.name}": str(getattr(pace, f.name)) for f in dataclasses.fields(pace) if f.name != "frame_ms"}
    thinker |= {"null_answer_tokens": str(TEXT_TOKENS), "null_prompt_tokens": str(PROMPT_TOKENS)}
    talker = {
        "null_frame_ms": str(pace.frame_ms),
        "null_frames_per_token": str(FRAMES / TEXT_TOKENS),
        "max_sessions": "64",
    }
    parameters = {"thinker": null | thinker, "talker": null | talker, "code2wav": null}
    with tempfile.TemporaryDirectory() as scratch:
        render(ROOT / "model_repository", Path(scratch) / "omni", parameters, {"omni_bls": instances})
        bare = bare_repository(Path(scratch) / "bare", instances)
        server = TritonServer(
            Path(scratch) / "omni",
            checkpoint=options.checkpoint,
            log_path=options.log or Path(scratch) / "tritonserver.log",
            arguments=[f"--model-repository={bare}"],
        )
        with server:
            server.wait_ready(300)
            yield server


async def ask(stub: Any, system: System, request: Any) -> Answer:
    """Reads for itself, not as a target of triton_omni.bench: the bare chain's responses have no EVENT."""

    async def once() -> AsyncIterator[Any]:
        yield request

    began_s = time.perf_counter()
    tokens = samples = responses = 0
    first_text_ms = 0.0
    heard: list[tuple[float, float]] = []  # when, and how many seconds
    async for message in stub.ModelStreamInfer(once(), timeout=ANSWER_TIMEOUT_S):
        if message.error_message:
            raise RuntimeError(f"{system.name}: {message.error_message}")
        now_ms = (time.perf_counter() - began_s) * 1e3
        response = message.infer_response
        raw = {o.name: data for o, data in zip(response.outputs, response.raw_output_contents, strict=True)}
        text, audio = system.text_tokens(raw.get("TEXT", b"")), len(raw.get("AUDIO", b"")) // 2
        tokens, samples, responses = tokens + text, samples + audio, responses + bool(text or audio)
        first_text_ms = first_text_ms or (now_ms if text else 0.0)
        if audio:
            heard.append((now_ms / 1e3, audio / SAMPLE_RATE_HZ))
    total_ms = (time.perf_counter() - began_s) * 1e3
    first_audio_ms = 1e3 * heard[0][0] if heard else 0.0
    return Answer(tokens, samples, responses, first_text_ms, first_audio_ms, total_ms, playback(heard).stalls > 0)


async def closed_loop(target: str, system: System, request: Any, concurrency: int, count: int) -> list[Answer]:
    """``concurrency`` clients, each of which sends its next request when it has its answer."""
    left = iter(range(count))

    async def client(stub: Any) -> list[Answer]:
        return [await ask(stub, system, request) for _ in left]

    async with grpc.aio.insecure_channel(target, options=[("grpc.max_receive_message_length", -1)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = await asyncio.gather(*(client(stub) for _ in range(concurrency)))
    return [answer for each in answers for answer in each]


def cpu_s(server: TritonServer) -> collections.Counter[str]:
    """Processor seconds so far: of tritonserver, of the processes of each model, and of this process."""
    ticks = os.sysconf("SC_CLK_TCK")
    pids = {stub.pid: re.findall(r"'(.*)'", stub.name)[0] for stub in model_stubs(server.pid)}
    spent: collections.Counter[str] = collections.Counter()
    for pid, name in {**pids, server.pid: "tritonserver", os.getpid(): "client"}.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent[name] += (int(fields[11]) + int(fields[12])) / ticks
    return spent


def messages(server: TritonServer) -> float:
    """Of the project's models so far. They tell their counts four times a second, so it is read until it stays."""
    counts: list[float] = []
    while len(counts) < 2 or counts[-1] != counts[-2]:
        if counts:
            time.sleep(3 * METRICS_PERIOD_S)
        text = urllib.request.urlopen(server.metrics_url, timeout=60).read().decode()
        counts.append(sum(float(n) for n in re.findall(r"^omni_messages_total\{.*\} (\S+)$", text, re.MULTILINE)))
    return counts[-1]


class Round:
    """One closed loop of one system, and what it cost."""

    def __init__(
        self, server: TritonServer, system: System, plan: tuple[int, ...], concurrency: int, count: int
    ) -> None:
        request = system.request(TEXT_TOKENS, plan)
        messages_before, cpu_before = messages(server), cpu_s(server)
        began_s = time.perf_counter()
        self.answers = asyncio.run(closed_loop(server.grpc_target, system, request, concurrency, count))
        self.wall_s = time.perf_counter() - began_s
        self.cpu_s = cpu_s(server)
        self.cpu_s.subtract(cpu_before)
        self.messages = messages(server) - messages_before
        for answer in self.answers:
            system.check(answer, TEXT_TOKENS, FRAMES)


def hop_ms(server: TritonServer, system: System, count: int) -> float:
    answers = asyncio.run(closed_loop(server.grpc_target, system, system.request(1, ()), 1, count))
    for answer in answers:
        system.check(answer, 1, 0)
    return statistics.median(answer.first_text_ms for answer in answers) / HOPS


def row(system: System, plan: tuple[int, ...], concurrency: int, rounds: Sequence[Round]) -> dict[str, Any]:
    answers = [answer for each in rounds for answer in each.answers]
    wall_s = sum(each.wall_s for each in rounds)
    sizes = ChunkPlan(plan).chunks(FRAMES)
    pieces = TEXT_TOKENS + len(sizes)
    bare_messages = 2 * (1 + len(sizes)) + 2 * (TEXT_TOKENS + len(sizes)) + 1
    spent = sum((each.cpu_s for each in rounds), collections.Counter())
    cpu = {name: round(1e3 * spent[name] / len(answers), 2) for name in (*system.processes, "tritonserver", "client")}
    counted = sum(each.messages for each in rounds) / len(answers) if system.name == "omni" else bare_messages
    totals = [answer.total_ms for answer in answers]
    return {
        "system": system.name,
        "chunk_frames": list(plan),
        "concurrency": concurrency,
        "requests": len(answers),
        "req_s": round(len(answers) / wall_s, 2),
        "chunks_per_s": round(len(answers) * pieces / wall_s, 1),
        "responses_per_s": round(sum(answer.responses for answer in answers) / wall_s, 1),
        "messages_per_request": round(counted, 1),
        "ttft_ms": round(statistics.fmean(answer.first_text_ms for answer in answers), 2),
        "ttfp_ms": round(statistics.fmean(answer.first_audio_ms for answer in answers), 2),
        "e2e_ms": round(statistics.fmean(totals), 2),
        "e2e_p99_ms": round(float(np.percentile(totals, 99)), 2),
        "stalled_requests": sum(answer.stalled for answer in answers),
        "cpu_ms_per_request": cpu,
    }


def measure(options: argparse.Namespace, instances: int) -> list[dict[str, Any]]:
    pace = Pace(options.prefill_ms, options.token_ms, options.frame_ms)
    systems = (omni_system(), bare_system(pace))
    rows = []
    with serve(options, pace, instances) as server:
        for system in systems:  # imports, first allocations, growth of shared memory
            Round(server, system, PLANS[0], max(options.concurrency), 2 * max(options.concurrency))
        hops = {system.name: round(hop_ms(server, system, options.hop_requests), 3) for system in systems}
        for plan in options.plans:
            for concurrency in options.concurrency:
                count = max(options.requests, options.waves * concurrency)
                rounds: dict[str, list[Round]] = {system.name: [] for system in systems}
                for _ in range(options.rounds):
                    for system in systems:
                        rounds[system.name].append(Round(server, system, plan, concurrency, count))
                pair = {s.name: row(s, plan, concurrency, rounds[s.name]) for s in systems}
                share = pair["omni"]["chunks_per_s"] / pair["bare"]["chunks_per_s"]
                pair["omni"]["share_of_bare"] = round(share, 3)
                for one in pair.values():
                    rows.append(one | {"bls_instances": instances, "hop_ms": hops[one["system"]]})
                    show(rows[-1])
    return rows


COLUMNS = ("system", "bls_instances", "concurrency", "req_s", "chunks_per_s", "responses_per_s", "share_of_bare")
COLUMNS += ("messages_per_request", "hop_ms", "ttft_ms", "ttfp_ms", "e2e_ms", "stalled_requests")


def show(one: dict[str, Any]) -> None:
    cpu = " ".join(f"{name} {ms:.1f}" for name, ms in one["cpu_ms_per_request"].items())
    plan = ",".join(map(str, one["chunk_frames"]))
    print(
        f"{plan:10}", *(f"{one.get(name, ''):>9}" for name in COLUMNS), f" cpu ms: {cpu}", file=sys.stderr, flush=True
    )


def main() -> None:
    options = arguments()
    load_before = round(os.getloadavg()[0], 1)
    print("plan", *COLUMNS, file=sys.stderr)
    rows = [one for instances in options.bls_instances for one in measure(options, instances)]
    about = {
        "command": shlex.join(["scripts/bench_plumbing.py", *_measured(sys.argv[1:])]),
        "commit": options.commit,
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "python": sys.version.split()[0],
            "load_before": load_before,  # runnable threads: beside an idle machine's 0, what the rows shared it with
            "load_after": round(os.getloadavg()[0], 1),
        },
        "pace_ms": {"prefill": options.prefill_ms, "token": options.token_ms, "frame": options.frame_ms},
    }
    text = json.dumps(about | {"rows": rows}, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "checkpoints" / "demo", help="for its config alone")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--bls-instances", type=int, nargs="+", default=[2])
    parser.add_argument("--plans", type=_plan, nargs="+", default=PLANS, help="chunk plans: 4,8,16,25 4,25")
    parser.add_argument("--requests", type=int, default=32, help="of a round, at least")
    parser.add_argument("--waves", type=int, default=4, help="requests of a round per client, at least")
    parser.add_argument("--hop-requests", type=int, default=50, help="one-token answers that hop ms is the median of")
    parser.add_argument("--rounds", type=int, default=2, help="of each system; the two take turns")
    parser.add_argument("--prefill-ms", type=float, default=0.0)
    parser.add_argument("--token-ms", type=float, default=2.0)
    parser.add_argument("--frame-ms", type=float, default=0.5)
    parser.add_argument("--log", type=Path, help="tritonserver's log")
    parser.add_argument("--commit", default=report.commit())
    parser.add_argument("--out", type=Path, help="JSON file, written anew; without it the rows go to stdout")
    return parser.parse_args()


def _measured(words: Sequence[str]) -> list[str]:
    """Without the options that name files and nothing of what is measured."""
    left_out = {"--log", "--out", "--checkpoint", "--commit"}
    told = zip(("", *words), words, strict=False)
    return [word for before, word in told if not {before, word.partition("=")[0]} & left_out]


def _plan(text: str) -> tuple[int, ...]:
    return ChunkPlan(tuple(int(size) for size in text.split(","))).frames


if __name__ == "__main__":
    main()
