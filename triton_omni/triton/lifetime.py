"""A model's process ends with its server, and with its engine."""

from __future__ import annotations

import os
from pathlib import Path

from triton_omni.lifetime import end_with
from triton_omni.triton.responder import Responder

STUB = "triton_python_backend_stub"
_SERVER_PID_ARGUMENT = 5  # stub, model.py, shared memory: prefix, size, growth; process id of the server


def end_with_server() -> None:
    """A stub notices by itself that its server is gone, unless the server died with the lock in hand under which the
    stub looks: then it stays for ever, with its GPU memory. Call before anything is loaded.
    """
    end_with(_server_pid())


def end_without_engine(responder: Responder) -> None:
    """A model cannot say that it will serve no more, but Triton (from 26.04 on) and the supervisor see its process end.
    Open requests have got their errors; this sends them.
    """
    responder.close()
    os._exit(1)


def _server_pid() -> int:
    """From the stub's own command line, because a server that is gone already is no longer the parent."""
    arguments = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0")
    if Path(arguments[0]).name == STUB and len(arguments) > _SERVER_PID_ARGUMENT:
        text = arguments[_SERVER_PID_ARGUMENT]
        if text.isdecimal():
            return int(text)
    return os.getppid()
