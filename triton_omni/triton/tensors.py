"""NumPy arrays to and from Triton's tensors: what every stage's wire is made of."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from triton_omni.errors import InvalidRequestError
from triton_omni.options import unknown_key_message
from triton_omni.pipeline.stages import NO_IDS, Int32

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""Tensors by name; absent optional ones are not in it."""


def string_tensor(name: str, *values: str | bytes) -> Any:
    """TYPE_STRING [len(values)]."""
    return pb_utils.Tensor(name, np.array([v.encode() if isinstance(v, str) else v for v in values], np.object_))


@functools.cache
def constant_string(name: str, text: str) -> Any:
    """``string_tensor`` for what most responses say: one tensor for all of them, which Triton puts into shared memory
    once. To make one takes 10 µs, a third of a small response. A responder's alone: it sends one response at a time.
    """
    return string_tensor(name, text)


@functools.cache
def constant_empty(name: str, dtype: npt.DTypeLike) -> Any:
    """An ``array_tensor`` without elements, as ``constant_string`` is one."""
    return array_tensor(name, np.empty(0, dtype))


def forget_constants() -> None:
    """Let go of them before the process ends: at its very end there is no shared memory any more to free."""
    constant_string.cache_clear()
    constant_empty.cache_clear()


def array_tensor(name: str, array: npt.NDArray[Any]) -> Any:
    """A numeric tensor of ``array``'s dtype and shape."""
    return pb_utils.Tensor(name, np.ascontiguousarray(array))


def flag_tensor(name: str, value: bool) -> Any:
    """TYPE_BOOL [1]."""
    return pb_utils.Tensor(name, np.array([value]))


def arrays(tensors: Sequence[Any]) -> Arrays:
    """Copies: a tensor's memory is Triton's and goes when its request or response does."""
    return {tensor.name(): np.array(tensor.as_numpy()) for tensor in tensors}


def read_string(values: Arrays, name: str, default: str = "") -> str:
    """The one string of ``name``; ``default`` when it is absent or empty. Raises InvalidRequestError."""
    if name not in values or values[name].size == 0:
        return default
    if values[name].size != 1:
        raise InvalidRequestError(name, f"must hold one string, got {values[name].size}")
    item = values[name].ravel()[0]
    try:
        return item.decode() if isinstance(item, bytes) else str(item)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(name, f"must be UTF-8: {error}") from None


def read_files(values: Arrays, name: str) -> tuple[bytes, ...]:
    """Each element's bytes; none when ``name`` is absent."""
    return tuple(bytes(item) for item in values[name].ravel()) if name in values else ()


def read_ids(values: Arrays, name: str) -> Int32:
    """int32 [n]; empty when ``name`` is absent."""
    return values[name].astype(np.int32, copy=False).ravel() if name in values else NO_IDS


def read_flag(values: Arrays, name: str) -> bool:
    """False when ``name`` is absent."""
    return bool(values[name].any()) if name in values else False


def read_json(values: Arrays, name: str, keys: Sequence[str]) -> dict[str, Any]:
    """The JSON object of the string ``name`` without its nulls; {} when it is absent.

    Raises: InvalidRequestError for text that is no JSON object and for keys beside ``keys``.
    """
    try:
        content = json.loads(read_string(values, name, "{}"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(name, f"must be JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequestError(name, f"must be a JSON object, got {type(content).__name__}")
    for key in content:
        if key not in keys:
            raise InvalidRequestError(key, unknown_key_message(key, keys))
    return {key: value for key, value in content.items() if value is not None}


def read_object(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The JSON object ``content[key]``, {} when absent. Raises InvalidRequestError."""
    value = content.get(key, {})
    if not isinstance(value, dict):
        raise InvalidRequestError(key, f"must be an object, got {value!r}")
    return value
