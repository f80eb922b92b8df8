"""Frozen dataclasses from mappings: unknown keys raise and name the nearest known one, values are type-checked."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from triton_omni.errors import InvalidRequestError

T = TypeVar("T")


def unknown_key_message(key: str, known: Iterable[str]) -> str:
    """``is not known; did you mean 'x'? Known: …``."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"is not known{hint} Known: {', '.join(names)}"


def from_mapping(cls: type[T], values: Mapping[str, Any], *, where: str = "", base: T | None = None) -> T:
    """``cls(**values)`` on top of ``base``; ``where`` prefixes field names in errors (``talker.`` say).

    Accepted field types: bool, int, float, str, tuples of int or str, and ``| None`` of these. An int is taken for a
    float, nothing else is converted. The dataclass's own ``__post_init__`` checks ranges and raises
    InvalidRequestError with the bare field name; the prefix is added here.

    Raises: InvalidRequestError naming the field.
    """
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in names:
            raise InvalidRequestError(f"{where}{key}", unknown_key_message(key, names))
        checked[key] = _checked(value, hints[key], f"{where}{key}")
    try:
        if base is not None:
            return dataclasses.replace(base, **checked)  # type: ignore[type-var]
        return cls(**checked)
    except InvalidRequestError as error:
        raise type(error)(f"{where}{error.field}", error.message) from None
    except TypeError as error:
        raise InvalidRequestError(where.rstrip(".") or cls.__name__, str(error)) from None


def _checked(value: Any, hint: Any, field: str) -> Any:
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(arg for arg in hint.__args__ if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            raise InvalidRequestError(field, f"must be a list of {item.__name__}, got {value!r}")
        return tuple(_checked(v, item, f"{field}[{i}]") for i, v in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise InvalidRequestError(field, f"must be {_NAMES[hint]}, got {value!r}")
    return value


_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
