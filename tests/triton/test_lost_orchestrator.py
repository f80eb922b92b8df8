"""A bare tritonserver loses a process of omni_bls: the stages live on, and with them the requests of the other one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from tritonclient.utils import InferenceServerException

from tests.servers import READY_TIMEOUT_S, MakeServer
from tests.triton.client import HELLO, TritonCall, gauges, omni
from tests.triton.test_replicas import busy
from triton_omni.serve.processes import model_stubs
from triton_omni.serve.tritonserver import TritonServer

pytestmark = [pytest.mark.triton, pytest.mark.slow]

REQUESTS = 8
# So that nothing is on its way to a process in the moment in which it is killed.
TOKEN_S = 3
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


def test_requests_of_the_other_process_go_on(server: TritonServer, eventually) -> None:
    endless = {"messages": HELLO, "modalities": ["text"], "thinker": {"max_tokens": 10**6}}
    heard = Heard([omni(server, endless) for _ in range(REQUESTS)])
    heard.wait(REQUESTS, 2)
    eventually(lambda: sum(busy(server, "omni_bls").values()) != REQUESTS)
    victim = max((stub for stub in model_stubs(server.pid) if stub.model == "omni_bls"), key=lambda stub: stub.instance)
    lost = busy(server, "omni_bls")[victim.instance]
    assert 0 < lost < REQUESTS
    heard.wait(1, 1)
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
