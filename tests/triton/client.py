"""A plain Triton client: one gRPC stream per request, as the server's cancellation wants it."""

from __future__ import annotations

import json
import queue
import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import tritonclient.grpc as grpc

from triton_omni.serve.tritonserver import TritonServer

HELLO = [{"role": "user", "content": "Hello there, how are you?"}]
TYPES = {np.dtype(np.int32): "INT32", np.dtype(bool): "BOOL", np.dtype(np.uint8): "UINT8", np.dtype(object): "BYTES"}
TIMEOUT_S = 120
ENDLESS = {"min_frames": 10**6, "max_frames": 10**6}
"""Of the null talker: the request is open until it is cancelled, however long the test's process stands still."""


def speech(**values: Any) -> dict[str, Any]:
    """A request of omni_bls for text and audio."""
    return {"messages": HELLO, "modalities": ["text", "audio"], **values}


class TritonCall:
    """An open request. Iterating gives each response's outputs; an error response raises InferenceServerException.

    Who leaves the iteration early leaves the request, too.
    """

    open_calls: ClassVar[set[TritonCall]] = set()

    def __init__(self, server: TritonServer, model: str, inputs: dict[str, Any], **options: Any) -> None:
        self._responses: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._client = grpc.InferenceServerClient(server.grpc_target)
        self._client.start_stream(lambda result, error: self._responses.put(error or result))
        tensors = [_input(name, value) for name, value in inputs.items()]
        self._client.async_stream_infer(model, tensors, enable_empty_final_response=True, **options)
        self.open_calls.add(self)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        try:
            while True:
                result = self._responses.get(timeout=TIMEOUT_S)
                if isinstance(result, Exception):
                    self._close(cancel=False)
                    raise result
                response = result.get_response()
                if response.outputs:
                    yield {output.name: result.as_numpy(output.name) for output in response.outputs}
                if response.parameters["triton_final_response"].bool_param:
                    self._close(cancel=False)
                    return
        finally:
            self.cancel()

    def cancel(self) -> None:
        """The client leaves, in the middle of an iteration too. Does nothing when the request has ended."""
        self._close(cancel=True)

    def _close(self, *, cancel: bool) -> None:
        if self in self.open_calls:
            self.open_calls.remove(self)
            self._client.stop_stream(cancel_requests=cancel)
            self._client.close()


class Answer:
    """All of omni_bls's responses to one request."""

    def __init__(self, responses: Iterator[dict[str, np.ndarray]]) -> None:
        self.parts = [(_string(r["TEXT"]), r["AUDIO"], json.loads(_string(r["EVENT"]))) for r in responses]
        self.text = "".join(text for text, _, _ in self.parts)
        self.audio = np.concatenate([audio for _, audio, _ in self.parts])
        self.start, self.end = self.parts[0][2], self.parts[-1][2]


def omni(
    server: TritonServer, request: dict[str, Any] | str, media: list[bytes] | None = None, cancel_key: str | None = None
) -> TritonCall:
    """A request to omni_bls."""
    inputs: dict[str, Any] = {"REQUEST": [request if isinstance(request, str) else json.dumps(request)]}
    if media:
        inputs["MEDIA"] = media
    if cancel_key:
        inputs["CANCEL_KEY"] = [cancel_key]
    return TritonCall(server, "omni_bls", inputs)


def take_back(server: TritonServer, cancel_key: str) -> None:
    """Cancel a request by its key; its stream ends by itself."""
    assert list(omni(server, "", cancel_key=cancel_key)) == []


def generate_stream(server: TritonServer, model: str, **inputs: Any) -> list[dict[str, Any]]:
    """Triton's HTTP extension: server-sent events."""
    url = f"{server.http_url}/v2/models/{model}/generate_stream"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(inputs).encode()), timeout=TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def gauges(server: TritonServer) -> dict[tuple[str, str], float]:
    """The models' metrics, summed over instances, by (model, state, outcome or kind of message)."""
    with urllib.request.urlopen(server.metrics_url, timeout=TIMEOUT_S) as answer:
        text = answer.read().decode()
    values: dict[tuple[str, str], float] = defaultdict(float)
    for labels, value in re.findall(r"^omni_\w+\{(.*)\} (\S+)$", text, re.MULTILINE):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        values[pairs["model"], next(pairs[k] for k in ("state", "outcome", "kind") if k in pairs)] += float(value)
    return values


def open_sessions(server: TritonServer) -> dict[str, float]:
    """By model, what is not idle."""
    busy = {"running", "waiting", "unfetched_rows"}
    return {f"{m} {state}": n for (m, state), n in gauges(server).items() if state in busy and n}


def _input(name: str, value: Any) -> grpc.InferInput:
    array = value if isinstance(value, np.ndarray) else np.array([_bytes(item) for item in value], np.object_)
    tensor = grpc.InferInput(name, list(array.shape), TYPES[array.dtype])
    tensor.set_data_from_numpy(array)
    return tensor


def _bytes(item: str | bytes) -> bytes:
    return item.encode() if isinstance(item, str) else item


def _string(array: np.ndarray) -> str:
    return array.ravel()[0].decode()
