"""Where an answer ends: end ids, context and token limits."""

from __future__ import annotations

from triton_omni.errors import CheckpointError, ConfigError, InvalidRequestError
from triton_omni.model_config import ModelConfig
from triton_omni.sampling import ThinkerSampling


def eos_token_ids(model_config: ModelConfig) -> frozenset[int]:
    """im_end of config.json and what generation_config.json names. Raises CheckpointError when there is none."""
    ids: set[int] = set()
    for value in (
        model_config.raw.get("im_end_token_id"),
        model_config.generation.get("eos_token_id"),
        model_config.generation.get("thinker_eos_token_id"),
    ):
        ids.update([value] if isinstance(value, int) else value or [])
    if not ids:
        raise CheckpointError(f"{model_config.path / 'config.json'}: no 'im_end_token_id', so no answer would end")
    return frozenset(ids)


def context_tokens(model_config: ModelConfig, max_model_len: int) -> int:
    """Prompt plus answer. Raises ConfigError when more is asked for than the checkpoint has."""
    most = model_config.context_tokens
    if max_model_len > most:
        raise ConfigError(
            f"must be at most {most}, the checkpoint's context; got {max_model_len}", field="max_model_len"
        )
    return max_model_len or most


def check_token_ids(sampling: ThinkerSampling, vocab_size: int) -> None:
    """Raises InvalidRequestError for ids that no token has."""
    for field, token_ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(field, f"must hold token ids in [0, {vocab_size - 1}], got {token_id}")


def check_prompt_tokens(prompt_tokens: int, context: int) -> None:
    """Raises InvalidRequestError when the prompt leaves no room for a single answer token."""
    if prompt_tokens + 1 > context:
        raise InvalidRequestError(
            "messages",
            f"make a prompt of {prompt_tokens} tokens; the context of {context} leaves room for at most {context - 1}",
        )


def max_answer_tokens(sampling: ThinkerSampling, prompt_tokens: int, context: int, default: int | None) -> int:
    """``sampling.max_tokens``, else ``default``, but never more than the prompt leaves of the context."""
    asked = sampling.max_tokens if sampling.max_tokens is not None else default
    room = context - prompt_tokens
    return room if asked is None else min(asked, room)
