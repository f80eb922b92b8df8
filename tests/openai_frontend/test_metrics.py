"""GET /metrics and /version: what is counted, and what is passed on."""

from __future__ import annotations

import asyncio
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import metadata

import pytest
from prometheus_client.parser import text_string_to_metric_families

from openai_frontend import metrics as metrics_module
from openai_frontend.engine import Delta
from openai_frontend.metrics import Playback
from tests.openai_frontend.conftest import MODEL
from tests.openai_frontend.fakes import END, START, WITHIN_S, FakeEngine, LeavingClient, client_of
from triton_omni.errors import StageError

CHAT = "/v1/chat/completions"
SECOND = bytes(48_000)
SPOKEN = (START, Delta(text="Hi"), Delta(audio=SECOND), Delta(audio=SECOND), END)


def figures(text: str) -> dict[tuple[str, ...], float]:
    """(name without our prefix, label values …) -> value."""
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return {(s.name.removeprefix("omni_frontend_"), *s.labels.values()): s.value for s in samples}


async def figures_of(client):
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return figures(response.text)


@pytest.mark.parametrize(
    ("arrivals", "underrun_s"),
    [
        ([(5.0, 1.0)], 0.0),
        ([(5.0, 1.0), (5.5, 1.0), (6.9, 1.0)], 0.0),
        ([(5.0, 1.0), (6.25, 1.0), (7.25, 1.0)], 0.25),  # late once: what follows is in time for a player that waited
        ([(5.0, 1.0), (6.25, 1.0), (7.75, 1.0)], 0.75),
        ([(5.0, 1.0), (5.0, 3.0), (8.5, 1.0)], 0.0),
    ],
)
def test_playback(arrivals, underrun_s):
    playback = Playback()
    for now_s, length_s in arrivals:
        playback.take(length_s, now_s)
    assert playback.underrun_s == pytest.approx(underrun_s)
    assert playback.length_s == sum(length_s for _, length_s in arrivals)
    assert playback.last_s == arrivals[-1][0]


@pytest.mark.asyncio
async def test_answers(make_app, chat, monkeypatch):
    times = iter([10.0, 10.25, 10.5, 11.0, 12.0, 12.75, 13.0])  # begin; start, text, audio, audio, end; closed
    monkeypatch.setattr(
        metrics_module, "time", type("time", (), {"monotonic": staticmethod(lambda: next(times, 20.0))})
    )
    async with client_of(make_app(FakeEngine(*SPOKEN))) as client:
        monkeypatch.setattr(metrics_module.MetricsMiddleware, "__call__", lambda self, *a: self.app(*a))
        assert (await client.post(CHAT, json=chat(modalities=["audio"]))).status_code == 200
        counted = await figures_of(client)
    assert counted["answers_total", "finished"] == 1
    assert (counted["time_to_first_text_seconds_count",], counted["time_to_first_text_seconds_sum",]) == (1, 0.5)
    assert counted["time_to_first_audio_seconds_sum",] == 1.0
    assert counted["answer_seconds_sum",] == 3.0
    assert counted["real_time_factor_sum",] == 1.0  # two seconds of audio, the last of it after two seconds
    assert counted["playback_underrun_seconds_sum", "finished"] == 0
    assert counted["audio_seconds_total",] == 2
    tokens = {kind: counted["tokens_total", kind] for kind in ("prompt", "text", "audio")}
    assert tokens == {"prompt": 7, "text": 3, "audio": 2}


