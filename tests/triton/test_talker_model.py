"""The talker's model.py with a fake of Triton's module: what must not depend on which of two threads is first."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

import numpy as np

from tests.servers import REPOSITORY
from tests.triton import fake_pb_utils as pb_utils
from triton_omni.pipeline.stages import CodesEvent
from triton_omni.sampling import TalkerSampling
from triton_omni.triton.responder import Responder
from triton_omni.triton.talker_wire import TalkerDefaults
from triton_omni.triton.wakeups import WakeupReader

WAIT_S = 60  # for what comes at once


class SlowEngine:
    """A TalkerEngine that knows a session only after somebody has wanted to cancel it."""

    def __init__(self) -> None:
        self.known = False
        self.asked, self.cancelled = threading.Event(), threading.Event()

    def start(self, *_: Any) -> None:
        assert self.asked.wait(WAIT_S)
        self.known = True

    def cancel(self, session_id: str) -> None:
        self.asked.set()
        if self.known:
            self.cancelled.set()


class Start(pb_utils.Sender):
    """The request that opens session "session", sent by an omni_bls."""

    def __init__(self, wakeup: str) -> None:
        super().__init__()
        self.parameters = lambda: '{"omni_wakeup": "%s"}' % wakeup  # noqa: UP031

    def correlation_id(self) -> str:
        return "session"

    def flags(self) -> int:
        return pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START

    def inputs(self) -> list[pb_utils.Tensor]:
        return [pb_utils.Tensor("PROMPT_TOKEN_IDS", np.arange(3, dtype=np.int32))]


def test_a_session_taken_back_before_the_engine_knew_it_ends() -> None:
    """Its omni_bls is gone: nobody would ever give it text or end it."""
    spec = importlib.util.spec_from_file_location("talker_model", REPOSITORY / "talker" / "1" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reader, responder, engine = WakeupReader(), Responder("talker", poll_s=WAIT_S), SlowEngine()
    _, arrivals = reader.open("talker")
    reader.close()
    model = module.TritonPythonModel()
    vars(model).update(
        _defaults=TalkerDefaults("ethan", TalkerSampling()),
        _opened=CodesEvent(np.empty((0, 16), np.int32)),
        _responder=responder,
        _engine=engine,
    )
    model.execute([Start(arrivals.parameter)])
    assert engine.cancelled.is_set()
    responder.close()
