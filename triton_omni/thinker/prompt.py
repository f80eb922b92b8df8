"""Chat messages and media files to the model's prompt, by the checkpoint's own processor.

Two steps, because engines differ in what they take: ``render`` gives text and decoded media, ``encode`` ids and
features. Both are CPU work of up to seconds and belong in a worker thread; any number of threads may call them.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor

from triton_omni.errors import CheckpointError, ConfigError, InvalidRequestError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.stages import Int32, ThinkerRequest
from triton_omni.thinker import media
from triton_omni.thinker.config import ThinkerConfig

ROLES = ("system", "user", "assistant", "tool")
MEDIA_TYPES = ("audio", "image", "video")
_SHORT_CHARACTERS = 4096
_MESSAGE_CHARACTERS = 64  # what a message costs beside its text, in characters that take as long to encode


@dataclasses.dataclass(slots=True)
class RenderedPrompt:
    """``text``: one placeholder per medium; the media in the order of the prompt. ``audio_of_video``, for
    ``use_audio_in_video`` only: for each audio the video it is the track of, or None where it stands alone.
    """

    text: str = ""
    audio: list[media.Waveform] = dataclasses.field(default_factory=list)
    images: list[Image.Image] = dataclasses.field(default_factory=list)
    videos: list[media.Frames] = dataclasses.field(default_factory=list)
    audio_of_video: list[int | None] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """``token_ids`` int32 [P], media placeholders expanded; ``features``: the processor's tensors for the towers."""

    token_ids: Int32
    features: Mapping[str, torch.Tensor]
    use_audio_in_video: bool

    @property
    def has_media(self) -> bool:
        return bool(self.features)


def is_short_text(request: ThinkerRequest) -> bool:
    """Whether its prompt takes less than a few milliseconds to make; those with tools are never short."""
    if request.media or request.tools is not None:
        return False
    left = _SHORT_CHARACTERS
    for message in request.messages:
        left -= _MESSAGE_CHARACTERS + (_text_characters(message) if isinstance(message, Mapping) else 0)
        if left < 0:
            return False
    return True