@pytest.mark.asyncio
async def test_requests_by_endpoint_and_status(make_app, chat):
    async with client_of(make_app(FakeEngine(START, END), api_keys=("k",))) as client:
        key = {"authorization": "Bearer k"}
        await client.post(CHAT, json=chat(), headers=key)
        await client.post(CHAT, json=chat(stream=True), headers=key)
        await client.post(CHAT, json=chat(model="gpt-4o"), headers=key)
        await client.post(CHAT, json=chat())
        await client.get(f"/v1/models/{MODEL}", headers=key)
        await client.get("/openapi.json")
        for number in range(3):
            await client.get(f"/v1/nothing/{number}", headers=key)
        counted = await figures_of(client)
    requests = {key[1:]: value for key, value in counted.items() if key[0] == "requests_total"}
    assert requests == {
        (CHAT, "200"): 2,
        (CHAT, "404"): 1,
        (CHAT, "401"): 1,
        ("/v1/models/{model_id:path}", "200"): 1,
        ("/openapi.json", "200"): 1,
        ("other", "404"): 3,
    }
    assert counted["request_seconds_count", CHAT] == 4
    assert counted["requests_in_flight",] == 1  # the one that asks


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_aborted_answers(make_app, chat, stream):
    engine = FakeEngine(START, Delta(audio=SECOND), asyncio.Event(), END)
    app = make_app(engine)
    leaving = LeavingClient(app, chat(stream=stream, modalities=["audio"]))
    async with asyncio.timeout(WITHIN_S), client_of(app) as client:
        await engine.waits.wait()
        assert (await figures_of(client))["requests_in_flight",] == 2
        leaving.leave()
        await leaving.done
        counted = await figures_of(client)
    assert (counted["answers_total", "aborted"], counted["answers_total", "finished"]) == (1, 0)
    assert counted["playback_underrun_seconds_count", "aborted"] == 1  # else only survivors would count
    assert counted["answer_seconds_count",] == 0
    assert counted["requests_in_flight",] == 1


@pytest.mark.asyncio
async def test_failed_answers(make_app, chat):
    async with client_of(make_app(FakeEngine(START, StageError("talker", "gone")))) as client:
        assert (await client.post(CHAT, json=chat())).status_code == 500
        counted = await figures_of(client)
    assert (counted["answers_total", "failed"], counted["answers_total", "aborted"]) == (1, 0)
    assert counted["requests_total", CHAT, "500"] == 1


@pytest.mark.asyncio
async def test_a_client_that_leaves_after_the_last_event_has_aborted_nothing(make_app, chat):
    async with client_of(make_app(FakeEngine(START, END))) as client:
        await client.post("/v1/audio/speech", json={"model": MODEL, "input": "x", "response_format": "pcm"})
        counted = await figures_of(client)
    assert (counted["answers_total", "finished"], counted["answers_total", "aborted"]) == (1, 0)


@pytest.fixture
def tritons_metrics() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'# TYPE nv_inference_count counter\nnv_inference_count{model="talker"} 3\n')

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()
        thread.join()


@pytest.mark.asyncio
async def test_tritons_own_metrics_are_passed_on(make_app, tritons_metrics, monkeypatch):
    monkeypatch.setattr(metrics_module, "TRITON_TIMEOUT_S", WITHIN_S)
    async with client_of(make_app(FakeEngine(), triton_metrics_url=tritons_metrics)) as client:
        counted = await figures_of(client)
    assert counted["nv_inference_count_total", "talker"] == 3
    assert ("requests_in_flight",) in counted


@pytest.mark.asyncio
async def test_without_triton_the_frontends_own_are_there(make_app):
    async with client_of(make_app(FakeEngine(), triton_metrics_url="http://127.0.0.1:1/metrics")) as client:
        response = await client.get("/metrics")
    assert "# tritonserver's metrics at http://127.0.0.1:1/metrics cannot be read" in response.text
    assert ("requests_in_flight",) in figures(response.text)


@pytest.mark.asyncio
async def test_version(make_app):
    async with client_of(make_app(FakeEngine())) as client:
        assert (await client.get("/version")).json() == {"version": metadata.version("triton-omni")}


def test_workers_figures_come_together(tmp_path):
    """Counters of a worker that has ended stay, what it had in flight goes, also when it was killed."""
    program = """
import os, sys
from openai_frontend.metrics import Metrics
metrics = Metrics()
metrics.answers.labels("finished").inc()
metrics.in_flight.inc()
if sys.argv[1] == "closed":
    metrics.close()
if sys.argv[1] == "asks":
    metrics.close_dead()
    sys.stdout.buffer.write(metrics.exposition())
"""
    environment = os.environ | {metrics_module.SHARED_DIRECTORY_VARIABLE: str(tmp_path)}
    for way in ("closed", "killed", "asks"):
        ran = subprocess.run([sys.executable, "-c", program, way], env=environment, capture_output=True, check=True)
    counted = figures(ran.stdout.decode())
    assert counted["answers_total", "finished"] == 3
    assert counted["requests_in_flight",] == 1
