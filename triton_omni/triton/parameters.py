"""What config.pbtxt tells a model instance: the ``parameters`` of its config.pbtxt as a frozen config dataclass."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import logging
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from triton_omni import options
from triton_omni.errors import ConfigError, InvalidRequestError, OmniError
from triton_omni.model_config import CHECKPOINT_VARIABLE, ModelConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")

NULL_ENGINE = "null"
NULL_PREFIX = "null_"
DEVICES = "visible_devices"
"""The parameter with the accelerators that each replica sees: ``0,1;2,3`` are those of a first and a second one."""
_TRITON_OWN = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")
_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")  # CUDA, ROCm, XPU


@dataclasses.dataclass(frozen=True, slots=True)
class Instance:
    """One instance of a Triton model. ``parameters``: config.pbtxt's, as strings; ``kind``: "CPU", "GPU", "MODEL"."""

    model: str
    name: str
    kind: str
    device_id: int
    parameters: Mapping[str, str]

    @classmethod
    def from_args(cls, args: Mapping[str, str]) -> Instance:
        """From what Triton hands to ``initialize``. Carries out the parameter ``visible_devices``, so it comes before
        anything that looks for devices.
        """
        declared = json.loads(args["model_config"]).get("parameters", {})
        parameters = {key: value["string_value"] for key, value in declared.items() if key not in _TRITON_OWN}
        model, name = args["model_name"], args["model_instance_name"]
        if DEVICES in parameters:
            _show_devices(model, name, parameters.pop(DEVICES))
        return cls(
            model=model,
            name=name,
            kind=args["model_instance_kind"],
            device_id=int(args["model_instance_device_id"]),
            parameters=parameters,
        )

    @property
    def uses_null_engine(self) -> bool:
        """``engine: "null"``: no weights, scripted answers; see ``null_config``."""
        return self.parameters.get("engine") == NULL_ENGINE

    def checkpoint(self) -> ModelConfig:
        """The parameter ``checkpoint``, else what OMNI_CHECKPOINT names. Raises CheckpointError."""
        path = self.parameters.get("checkpoint") or os.environ.get(CHECKPOINT_VARIABLE)
        return ModelConfig.load(path) if path else ModelConfig.from_environment()

    def config(self, cls: type[T]) -> T:
        """``cls`` from the parameters. An instance of KIND_GPU whose ``device`` is "auto" gets its own GPU.

        Raises: ConfigError naming the parameter, and its nearest known one if it is unknown.
        """
        values = {key: value for key, value in self.parameters.items() if key != "checkpoint"}
        if "engine" not in _hints(cls) and values.pop("engine", "auto") != "auto":
            accepted = f"must be auto or {NULL_ENGINE}, got {self.parameters['engine']!r}"
            raise ConfigError(accepted, field=f"{self.model}: parameter engine")
        config = self._build(cls, values)
        if self.kind == "GPU" and getattr(config, "device", None) == "auto":
            config = dataclasses.replace(config, device=f"cuda:{self.device_id}")  # type: ignore[type-var]
        return config

    def split_config(self, first: type[T], second: type[U]) -> tuple[T, U]:
        """Two dataclasses that share the parameters; each gets those it knows. Raises ConfigError."""
        mine = {key: value for key, value in self.parameters.items() if key in _hints(first)}
        rest = {k: v for k, v in self.parameters.items() if k not in mine and k != "checkpoint"}
        known = [*_hints(first), *_hints(second)]
        for key in rest:
            if key not in known:
                raise ConfigError(options.unknown_key_message(key, known), field=f"{self.model}: parameter {key}")
        return self._build(first, mine), self._build(second, rest)

    def null_config(self, cls: type[T]) -> T:
        """``cls`` from ``max_sessions`` and the parameters named ``null_…``; the others belong to the real engine."""
        values = {k.removeprefix(NULL_PREFIX): v for k, v in self.parameters.items() if k.startswith(NULL_PREFIX)}
        if "max_sessions" in self.parameters and "max_sessions" in _hints(cls):
            values.setdefault("max_sessions", self.parameters["max_sessions"])
        return self._build(cls, values)

    def _build(self, cls: type[T], values: Mapping[str, str]) -> T:
        hints = _hints(cls)
        try:
            typed = {key: typed_value(key, value, hints.get(key, str)) for key, value in values.items()}
            return options.from_mapping(cls, typed)
        except InvalidRequestError as error:
            raise ConfigError(error.message, field=f"{self.model}: parameter {error.field}") from None


def _show_devices(model: str, name: str, devices: str) -> None:
    """``name``: of the instance, as Triton makes it from that of its group: MODEL_NUMBER_0."""
    replicas = devices.split(";")
    match = re.search(r"_(\d+)_\d+$", name)
    number = int(match[1]) if match else 0
    if number >= len(replicas):
        raise ConfigError(f"{devices!r} has nothing for replica {number}", field=f"{model}: parameter {DEVICES}")
    wanted = replicas[number].split(",")
    # Numbers count among what is visible already; all names where none is in use, since each stack knows its own.
    for variable in [name for name in _VISIBLE_DEVICES if os.environ.get(name)] or _VISIBLE_DEVICES:
        seen = os.environ.get(variable, "").split(",")
        os.environ[variable] = ",".join(seen[int(d)] if int(d) < len(seen) and seen != [""] else d for d in wanted)


def initializer(initialize: Callable[[Any, dict[str, str]], None]) -> Callable[[Any, dict[str, str]], None]:
    """Around a model's ``initialize``: Triton logs an exception's text alone, so this puts code and field into it. One
    that went well is told in the log, because Triton can lose its end (serve.processes.LoadingStubs).
    """

    @functools.wraps(initialize)
    def checked(model: Any, args: dict[str, str]) -> None:
        try:
            initialize(model, args)
        except OmniError as error:
            raise RuntimeError(error.to_wire()) from error
        # Each look through what a thinker on vLLM has loaded, every few hundred requests, kept all waiting for 0.35 s.
        gc.freeze()
        logger.info("%s is initialized", args["model_instance_name"])

    return checked


def typed_value(key: str, text: str, hint: Any) -> Any:
    """config.pbtxt's string as ``hint``: bool, int, float, str, a tuple (``4,8,16``), or ``| None`` of one (``none``).

    Raises InvalidRequestError naming ``key``.
    """
    if isinstance(hint, types.UnionType):
        if text.lower() == "none":
            return None
        hint = next(arg for arg in hint.__args__ if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return [typed_value(key, part.strip(), item) for part in text.split(",") if part.strip()]
    try:
        return _READ.get(hint, str)(text.strip())
    except (KeyError, ValueError):
        raise InvalidRequestError(key, f"must be {_NAMES[hint]}, got {text!r}") from None


def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


_READ: Mapping[Any, Callable[[str], Any]] = {
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    int: int,
    float: float,
}
_NAMES = {bool: "true or false", int: "an integer", float: "a number"}
