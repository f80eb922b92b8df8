"""code2wav's requests and responses as tensors, both ways.

An utterance is a Triton sequence: each request brings CODES int32 [1, frames, code_groups] and gets one response,
AUDIO int16 [1, samples]. The batch dimension is Triton's: waiting requests of different sequences reach ``execute``
together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from triton_omni.errors import InvalidRequestError
from triton_omni.pipeline.stages import CodesChunk, Int16
from triton_omni.triton.tensors import Arrays, array_tensor

OUTPUTS = ("AUDIO",)


def chunk_tensors(chunk: CodesChunk) -> list[Any]:
    """The request for ``chunk``; start and end travel as Triton's sequence flags."""
    return [array_tensor("CODES", chunk.codes[np.newaxis])]


def read_chunk(inputs: Arrays, session_id: str, *, start: bool, end: bool) -> CodesChunk:
    """Raises InvalidRequestError when the request brings a batch of its own."""
    codes = inputs["CODES"]  # [1, frames, code_groups]
    if codes.shape[0] != 1:
        raise InvalidRequestError("CODES", f"must be [1, frames, code_groups], got {list(codes.shape)}")
    return CodesChunk(session_id, codes[0], start=start, end=end)


def audio_tensors(audio: Int16) -> list[Any]:
    """The response to a chunk."""
    return [array_tensor("AUDIO", audio[np.newaxis])]


def read_audio(outputs: Arrays) -> Int16:
    """int16 [samples]."""
    audio: Int16 = outputs["AUDIO"].ravel()
    return audio
