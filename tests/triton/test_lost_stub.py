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
from triton_omni.errors import ConfigError
from triton_omni.serve.processes import model_stubs
from triton_omni.serve.tritonserver import TritonServer

pytestmark = [pytest.mark.triton, pytest.mark.slow]

# tritonserver 24.10 asks for a sign of life within a second. When it asks is not known, so this may be over too late.
STANDS_STILL_S = 3.5


def _let_stand_still(server: TritonServer, instance: str, over: threading.Event) -> None:
    """Once, unless it is ``over`` before; one that is started again meanwhile has other processes."""
    pids: list[int] = []
    while not pids:
        if over.wait(0.05):
            return
        with contextlib.suppress(ConfigError):  # between two starts
            pids = [stub.pid for stub in model_stubs(server.pid) if stub.instance == instance]
    time.sleep(1.5)
    with contextlib.suppress(ProcessLookupError):  # a server that is started again has ended its processes
        os.kill(pids[0], signal.SIGSTOP)
        time.sleep(STANDS_STILL_S)
        os.kill(pids[0], signal.SIGCONT)


def test_a_process_that_stands_still_while_it_loads(make_server: MakeServer) -> None:
    null, over = {"engine": "null"}, threading.Event()
    with make_server({"thinker": null, "talker": {"dtype": "float32"}, "code2wav": null}, {}, null=False) as server:
        stop = threading.Thread(target=_let_stand_still, args=(server, "talker_0_0", over))
        stop.start()
        try:
            server.wait_ready(READY_TIMEOUT_S)
        finally:
            over.set()
            stop.join()
        assert Answer(omni(server, {"messages": HELLO, "modalities": ["text"]})).text
