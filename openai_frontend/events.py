"""Server-sent events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson


def event(body: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(body)