def _text_characters(message: Mapping[str, Any]) -> int:
    """Of the content; what is not as it should be, and will be refused, counts for nothing."""
    if "tool_calls" in message:
        return _SHORT_CHARACTERS
    content = message.get("content")
    if isinstance(content, str):
        return len(content)
    texts = [part.get("text") for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return sum(_MESSAGE_CHARACTERS + len(text) for text in texts if isinstance(text, str))


class PromptBuilder:
    """The checkpoint's processor and chat template. Raises CheckpointError when the checkpoint lacks them."""

    def __init__(self, model_config: ModelConfig, config: ThinkerConfig) -> None:
        path, thinker = model_config.path, model_config.thinker
        try:
            self._processor = AutoProcessor.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: the processor cannot be loaded: {error}") from error
        if not self._processor.chat_template:
            raise CheckpointError(f"{path}: the processor has no chat template")
        self.tokenizer = self._processor.tokenizer
        text_tokenizer = copy.deepcopy(self.tokenizer)
        text_tokenizer("")  # sets how it pads, truncates and takes special tokens, which nobody changes after this
        self._encode_text = text_tokenizer.backend_tokenizer.encode
        self._config = config
        self._local = threading.local()
        self._rate_hz = int(self._processor.feature_extractor.sampling_rate)
        # The spectrogram's centred windows are padded by reflection, which needs more samples than half a window.
        self._min_samples = self._processor.feature_extractor.n_fft // 2 + 1
        names = ("image_token", "audio_token", "video_token", "vision_bos_token", "audio_bos_token")
        self._media_tokens = [getattr(self._processor, name) for name in names]
        # What the processor must count as the model does; it would otherwise take the published model's values.
        self._model_facts = {
            "position_id_per_seconds": thinker["position_id_per_seconds"],
            "n_window": thinker["audio_config"]["n_window"],
        }
        step = (
            thinker["position_id_per_seconds"] * self._processor.video_processor.temporal_patch_size / config.video_fps
        )
        if step != int(step):
            raise ConfigError(
                f"must give whole positions per pair of frames, as 1 or 2 do; {config.video_fps:g} gives {step:g}",
                field="video_fps",
            )

    def build(self, request: ThinkerRequest) -> EncodedPrompt:
        """``render``, then ``encode``."""
        return self.encode(self.render(request))

    def warm_up(self) -> None:
        """What the first prompts of the calling thread would wait for."""
        self._own_processor()
        self.build(ThinkerRequest("warm-up", [{"role": "user", "content": "Hello."}]))

    def render(self, request: ThinkerRequest) -> RenderedPrompt:
        """Raises InvalidRequestError naming ``messages[i]…`` when messages or media are not as they should be, and
        ``tools[i]`` when a tool cannot stand in the prompt.
        """
        prompt = RenderedPrompt(audio_of_video=[] if request.use_audio_in_video else None)
        if not request.messages:
            raise InvalidRequestError("messages", "must hold at least one message")
        messages = [self._message(request, i, m, prompt) for i, m in enumerate(request.messages)]
        tools = [dict(tool) for tool in request.tools.tools] if request.tools is not None else None
        for i, tool in enumerate(tools or []):
            self._plain(json.dumps(tool, ensure_ascii=False), f"tools[{i}]")
        if not prompt.videos:
            prompt.audio_of_video = None
        try:
            prompt.text = self._processor.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError("messages", f"are refused by the model's chat template: {error}") from None
        return prompt

    def encode(self, prompt: RenderedPrompt) -> EncodedPrompt:
        """Raises InvalidRequestError when the processor refuses a medium (an image far too narrow, say)."""
        if not (prompt.audio or prompt.images or prompt.videos):
            # All that the processor does with it, in a tenth of the time.
            return EncodedPrompt(np.array(self._encode_text(prompt.text).ids, np.int32), {}, False)
        audio_in_video = prompt.audio_of_video is not None
        media_inputs: dict[str, Any] = {}
        if prompt.audio:
            media_inputs["audio"] = prompt.audio
        if prompt.images:
            media_inputs["images"] = prompt.images
        if prompt.videos:
            media_inputs |= {"videos": prompt.videos, "fps": self._config.video_fps, "do_sample_frames": False}
        if audio_in_video:
            media_inputs |= {"load_audio_from_video": True, "audio_from_video_indices": prompt.audio_of_video}
        try:
            inputs = self._own_processor()(text=[prompt.text], return_tensors="pt", **self._model_facts, **media_inputs)
        except ValueError as error:
            raise InvalidRequestError("messages", f"are refused by the model's processor: {error}") from None
        token_ids = inputs.pop("input_ids")[0].numpy().astype(np.int32)
        inputs.pop("attention_mask", None)
        return EncodedPrompt(token_ids, dict(inputs), audio_in_video)

    def decode(self, token_ids: list[int]) -> str:
        """The text of answer ids, without special tokens."""
        # As the tokenizer's own decode() does it for byte-level tokenizers, in a fifth of the time: once for each id.
        text: str = self.tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _own_processor(self) -> Any:
        # Encoding sets padding and truncation on the tokenizer, which fails while another thread uses it.
        if not hasattr(self._local, "processor"):
            self._local.processor = copy.deepcopy(self._processor)
        return self._local.processor

    def _message(
        self, request: ThinkerRequest, index: int, message: Mapping[str, Any], prompt: RenderedPrompt
    ) -> dict[str, Any]:
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequestError(where, f"must be an object with role and content, got {message!r}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise InvalidRequestError(f"{where}.role", f"must be one of {', '.join(ROLES)}; got {role!r}")
        rendered = {key: message[key] for key in ("tool_calls", "tool_call_id") if key in message} | {"role": role}
        for j, call in enumerate(message.get("tool_calls", ())):
            self._plain(json.dumps(call, ensure_ascii=False), f"{where}.tool_calls[{j}]")
        if isinstance(content, str):
            return rendered | {"content": self._plain(content, f"{where}.content")}
        if not isinstance(content, Sequence):
            raise InvalidRequestError(f"{where}.content", f"must be a string or a list of parts, got {content!r}")
        parts = [self._part(request, f"{where}.content[{j}]", part, prompt) for j, part in enumerate(content)]
        return rendered | {"content": parts}

    def _part(
        self, request: ThinkerRequest, where: str, part: Mapping[str, Any], prompt: RenderedPrompt
    ) -> dict[str, str]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise InvalidRequestError(f"{where}.text", f"must be a string, got {part.get('text')!r}")
            return {"type": "text", "text": self._plain(part["text"], f"{where}.text")}
        if kind not in MEDIA_TYPES:
            raise InvalidRequestError(where, f"must have a type of text, {', '.join(MEDIA_TYPES)}; got {part!r}")
        index = part.get("media")
        if type(index) is not int or not 0 <= index < len(request.media):
            have = f"an index below {len(request.media)}" if request.media else "an index, but no media were sent"
            raise InvalidRequestError(f"{where}.media", f"must be {have}; got {index!r}")
        self._decode(kind, request.media[index], where, prompt)
        return {"type": kind}

    def _plain(self, text: str, where: str) -> str:
        for token in self._media_tokens:
            if token in text:
                raise InvalidRequestError(where, f"must not hold {token!r}, which stands for media in the prompt")
        return text

    def _decode(self, kind: str, data: bytes, where: str, prompt: RenderedPrompt) -> None:
        audio_limits = {"rate_hz": self._rate_hz, "min_samples": self._min_samples}
        if kind == "image":
            prompt.images.append(media.decode_image(data, where, self._config))
        elif kind == "audio":
            prompt.audio.append(media.decode_audio(data, where, self._config, **audio_limits))
            if prompt.audio_of_video is not None:
                prompt.audio_of_video.append(None)
        else:
            if prompt.audio_of_video is not None:
                prompt.audio.append(media.decode_video_audio(data, where, self._config, **audio_limits))
                prompt.audio_of_video.append(len(prompt.videos))
            prompt.videos.append(media.decode_video(data, where, self._config))
