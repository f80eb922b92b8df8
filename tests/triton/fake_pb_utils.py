"""What ``triton_omni.triton`` needs of Triton's module in tests without a server."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_MEMORY_CPU = 0


class TritonModelException(Exception):
    pass


class Tensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


def InferenceResponse(output_tensors=(), error=None):
    return SimpleNamespace(tensors={t.name(): np.asarray(t.as_numpy()) for t in output_tensors}, error=error)


def TritonError(message):
    return message


class Sender:
    """Records (response or None, is final); ``left`` is the caller's cancel."""

    def __init__(self):
        self.sent = []
        self.left = False
        self.finished = threading.Event()

    def get_response_sender(self):
        return self

    def parameters(self):
        return "{}"

    def is_cancelled(self):
        assert not self.finished.is_set(), "the server dies of this"
        return self.left

    def send(self, response=None, flags=0):
        assert not self.finished.is_set()
        self.sent.append((response, flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL))
        if flags:
            self.finished.set()
