"""A model's process that stands still while it loads, as on a machine that does, keeps no server from starting."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest

from tests.servers import READY_TIMEOUT_S, MakeServer
from tests.triton.client import HELLO, Answer, omni
from triton_omni.serve.processes import model_stubs

pytestmark = [pytest.mark.triton, pytest.mark.slow]

# tritonserver 24.10 asks for a sign of life within a second. When it asks is not known, so this may be over too late.
STANDS_STILL_S = 3.5


def _let_stand_still(server_pid: int, instance: str) -> None:
    while not (pids := [stub.pid for stub in model_stubs(server_pid) if stub.instance == instance]):
        time.sleep(0.05)
    time.sleep(1.5)
    with contextlib.suppress(ProcessLookupError):  # a server that is started again has ended its processes
        os.kill(pids[0], signal.SIGSTOP)
        time.sleep(STANDS_STILL_S)
        os.kill(pids[0], signal.SIGCONT)


def test_a_process_that_stands_still_while_it_loads(make_server: MakeServer) -> None:
    null = {"engine": "null"}
    with make_server({"thinker": null, "talker": {"dtype": "float32"}, "code2wav": null}, {}, null=False) as server:
        stop = threading.Thread(target=_let_stand_still, args=(server.pid, "talker_0_0"))
        stop.start()
        server.wait_ready(READY_TIMEOUT_S)
        stop.join()
        assert Answer(omni(server, {"messages": HELLO, "modalities": ["text"]})).text
