"""transformers as the reference: the same checkpoint, float32, greedy, one request at a time.

``Oracle.answer`` works around what ``generate`` does differently from a server (it never speaks the last token before
``max_new_tokens``, crashes where there is nothing to say, decodes long speech with too little context, and looks for
``audio_config`` in the wrong place); what is left is its own arithmetic. ``Oracle.mutated`` changes that arithmetic in
one named way, so that a test can show that it would notice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import soundfile
import torch
from PIL import Image
from transformers import Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeProcessor
from transformers.utils import logging as transformers_logging

from tests.mutations import MUTATIONS

AUDIO_RATE_HZ = 16_000


@dataclasses.dataclass(frozen=True)
class DecodedVideo:
    """``frames`` uint8 [T, H, W, 3], sampled at ``fps``; ``audio`` float32 at 16 kHz, used with use_audio_in_video."""

    frames: np.ndarray
    fps: float = 1.0
    audio: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class OracleAnswer:
    """``prompt_token_ids`` int32 [P], expanded; ``token_ids`` int32 [G], spoken ids without EOS; ``text``;
    ``finish_reason`` of the text; ``positions`` int32 [3, P], the thinker's M-RoPE positions; ``rows`` float32
    [R, hidden], layer ``accept_hidden_layer`` at the media positions; when speech was asked for, ``codes`` int32
    [F, code groups] (F may be 0), ``speech_finish_reason`` and ``wave`` float32 [samples].
    """

    prompt_token_ids: np.ndarray
    token_ids: np.ndarray
    text: str
    finish_reason: str
    positions: np.ndarray
    rows: np.ndarray
    codes: np.ndarray | None = None
    speech_finish_reason: str | None = None
    wave: np.ndarray | None = None


class NothingToSayError(Exception):
    """Raised inside ``generate`` where it would crash for want of text, user message or codes."""


class Oracle:
    """The reference. Answers are cached; under ``mutated`` each name has a cache of its own."""

    def __init__(self, checkpoint: Path) -> None:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self.model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.processor = Qwen3OmniMoeProcessor.from_pretrained(checkpoint)
        self.config = self.model.config
        # get_rope_index of the talker reads n_window there and fails for audio + image without it.
        self.config.talker_config.audio_config = self.config.thinker_config.audio_config
        self._active: tuple[str, ...] = ()
        self._cache: dict[str, OracleAnswer] = {}

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        media: Sequence[bytes | np.ndarray | DecodedVideo] = (),
        *,
        speech: bool = True,
        speaker: str = "ethan",
        max_text_tokens: int = 64,
        max_frames: int = 400,
        repetition_penalty: float = 1.05,
        use_audio_in_video: bool = False,
    ) -> OracleAnswer:
        """What ``messages`` (as in ThinkerRequest; ``media``: WAV at 16 kHz, image files, or decoded media) get."""
        arguments = (speech, speaker, max_text_tokens, max_frames, repetition_penalty, use_audio_in_video)
        key = repr((self._active, json.dumps(messages), [_fingerprint(m) for m in media], arguments))
        if key not in self._cache:
            inputs = self.inputs(messages, media, use_audio_in_video=use_audio_in_video)
            self._cache[key] = self._generate(inputs, *arguments)
        return self._cache[key]

    def inputs(
        self,
        messages: Sequence[Mapping[str, Any]],
        media: Sequence[bytes | np.ndarray | DecodedVideo] = (),
        *,
        use_audio_in_video: bool = False,
    ) -> Mapping[str, Any]:
        """The processor's tensors for one conversation."""
        found: dict[str, list[Any]] = {"audio": [], "image": [], "video": []}
        fps = 1.0
        for part in _parts(messages):
            if part["type"] == "text":
                continue
            item = _decoded(part["type"], media[part["media"]])
            if isinstance(item, DecodedVideo):
                fps = item.fps
                if use_audio_in_video and item.audio is not None:
                    found["audio"].append(item.audio)
                item = item.frames
            found[part["type"]].append(item)
        named = {"audio": found["audio"], "images": found["image"], "videos": found["video"]}
        options: dict[str, Any] = {name: items for name, items in named.items() if items}
        if found["video"]:
            options |= {"fps": fps, "load_audio_from_video": use_audio_in_video}
        text = self.processor.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return self.processor(text=[text], return_tensors="pt", **options)

    def _generate(
        self,
        inputs: Mapping[str, Any],
        speech: bool,
        speaker: str,
        max_text_tokens: int,
        max_frames: int,
        repetition_penalty: float,
        use_audio_in_video: bool,
    ) -> OracleAnswer:
        model, seen = self.model, _Seen()
        with contextlib.ExitStack() as stack, torch.no_grad():
            stack.enter_context(seen.watch(model))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Passing `repetition_penalty` with `inputs_embeds`", UserWarning)
            with contextlib.suppress(NothingToSayError):
                model.generate(
                    **inputs,
                    return_audio=speech,
                    speaker=speaker,
                    use_audio_in_video=use_audio_in_video,
                    thinker_do_sample=False,
                    thinker_max_new_tokens=max_text_tokens + 1,
                    thinker_eos_token_id=self.config.im_end_token_id,
                    thinker_output_hidden_states=True,
                    thinker_return_dict_in_generate=True,
                    talker_do_sample=False,
                    talker_max_new_tokens=max_frames + 1,
                    talker_repetition_penalty=repetition_penalty,
                )
            codes = seen.codes if speech else None
            wave = None if codes is None else self.wave(codes)
        prompt, layers = inputs["input_ids"][0], seen.thinker.hidden_states[0]
        answer = seen.thinker.sequences[0, len(prompt) :]
        ended = self.config.im_end_token_id in answer[:max_text_tokens]
        spoken = answer[:-1]  # the last one is EOS, or one more than was asked for
        frames = 0 if codes is None else len(codes)
        return OracleAnswer(
            prompt_token_ids=_int32(prompt),
            token_ids=_int32(spoken),
            text=self.processor.tokenizer.decode(spoken),
            finish_reason="stop" if ended else "length",
            positions=_int32(seen.positions),
            rows=layers[self.config.talker_config.accept_hidden_layer][0][self._media(prompt)].numpy(),
            codes=codes,
            speech_finish_reason=None if codes is None else ("length" if frames == max_frames else "stop"),
            wave=wave,
        )

    def wave(self, codes: np.ndarray) -> np.ndarray:
        """float32 [samples]: code2wav's own forward over all of ``codes`` [F, code groups] at once."""
        if not len(codes):
            return np.zeros(0, np.float32)
        with torch.no_grad():
            return self.model.code2wav(torch.from_numpy(codes).long().T[None])[0, 0].numpy()

    def _media(self, ids: torch.Tensor) -> torch.Tensor:
        thinker = self.config.thinker_config
        media = torch.tensor([thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id])
        return torch.isin(ids, media)

    @contextlib.contextmanager
    def mutated(self, name: str) -> Iterator[None]:
        """Inside, the reference is wrong in the way MUTATIONS describes under ``name``."""
        outer = self._active
        with MUTATIONS[name](self.model):
            self._active = (*outer, name)
            try:
                yield
            finally:
                self._active = outer


