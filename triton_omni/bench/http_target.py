"""POST /v1/chat/completions as a stream, in OpenAI's dialect or vLLM-Omni's; which one is seen from each chunk."""

from __future__ import annotations

import binascii
import struct
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import aiohttp
import orjson

from triton_omni.bench.record import Record, Recorder

PCM_RATE_HZ = 24_000
# Base64 of the first 96 bytes of a piece: all that is decoded of it, enough for a WAV file's header.
HEAD_CHARACTERS = 128
_WAV_HEADER_BYTES = 44
_READ_BYTES = 1 << 20


class HttpTarget:
    """``url``: the server's root, or its ``/v1``. ``timeout_s``: longest that an answer may take. ``wants_text``,
    ``wants_audio``: what a complete answer holds.
    """

    def __init__(
        self, url: str, *, api_key: str = "", timeout_s: float = 300.0, wants_text: bool, wants_audio: bool
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._headers["content-type"] = "application/json"
        self._wants = {"wants_text": wants_text, "wants_audio": wants_audio}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=_READ_BYTES)
        return self._session

    async def ask(self, body: Mapping[str, Any], late_s: float) -> Record:
        """One request from start to end; what goes wrong stands in the record."""
        session, content = self._connected(), orjson.dumps(body)
        answer = Recorder(time.monotonic(), late_s)
        try:
            async with session.post(self._url, data=content, headers=self._headers) as response:
                if response.status == 200:
                    await _read(response.content.iter_any(), answer)
                else:
                    answer.fail(f"HTTP {response.status}: {(await response.text())[:200]}")
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            answer.fail(f"{type(error).__name__}: {error}")
        return answer.close(time.monotonic(), **self._wants)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def _read(pieces: AsyncIterator[bytes], answer: Recorder) -> None:
    lines = _Lines()
    async for piece in pieces:
        now_s = time.monotonic() - answer.sent_s
        for line in lines.take(piece):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                answer.ended = True
            else:
                answer.event(now_s)
                take_chunk(orjson.loads(data), now_s, answer)


class _Lines:
    """Whole lines of a stream; a long one that comes in many pieces is joined once."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []

    def take(self, piece: bytes) -> Iterator[bytes]:
        head, *rest = piece.split(b"\n")
        self._begun.append(head)
        for line in rest:
            yield b"".join(self._begun)
            self._begun = [line]


def take_chunk(chunk: Mapping[str, Any], now_s: float, answer: Recorder) -> None:
    """One chat.completion.chunk, or an error in its place."""
    if error := chunk.get("error"):
        answer.fail(str(error.get("message", error)) if isinstance(error, dict) else str(error))
        return
    usage, choices = chunk.get("usage") or {}, chunk.get("choices") or ()
    details = usage.get("completion_tokens_details") or {}
    text_tokens: int | None = details.get("text_tokens", usage.get("completion_tokens"))
    if text_tokens is not None and not choices:
        answer.usage(usage["prompt_tokens"], text_tokens)
    for choice in choices:
        delta = choice.get("delta") or {}
        audio = delta.get("audio") or {}
        text, data = delta.get("content") or audio.get("transcript"), audio.get("data")
        if chunk.get("modality") == "audio" and not data:
            text, data = None, delta.get("content")
        if data:
            answer.audio(now_s, audio_length_s(data))
        if text:
            answer.text(now_s, text_tokens)


def audio_length_s(data: str) -> float:
    """Of base64: a WAV file (also one whose sizes are not filled in) or bare 16-bit mono at 24 kHz.

    Only its beginning is decoded. Raises: ValueError when that is no base64.
    """
    size = len(data) // 4 * 3 - (data[-2:].count("=") if len(data) >= 2 else 0)
    head = binascii.a2b_base64(data[:HEAD_CHARACTERS], strict_mode=True)
    if head[:4] != b"RIFF":
        return size / (2 * PCM_RATE_HZ)
    position = 12
    bytes_per_s: int = 2 * PCM_RATE_HZ
    while position + 8 <= len(head):
        tag, length = struct.unpack_from("<4sI", head, position)
        position += 8
        if tag == b"data":
            return float(min(length, size - position) / bytes_per_s)
        if tag == b"fmt ":
            (bytes_per_s,) = struct.unpack_from("<I", head, position + 8)
        position += length + length % 2
    return float(max(0, size - _WAV_HEADER_BYTES) / bytes_per_s)
