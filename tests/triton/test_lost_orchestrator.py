"""A bare tritonserver loses a process of omni_bls: the stages live on, and with them the requests of the other one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from tritonclient.utils import InferenceServerException

from openai_frontend.triton_client import SILENCE_S, TritonEngine
from tests.servers import READY_TIMEOUT_S, MakeServer
from tests.triton.client import HELLO, TritonCall, gauges, omni
from tests.triton.test_replicas import busy
from triton_omni.errors import StageError
from triton_omni.serve.processes import model_stubs
from triton_omni.serve.tritonserver import TritonServer

pytestmark = [pytest.mark.triton, pytest.mark.slow]

REQUESTS = 8
# A response that is on its way to a process in the moment in which it is killed holds up its stage for ever. So all
# answers' tokens come at about the same time, and the process is killed between two of these times.
TOKEN_S = 4
QUIET_S = 1
LIMIT_S = 120


@pytest.fixture
def server(make_server: MakeServer) -> Iterator[TritonServer]:
    with make_server({"thinker": {"null_token_ms": str(1000 * TOKEN_S)}}, {"omni_bls": 2}, null=True) as server:
        server.wait_ready(READY_TIMEOUT_S)
        yield server


class Heard:
    """How many responses each of the answers has had."""

    def __init__(self, answers: list[TritonCall]) -> None:
        self._changed = threading.Condition()
        self._counts: Counter[int] = Counter()
        self._threads = [threading.Thread(target=self._listen, args=each, daemon=True) for each in enumerate(answers)]
        for thread in self._threads:
            thread.start()

    def _listen(self, number: int, answer: TritonCall) -> None:
        with contextlib.suppress(InferenceServerException):  # the server ends before they do
            for _ in answer:
                with self._changed:
                    self._counts[number] += 1
                    self._changed.notify_all()

    def wait(self, answers: int, more: int) -> None:
        """Until so many answers have had so many responses from now on."""
        with self._changed:
            before = Counter(self._counts)

            def met() -> bool:
                return sum(self._counts[n] - before[n] >= more for n in range(REQUESTS)) >= answers

            assert self._changed.wait_for(met, LIMIT_S), (before, self._counts)

    def wait_quiet(self) -> None:
        with self._changed:
            while self._changed.wait(QUIET_S):
                pass


def test_requests_of_the_other_process_go_on(server: TritonServer, eventually) -> None:
    endless = {"messages": HELLO, "modalities": ["text"], "thinker": {"max_tokens": 10**6}}
    heard = Heard([omni(server, endless) for _ in range(REQUESTS)])
    heard.wait(REQUESTS, 2)
    eventually(lambda: sum(busy(server, "omni_bls").values()) != REQUESTS)
    victim = max((stub for stub in model_stubs(server.pid) if stub.model == "omni_bls"), key=lambda stub: stub.instance)
    lost = busy(server, "omni_bls")[victim.instance]
    assert 0 < lost < REQUESTS
    heard.wait_quiet()
    os.kill(victim.pid, signal.SIGKILL)
    heard.wait(REQUESTS - lost, 3)
    eventually(lambda: gauges(server)["thinker", "running"] != REQUESTS - lost)  # its other places are back

    def refused() -> str:
        """Until the one that lives takes it; the dead one's are refused by Triton."""
        try:
            list(omni(server, "", cancel_key="nobody's"))
        except InferenceServerException as error:
            assert "is not healthy" in str(error)
            return str(error)
        return ""

    eventually(refused)


def test_the_frontends_clients_hear_of_a_lost_process(server: TritonServer) -> None:
    """Within seconds, while its limit for a piece is minutes; slower requests of the other process go on."""

    async def run() -> None:
        engine = TritonEngine(server.grpc_target, stall_timeout_s=10 * LIMIT_S)
        request = {"messages": HELLO, "modalities": ["text"], "thinker": {"max_tokens": 10**6}}
        counts: Counter[int] = Counter()

        async def ask(number: int) -> None:
            async with contextlib.aclosing(engine.generate(request, [])) as pieces:
                async for _ in pieces:
                    counts[number] += 1

        tasks = [asyncio.create_task(ask(number)) for number in range(REQUESTS)]
        async with asyncio.timeout(LIMIT_S):
            while len(counts) < REQUESTS or min(counts.values()) < 3:  # each has had signs of life
                await asyncio.sleep(0.05)
            held = busy(server, "omni_bls")
            victim = next(stub for stub in model_stubs(server.pid) if held.get(stub.instance))
            total = -1
            while total != sum(counts.values()):
                total = sum(counts.values())
                await asyncio.sleep(QUIET_S)
            os.kill(victim.pid, signal.SIGKILL)
            killed_s, living = time.monotonic(), REQUESTS - held[victim.instance]
            while sum(task.done() for task in tasks) < held[victim.instance]:
                await asyncio.sleep(0.05)
            assert time.monotonic() - killed_s > SILENCE_S
            heard = Counter(counts)
            assert sum(not task.done() for task in tasks) == living
            while sum(counts[number] > heard[number] + 2 for number in range(REQUESTS)) < living:
                await asyncio.sleep(0.05)
        for task in tasks:
            if task.done():
                assert isinstance(task.exception(), StageError)
                assert "may have died" in str(task.exception())
            task.cancel()
        await asyncio.wait(tasks)
        await engine.close()

    asyncio.run(run())
