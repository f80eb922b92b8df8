"""Which requests an engine takes in."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from triton_omni.errors import CapacityError, InvalidRequestError, OmniError
from triton_omni.pipeline.stages import ThinkerRequest


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """``max_open``: requests at once, waiting ones included. ``speaks``: whether the checkpoint has a talker."""

    stage: str
    max_open: int
    speaks: bool = dataclasses.field(kw_only=True)

    def refusal(self, request: ThinkerRequest, open_ids: Collection[str]) -> OmniError | None:
        """Why ``request`` cannot be taken in beside those that are open."""
        if request.request_id in open_ids:
            return InvalidRequestError("request_id", f"must be new; {request.request_id!r} is still open")
        if request.want_rows and not self.speaks:
            return InvalidRequestError("want_rows", "must be false: this checkpoint has no speech output")
        if len(open_ids) >= self.max_open:
            return CapacityError(f"{len(open_ids)} requests are open, the most that are accepted", field=self.stage)
        return None
