"""What is asked: prompts of about the same length, and answers of fixed or natural length, in each server's words."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton_omni.errors import InvalidRequestError

APIS = ("openai", "vllm-omni", "grpc")
INSTRUCTIONS = "You read aloud what you are given, clearly and at an even pace. You add nothing of your own."
# The chat template, INSTRUCTIONS and LEAD in Qwen's tokenizer; the rest of a prompt is words of one token each.
FRAME_TOKENS = 39
LEAD = "Read this out:"
_WORDS = (
    "about after again along away back before below best between blue book both bring build call care cold come could "
    "day deep door down each early earth every face fall far feel field fire first five food four free friend front "
    "garden give good great green hand hard head heart help high hold home hope house keep kind land large last late "
    "learn leave left letter life light line little long look love make many mind money moon more morning most mother "
    "move music name near never new next night north often old open other over own paper part people place plant play "
    "point quiet rain read ready rest right river road room round run salt sand say sea second see seven ship short "
    "show side simple sing sky sleep slow small snow some song soon sound south stand star stay step still stone story "
    "street strong summer sun sure table take talk tell thing think three time today together town tree turn under "
    "voice wait walk wall warm watch water way week well west white wide wind window winter wood word work year young"
)
# The stop token of vLLM-Omni's talker, and the settings of the checkpoint that it is given by hand.
_VLLM_OMNI_TALKER = {"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.05, "stop_token_ids": [2150]}
_VLLM_OMNI_CODE2WAV = {"temperature": 0.0, "top_k": -1, "repetition_penalty": 1.1, "max_tokens": 65_536}


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """``text_tokens`` and ``audio_frames``: exactly so many in every answer; None: as long as the model makes it.
    ``extra``: merged into every body, and wins.
    """

    text_tokens: int | None = 40
    audio_frames: int | None = 149
    prompt_tokens: int = 60
    modalities: tuple[str, ...] = ("text", "audio")
    instructions: str = INSTRUCTIONS
    prompt_file: str = ""
    seed: int = 0
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("text_tokens", "audio_frames", "prompt_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidRequestError(name, f"must be at least 1, got {value}")
        if self.modalities not in (("text",), ("audio",), ("text", "audio")):
            raise InvalidRequestError(
                "modalities", f"must be text, audio or text,audio, got {','.join(self.modalities)}"
            )

    @property
    def wants_audio(self) -> bool:
        return "audio" in self.modalities

    def prompts(self, count: int) -> list[str]:
        """``count`` texts, the same for the same seed; those of a file are shuffled and come again when it is short.

        Raises: InvalidRequestError when the file holds none.
        """
        rng = random.Random(self.seed)
        if self.prompt_file:
            lines = [line.strip() for line in Path(self.prompt_file).read_text("utf-8").splitlines() if line.strip()]
            if not lines:
                raise InvalidRequestError("prompt_file", f"{self.prompt_file} holds no line of text")
            rng.shuffle(lines)
            return [lines[i % len(lines)] for i in range(count)]
        words = max(1, self.prompt_tokens - FRAME_TOKENS)
        return [f"{LEAD} {' '.join(rng.choices(_WORDS.split(), k=words))}." for _ in range(count)]

    def body(self, api: str, model: str, prompt: str) -> dict[str, Any]:
        """The request in the words of ``api``."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        body: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": prompt}]}
        body["modalities"] = list(self.modalities)
        lengths = {"openai": self._openai, "vllm-omni": self._vllm_omni, "grpc": self._grpc}[api]()
        if api != "grpc":
            options = {"include_usage": True, "continuous_usage_stats": True}
            body |= {"model": model, "stream": True, "stream_options": options}
        return body | lengths | dict(self.extra)

    def _thinker(self) -> dict[str, Any]:
        count = self.text_tokens
        return {} if count is None else {"max_tokens": count, "min_tokens": count, "ignore_eos": True, "temperature": 0}

    def _talker(self) -> dict[str, Any]:
        count = self.audio_frames if self.wants_audio else None
        return {} if count is None else {"max_frames": count, "min_frames": count}

    def _openai(self) -> dict[str, Any]:
        return self._thinker() | ({"talker": talker} if (talker := self._talker()) else {})

    def _grpc(self) -> dict[str, Any]:
        return {"thinker": self._thinker(), "talker": self._talker(), "continuous_usage": True}

    def _vllm_omni(self) -> dict[str, Any]:
        """Its talker's last token is no frame: one more than the frames that are wanted."""
        talker = dict(_VLLM_OMNI_TALKER)
        if self._talker():
            frames = self._talker()["max_frames"] + 1
            talker |= {"max_tokens": frames, "min_tokens": frames, "ignore_eos": True, "detokenize": False}
        thinker = self._thinker() or {"temperature": 0}
        stages = [thinker, talker, _VLLM_OMNI_CODE2WAV] if self.wants_audio else [thinker]
        return {"sampling_params_list": stages} if self.text_tokens or self.audio_frames else {}
