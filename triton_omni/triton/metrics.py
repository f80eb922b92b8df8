"""What an instance counts, as Prometheus metrics at Triton's metrics endpoint.

omni_sessions{model, instance, state}             gauge: sessions in each state; state "slots_free" counts empty slots
omni_requests_total{model, instance, outcome}     counter: requests that have ended
omni_messages_total{model, instance, kind}        counter: Triton messages, each "request" in and each "response" out
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from triton_omni.triton.parameters import Instance

logger = logging.getLogger(__name__)

PERIOD_S = 0.25
OUTCOMES = ("finished", "failed", "cancelled", "expired")
MESSAGES = ("request", "response")
"""These and the outcomes only grow."""


class StatsMetrics:
    """Reads ``stats`` (an engine's or a pipeline's) and ``messages`` (a responder's) four times a second on a thread of
    its own and sends what has changed: each value is a message to the server.
    """

    def __init__(
        self,
        instance: Instance,
        stats: Callable[[], Mapping[str, int]],
        messages: Callable[[], Mapping[str, int]],
        period_s: float = PERIOD_S,
    ) -> None:
        self._labels = {"model": instance.model, "instance": instance.name}
        self._stats, self._messages = stats, messages
        self._period_s = period_s
        self._families: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}
        self._sent: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{instance.name}-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; metrics leave with their instance."""
        self._stop.set()
        self._thread.join()
        self._metrics.clear()
        self._families.clear()

    def _run(self) -> None:
        while True:
            try:
                self._update()
            except Exception:
                logger.exception("metrics could not be updated")
            if self._stop.wait(self._period_s):
                return

    def _update(self) -> None:
        for key, value in {**self._stats(), **self._messages()}.items():
            if self._sent.get(key) == value:
                continue
            metric = self._metric(key)
            if key in OUTCOMES or key in MESSAGES:
                metric.increment(value - self._sent.get(key, 0))
            else:
                metric.set(value)
            self._sent[key] = value

    def _metric(self, key: str) -> Any:
        if key not in self._metrics:
            label = "outcome" if key in OUTCOMES else "kind" if key in MESSAGES else "state"
            self._metrics[key] = self._family(label).Metric(labels={**self._labels, label: key})
        return self._metrics[key]

    def _family(self, label: str) -> Any:
        if label not in self._families:
            name, description, kind = {
                "outcome": ("omni_requests_total", "Requests that have ended", pb_utils.MetricFamily.COUNTER),
                "kind": ("omni_messages_total", "Triton requests and responses", pb_utils.MetricFamily.COUNTER),
                "state": ("omni_sessions", "Sessions of a stage by state", pb_utils.MetricFamily.GAUGE),
            }[label]
            self._families[label] = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        return self._families[label]
