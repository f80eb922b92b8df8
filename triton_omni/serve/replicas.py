"""Keeps a stage going when one of its replicas dies: takes it out at once, and starts it again.

Triton itself goes on handing requests to an instance whose process is gone, and never starts it again. But it takes
instances out, and new ones in, when a model is loaded again with other instance groups, and leaves the rest alone.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable
from typing import Any, Self

from triton_omni.errors import ConfigError
from triton_omni.serve.processes import Exits, Watched, model_stubs
from triton_omni.serve.repository import read_config, write_config
from triton_omni.serve.tritonserver import TritonServer

logger = logging.getLogger(__name__)

REPLACEABLE = ("thinker", "talker", "code2wav")
"""Not omni_bls: when one of its processes goes, nobody is left to tell its clients, or to end their sessions."""
PROBATION_S = 60.0


class Replicas:
    """The stubs that a server has now. Its model repository is changed as they die.

    A replica that dies again within PROBATION_S of its start is left out, and so is one that takes longer than
    ``load_timeout_s`` to load. Loading runs on a thread of its own: a large model takes minutes.
    """

    def __init__(self, server: TritonServer, load_timeout_s: float | None = None) -> None:
        self._server = server
        self._load_timeout_s = load_timeout_s
        self._exits = Exits()
        self._lock = threading.Lock()  # guards what follows
        self._alive: dict[str, set[str]] = {}
        self._closed = False
        self._started_s: dict[str, float] = {}
        self._dead: queue.SimpleQueue[Watched | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)
        for stub in model_stubs(server.pid):
            self._add(stub)

    def watch(self, others: Iterable[Watched]) -> Watched:
        """Block until a process ends without which nothing goes on: one of ``others``, or a stage's last replica."""
        for process in others:
            self._add(process)
        self._thread.start()
        while True:
            ended = self._exits.wait()
            if ended.model not in REPLACEABLE or not self._others(ended):
                return ended
            self._dead.put(ended)

    def _add(self, process: Watched) -> None:
        with self._lock:
            if process.model:
                self._alive.setdefault(process.model, set()).add(process.instance)
        self._exits.add(process)

    def _others(self, dead: Watched) -> int:
        """How many replicas the stage has left."""
        with self._lock:
            self._alive[dead.model].discard(dead.instance)
            return len(self._alive[dead.model])

    def _run(self) -> None:
        while (dead := self._dead.get()) is not None:
            try:
                self._replace(dead)
            except Exception as error:  # whatever it was, the next one that dies is looked after
                if not self._closed:
                    unexpected = not isinstance(error, ConfigError)
                    logger.error("%s stays out: %s", dead.instance, error, exc_info=unexpected)

    def _replace(self, dead: Watched) -> None:
        with self._lock:
            left = len(self._alive[dead.model])
        logger.error(
            "%s (%s, process %d) died, and its sessions with it; replicas of %s left: %d",
            *(dead.name, dead.instance, dead.pid, dead.model, left),
        )
        directory = self._server.model_repository / dead.model
        whole = read_config(directory)
        rest = _without(whole, dead.instance)
        write_config(directory, rest)
        self._server.load(dead.model)
        age_s = time.monotonic() - self._started_s.get(dead.instance, float("-inf"))
        if age_s < PROBATION_S:
            logger.error("%s stays out: it died %.0f s after it had been started again", dead.instance, age_s)
            return
        write_config(directory, whole)
        began_s = time.monotonic()
        try:
            self._server.load(dead.model, self._load_timeout_s)
        except Exception:
            write_config(directory, rest)
            raise
        for stub in model_stubs(self._server.pid):
            if stub.instance == dead.instance:
                self._started_s[stub.instance] = time.monotonic()
                self._add(stub)
                logger.info("%s is there again, after %.1f s", stub.instance, time.monotonic() - began_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is replaced any more; a load under way ends with the server."""
        self._closed = True
        self._dead.put(None)


def _without(config: Any, instance: str) -> Any:
    """``config`` less the instance group of ``instance``, which Triton has named GROUP_0."""
    rest = type(config)()
    rest.CopyFrom(config)
    del rest.instance_group[:]
    rest.instance_group.extend(group for group in config.instance_group if f"{group.name}_0" != instance)
    if len(rest.instance_group) == len(config.instance_group):
        raise ConfigError(f"no instance group {instance.removesuffix('_0')!r}", field=f"model {config.name}")
    return rest
