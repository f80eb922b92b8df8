"""Conversations that name a former answer by its audio's id."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from openai_frontend.engine import Delta
from openai_frontend.transcripts import Transcripts
from tests.openai_frontend.conftest import frontend_of
from tests.openai_frontend.fakes import END, START, WITHIN_S, FakeEngine, LeavingClient, client_of, events_of
from triton_omni.errors import StageError
from triton_omni.serve.tritonserver import TritonServer

URL = "/v1/chat/completions"
SPOKEN = (START, Delta(text="Hello, "), Delta(audio=bytes(2)), Delta(text="you."), END)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_transcript_lives_for_its_time():
    clock = Clock()
    kept = Transcripts(60, clock=clock)
    kept.put("a", "first")
    clock.now += 59
    kept.put("b", "second")
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == ("first", "second", None)
    clock.now += 2
    assert (kept.get("a"), kept.get("b")) == (None, "second")


def test_the_oldest_leave_when_there_are_too_many():
    kept = Transcripts(60, max_characters=10_000)
    for i in range(1_000):
        kept.put(str(i), "x" * 744)
    assert [i for i in range(1_000) if kept.get(str(i))] == list(range(990, 1_000))
    for i in range(1_000):
        kept.put(f"empty {i}", "")
    assert kept.get("empty 900") is None  # an entry weighs something by itself
    kept.put("huge", "x" * 20_000)
    assert kept.get("huge") is None


class TestWorkers:
    def test_what_one_keeps_the_others_know(self, tmp_path: Path):
        clock = Clock()
        first, second = (Transcripts(60, file=tmp_path / "t", max_characters=10_000, clock=clock) for _ in range(2))
        first.put("a", "said")
        assert second.get("a") == "said"
        for i in range(20):
            (first, second)[i % 2].put(str(i), "x" * 744)
        assert {kept.get("a") for kept in (first, second)} == {None}  # the bound holds for both together
        assert [i for i in range(20) if first.get(str(i))] == list(range(10, 20))
        clock.now += 61
        second.put("b", "")
        assert first.get("19") is None
        first.close()
        assert second.get("b") == ""

    def test_processes_at_once_lose_nothing(self, tmp_path: Path):
        code = (
            "import sys; from pathlib import Path; from openai_frontend import transcripts;"
            "transcripts._LOCK_TIMEOUT_S = 60;"  # they do nothing but wait for each other
            "kept = transcripts.Transcripts(3_600, file=Path(sys.argv[1]));"
            "[kept.put(f'{sys.argv[2]}-{i}', str(i)) for i in range(200)]"
        )
        Transcripts(3_600, file=tmp_path / "t").close()
        workers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "t"), str(w)]) for w in range(3)]
        assert [worker.wait(240) for worker in workers] == [0, 0, 0]
        kept = Transcripts(3_600, file=tmp_path / "t")
        assert all(kept.get(f"{worker}-{i}") == str(i) for worker in range(3) for i in range(200))

    def test_a_file_that_fails_costs_the_name_and_not_the_answer(self, tmp_path: Path, caplog):
        kept = Transcripts(60, file=tmp_path / "t")
        kept.close()
        kept.put("a", "said")
        assert "a is not kept" in caplog.text

    @pytest.mark.triton
    def test_any_worker_knows_any_answer(self, null_server: TritonServer, tmp_path: Path, chat):
        """Each request on a connection of its own, several at once: both workers get some."""

        def ask(body):
            answer = httpx.post(f"{frontend.url}{URL}", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["message"]

        with frontend_of(null_server, tmp_path, "--workers", "2") as frontend, ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, [chat(modalities=["audio"], max_tokens=2)] * 8))
            again = [follow_up(chat, answer["audio"]["id"]) | {"max_tokens": 1} for answer in answers]
            assert [said["content"] for said in pool.map(ask, again * 2)] == ["w0 "] * 16


def follow_up(chat, audio_id):
    first = {"role": "user", "content": "Hello"}
    return chat(messages=[first, {"role": "assistant", "audio": {"id": audio_id}}, first])


@pytest.mark.asyncio
class TestRequests:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_an_answer_can_be_named(self, make_app, chat, stream):
        engine = FakeEngine(*SPOKEN)
        begun_s = int(time.time())
        async with client_of(make_app(engine, audio_id_lifetime_s=500)) as client:
            response = await client.post(URL, json=chat(modalities=["audio"], stream=stream))
            if stream:
                audio = {}
                for event in events_of(response):
                    audio |= event["choices"][0]["delta"].get("audio", {})
            else:
                audio = response.json()["choices"][0]["message"]["audio"]
            assert begun_s + 500 <= audio["expires_at"] <= time.time() + 500
            again = await client.post(URL, json=follow_up(chat, audio["id"]))
        assert again.status_code == 200, again.text
        assert engine.request["messages"][1] == {"role": "assistant", "content": "Hello, you."}

    @pytest.mark.parametrize("lifetime_s", [3600, 0])
    async def test_an_id_that_is_unknown_or_has_expired(self, make_app, chat, lifetime_s):
        async with client_of(make_app(FakeEngine(*SPOKEN), audio_id_lifetime_s=lifetime_s)) as client:
            response = await client.post(URL, json=chat(modalities=["audio"]))
            audio_id = response.json()["choices"][0]["message"]["audio"]["id"] if not lifetime_s else "audio-0"
            again = await client.post(URL, json=follow_up(chat, audio_id))
        assert again.status_code == 400
        error = again.json()["error"]
        assert error["param"] == "messages[1].audio.id"
        assert audio_id in error["message"]
        assert "transcript" in error["message"]

    async def test_a_transcript_needs_no_id(self, make_app, chat):
        engine = FakeEngine(*SPOKEN)
        body = follow_up(chat, "audio-0")
        body["messages"][1]["audio"]["transcript"] = "Said."
        async with client_of(make_app(engine)) as client:
            assert (await client.post(URL, json=body)).status_code == 200
        assert engine.request["messages"][1]["content"] == "Said."

    async def test_what_was_said_until_the_client_left_can_be_named(self, make_app, chat):
        engine = FakeEngine(START, Delta(text="Hello, "), asyncio.Event(), END)
        app = make_app(engine)
        client = LeavingClient(app, chat(modalities=["audio"], stream=True))
        async with asyncio.timeout(WITHIN_S):
            await engine.waits.wait()
            client.leave()
            await client.done
        sent = b"".join(message.get("body", b"") for message in client.sent).decode()
        audio_id = sent.split('"audio":{"id":"')[1].split('"')[0]
        assert app.state.context.transcripts.get(audio_id) == "Hello, "

    async def test_what_was_said_until_it_broke_can_be_named(self, make_app, chat):
        app = make_app(FakeEngine(START, Delta(text="Hello, "), StageError("talker", "gone")))
        async with client_of(app) as client:
            *_, spoken, error = events_of(await client.post(URL, json=chat(modalities=["audio"], stream=True)))
        assert "error" in error
        audio_id = spoken["choices"][0]["delta"]["audio"]["id"]
        assert app.state.context.transcripts.get(audio_id) == "Hello, "
