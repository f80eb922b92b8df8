"""Prompt rows between the engine that makes them and the caller who fetches them."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict

from triton_omni.errors import (
    InvalidRequestError,
    NotFoundError,
    OmniError,
    RequestCancelledError,
    RequestTimeoutError,
)
from triton_omni.pipeline.stages import Int32, PromptRows, ThinkerEvent


@dataclasses.dataclass(slots=True)
class _Place:
    wanted: bool
    positions: Int32 | None = None
    rows: PromptRows | None = None
    fetched: bool = False
    error: OmniError | None = None

    @property
    def is_decided(self) -> bool:
        """Whether nothing is left to wait for, also because somebody else has waited for the same rows."""
        return self.fetched or self.rows is not None or self.error is not None


class RowsShelf:
    """One place per open request. Rows nobody has fetched outlive their request, those of the last ``keep`` only."""

    def __init__(self, stage: str, keep: int) -> None:
        self._stage = stage
        self._keep = keep
        self._changed = threading.Condition()
        self._open: dict[str, _Place] = {}
        self._left: OrderedDict[str, _Place] = OrderedDict()

    def open(self, request_id: str, *, wanted: bool) -> None:
        with self._changed:
            self._left.pop(request_id, None)
            self._open[request_id] = _Place(wanted)

    def note(self, request_id: str, positions: Int32) -> None:
        """The positions that an open request's rows belong to, int32 [3, P]."""
        with self._changed:
            self._open[request_id].positions = positions

    def positions(self, request_id: str) -> Int32 | None:
        """As noted, of a request that is over as well while its rows may still come; None: it waits for none."""
        with self._changed:
            place = self._open.get(request_id) or self._left.get(request_id)
            return None if place is None else place.positions

    def put(self, request_id: str, rows: PromptRows) -> None:
        """Rows of a request that has a place; others are dropped."""
        with self._changed:
            place = self._open.get(request_id) or self._left.get(request_id)
            if place is not None and place.wanted:
                place.rows = rows
                self._changed.notify_all()

    def close(self, request_id: str, error: OmniError | None = None) -> None:
        """The request is over: without ``error`` its rows stay (or may still come), with it they go."""
        with self._changed:
            place = self._open.pop(request_id, None)
            if place is None:
                return
            place.error = error
            if error is None and place.wanted and not place.fetched:
                self._left[request_id] = place
                while len(self._left) > self._keep:
                    self._forget(*self._left.popitem(last=False))
            self._changed.notify_all()

    def end(self, request_id: str, last: ThinkerEvent | OmniError) -> None:
        """``close`` by a request's last event."""
        if isinstance(last, OmniError):
            self.close(request_id, last)
        elif last.finish_reason == "cancelled":
            self.close(request_id, RequestCancelledError(f"request {request_id!r} was cancelled"))
        else:
            self.close(request_id)

    def drop(self, request_id: str) -> None:
        """Nobody will fetch these."""
        with self._changed:
            place = self._left.pop(request_id, None)
            if place is not None:
                self._forget(request_id, place)

    def take(self, request_id: str, timeout_s: float) -> PromptRows:
        """Waits for the rows, and hands them out once; of several who wait, to one.

        Raises: NotFoundError, InvalidRequestError when they were not asked for, RequestTimeoutError, or the error that
        the request was closed with.
        """
        with self._changed:
            place = self._open.get(request_id) or self._left.get(request_id)
            if place is None:
                raise NotFoundError("request_id", f"no open request {request_id!r} whose rows are still to be fetched")
            if not place.wanted:
                raise InvalidRequestError(
                    "want_rows", f"must be true in request {request_id!r} for its rows to be kept"
                )
            if not self._changed.wait_for(lambda: place.is_decided, timeout_s):
                raise RequestTimeoutError(
                    f"no rows of request {request_id!r} within {timeout_s:g} s", field=self._stage
                )
            if place.fetched:
                raise NotFoundError("request_id", f"the rows of request {request_id!r} have been fetched")
            if place.rows is None:
                assert place.error is not None
                raise place.error
            rows, place.rows, place.fetched = place.rows, None, True
            self._left.pop(request_id, None)
            return rows

    def fail(self, error: OmniError) -> None:
        """No more rows will come: whoever waits, or will ask for what is missing, gets ``error``."""
        with self._changed:
            for place in (*self._open.values(), *self._left.values()):
                place.error = place.error or error
            self._changed.notify_all()

    def _forget(self, request_id: str, place: _Place) -> None:
        place.error = NotFoundError("request_id", f"the rows of request {request_id!r} are no longer kept")
        self._changed.notify_all()
