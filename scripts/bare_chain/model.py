"""The bare chain beside omni_bls in scripts/bench_plumbing.py: the same messages, and nothing done with them.

bare_omni    one thread per stream: text pieces of bare_text, and codes of bare_codes that pass through bare_audio
bare_text    a decoupled response per piece, at the times that the request names; bare_codes: the same with codes
bare_audio   one response per request, batched

No parsing, sequences, appends, cancels, deadlines or metrics. What it shares with omni_bls is what a chain cannot do
without on this server: wake-ups through a pipe, because waiting inside response iterators stops the server, and
iterators that outlive their streams.
"""

from __future__ import annotations

import collections
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from triton_omni.triton.wakeups import PARAMETER, Record, WakeupReader, WakeupWriter

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
CODE_GROUPS, FRAME_SAMPLES = 16, 1920
ITERATOR_LIFE_S = 3.0
THREADS = 256


class TritonPythonModel:
    """One of the four, by the parameter ``role``."""

    def initialize(self, args: dict[str, str]) -> None:
        role = json.loads(args["model_config"])["parameters"]["role"]["string_value"]
        self._serve = {"omni": self._answer, "source": self._stream, "audio": self._decode}[role]
        self._pool = ThreadPoolExecutor(THREADS)
        self._writer, self._writing = WakeupWriter(), threading.Lock()
        self._reader = WakeupReader() if role == "omni" else None
        self._ended: collections.deque[tuple[float, Any]] = collections.deque()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._serve(request)

    # ---- the sources and the vocoder

    def _stream(self, request: Any) -> None:
        due_ms, frames = (_input(request, name) for name in ("DUE_MS", "FRAMES"))
        target = json.loads(request.parameters() or "{}")[PARAMETER]
        self._pool.submit(self._send_pieces, request.get_response_sender(), target, due_ms, frames)

    def _send_pieces(self, sender: Any, target: str, due_ms: Any, frames: Any) -> None:
        began_s = time.monotonic()
        for number, (due, size) in enumerate(zip(due_ms.tolist(), frames.tolist(), strict=True), 1):
            time.sleep(max(0.0, began_s + due / 1e3 - time.monotonic()))
            codes = pb_utils.Tensor("CODES", np.zeros((size, CODE_GROUPS), np.int32))
            last = number == len(due_ms)
            sender.send(pb_utils.InferenceResponse([codes]), flags=FINAL if last else 0)
            with self._writing:
                self._writer.write(target, Record.LAST_RESPONSE if last else Record.RESPONSE)

    def _decode(self, request: Any) -> None:
        samples = np.zeros((1, _input(request, "CODES").shape[1] * FRAME_SAMPLES), np.int16)
        audio = pb_utils.Tensor("AUDIO", samples)
        request.get_response_sender().send(pb_utils.InferenceResponse([audio]), flags=FINAL)

    # ---- the chain

    def _answer(self, request: Any) -> None:
        sender, sending = request.get_response_sender(), threading.Lock()
        streams = [
            (model, _input(request, f"{name}_DUE_MS"), _input(request, f"{name}_FRAMES"))
            for model, name in (("bare_text", "TEXT"), ("bare_codes", "CODES"))
        ]
        left = [sum(due.size for _, due, _ in streams)]

        def send(tensor: Any) -> None:
            with sending:
                left[0] -= 1
                sender.send(pb_utils.InferenceResponse([tensor]), flags=0 if left[0] else FINAL)

        for model, due_ms, frames in streams:
            if due_ms.size:
                self._pool.submit(self._follow, model, due_ms, frames, send)

    def _follow(self, model: str, due_ms: Any, frames: Any, send: Any) -> None:
        key, arrivals = self._reader.open(model)
        inputs = [pb_utils.Tensor("DUE_MS", due_ms), pb_utils.Tensor("FRAMES", frames)]
        iterator = self._exec(model, inputs, "CODES", parameters={PARAMETER: arrivals.parameter})
        read = 0
        while read == 0 or arrivals.wait(read + 1):
            codes = pb_utils.get_output_tensor_by_name(next(iterator), "CODES").as_numpy()
            read += 1
            if model == "bare_text":
                send(pb_utils.Tensor("TEXT", codes[:, :1]))
            else:
                send(pb_utils.Tensor("AUDIO", self._vocode(codes)))
        self._reader.forget(key)
        self._keep(iterator)

    def _vocode(self, codes: Any) -> Any:
        iterator = self._exec("bare_audio", [pb_utils.Tensor("CODES", codes[np.newaxis])], "AUDIO")
        audio = pb_utils.get_output_tensor_by_name(next(iterator), "AUDIO").as_numpy()
        self._keep(iterator)
        return audio

    def _exec(self, model: str, inputs: list[Any], output: str, **options: Any) -> Any:
        request = pb_utils.InferenceRequest(model_name=model, inputs=inputs, requested_output_names=[output], **options)
        return request.exec(decoupled=True)

    def _keep(self, iterator: Any) -> None:
        now_s = time.monotonic()
        with self._writing:
            self._ended.append((now_s, iterator))
            while now_s - self._ended[0][0] > ITERATOR_LIFE_S:
                self._ended.popleft()


def _input(request: Any, name: str) -> Any:
    return np.array(pb_utils.get_input_tensor_by_name(request, name).as_numpy())