class _Seen:
    """What one ``generate`` computed on its way; stops it where it would crash or waste time."""

    def __init__(self) -> None:
        self.thinker: Any = None
        self.positions: torch.Tensor | None = None
        self.codes = np.zeros((0, 0), np.int32)

    @contextlib.contextmanager
    def watch(self, model: Qwen3OmniMoeForConditionalGeneration) -> Iterator[None]:
        self.codes = np.zeros((0, model.config.talker_config.num_code_groups), np.int32)
        handle = model.thinker.model.language_model.register_forward_pre_hook(self._prefill, with_kwargs=True)
        try:
            with (
                mock.patch.object(model.thinker, "generate", self._thinker(model)),
                mock.patch.object(model.talker, "generate", self._talker(model)),
                mock.patch.object(model.code2wav, "chunked_decode", self._code2wav),
            ):
                yield
        finally:
            handle.remove()

    def _prefill(self, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        if self.positions is None:
            self.positions = kwargs["position_ids"][-3:, 0]

    def _thinker(self, model: Any) -> Callable[..., Any]:
        generate, config = model.thinker.generate, model.config

        def thinker(*, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            self.thinker = generate(input_ids=input_ids, **kwargs)
            ids = input_ids[0]
            roles = ids[1:][ids[:-1] == config.im_start_token_id]
            empty = self.thinker.sequences[0, len(ids)] == config.im_end_token_id
            if empty or config.user_token_id not in roles:
                raise NothingToSayError
            return self.thinker

        return thinker

    def _talker(self, model: Any) -> Callable[..., Any]:
        generate, eos = model.talker.generate, model.config.talker_config.codec_eos_token_id

        def talker(**kwargs: Any) -> Any:
            result = generate(**kwargs)
            if result.sequences[0, 0] == eos:
                raise NothingToSayError
            return result

        return talker

    def _code2wav(self, codes: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.codes = codes[0].T.to(torch.int32).numpy().copy()  # [F, code groups]
        return torch.zeros(1, 1, 0)


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        if not isinstance(message["content"], str):
            yield from message["content"]


def _decoded(kind: str, item: bytes | np.ndarray | DecodedVideo) -> Any:
    if not isinstance(item, bytes):
        return item
    if kind == "image":
        return Image.open(io.BytesIO(item)).convert("RGB")
    if kind == "audio":
        samples, rate_hz = soundfile.read(io.BytesIO(item), dtype="float32", always_2d=True)
        if rate_hz != AUDIO_RATE_HZ:
            raise ValueError(f"the oracle does not resample: give audio at {AUDIO_RATE_HZ} Hz, got {rate_hz}")
        return samples.mean(axis=1)
    raise ValueError("give videos as DecodedVideo")


def _fingerprint(item: bytes | np.ndarray | DecodedVideo) -> Any:
    if isinstance(item, DecodedVideo):
        return (_fingerprint(item.frames), item.fps, item.audio is not None and _fingerprint(item.audio))
    return hash(item if isinstance(item, bytes) else item.tobytes())


def _int32(tensor: Any) -> np.ndarray:
    return tensor.to(torch.int32).numpy()
