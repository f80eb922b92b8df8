"""Range checks of the null engines' configurations."""

from __future__ import annotations

import math

from triton_omni.errors import InvalidRequestError


def at_least(config: object, **lows: float) -> None:
    """Every named field of ``config`` is finite and not below its limit. Raises InvalidRequestError naming it."""
    for name, low in lows.items():
        if not low <= getattr(config, name) < math.inf:
            raise InvalidRequestError(name, f"must be at least {low:g}, got {getattr(config, name)}")
