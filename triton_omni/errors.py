"""The errors of the runtime, and the one-line form in which they cross Triton.

    OmniError                     anything that ends a request
    ├── InvalidRequestError       the caller can mend it; names the field         HTTP 400
    │   └── NotFoundError         a name that does not exist here                 HTTP 404
    ├── CapacityError             full at the moment, try again                   HTTP 429
    ├── RequestCancelledError     the caller left                                 (nobody to tell)
    ├── RequestTimeoutError       a stage or the request took too long            HTTP 504
    ├── StageError                a stage failed; names the stage                 HTTP 500
    └── ConfigError               a stage's configuration is wrong (at load)
        └── CheckpointError       config.json or tensors do not fit

Triton carries an error as one string. ``to_wire`` writes ``code [field]: message``; ``from_wire`` finds that form
inside whatever a server has put around it and builds the same error again.
"""

from __future__ import annotations

import re


class OmniError(Exception):
    """Ends one request. ``code`` is the machine-readable kind, ``field`` what the error is about (may be None)."""

    code = "internal_error"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def to_wire(self) -> str:
        """``code [field]: message`` on one line."""
        field = f" [{self.field}]" if self.field else ""
        return f"{self.code}{field}: {' '.join(self.message.split())}"


class InvalidRequestError(OmniError):
    """The request itself is wrong. The message says what would be accepted."""

    code = "invalid_request"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message, field=field)


class NotFoundError(InvalidRequestError):
    """The request names something that does not exist here."""

    code = "not_found"


class CapacityError(OmniError):
    """No room at the moment."""

    code = "overloaded"


class RequestCancelledError(OmniError):
    """The caller asked for the end, or went away."""

    code = "cancelled"


class RequestTimeoutError(OmniError):
    """Something took longer than its limit."""

    code = "timeout"


class StageError(OmniError):
    """A stage failed while it served the request; ``field`` is the stage's name."""

    code = "stage_failed"

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message, field=stage)


class ConfigError(OmniError):
    """A stage's configuration cannot be used; raised at load."""

    code = "bad_configuration"


class CheckpointError(ConfigError):
    """config.json, generation_config.json or the tensors do not fit this model."""

    code = "bad_checkpoint"


_FIELD_FIRST: dict[str, type[InvalidRequestError] | type[StageError]] = {
    cls.code: cls for cls in (InvalidRequestError, NotFoundError, StageError)
}
_PLAIN: dict[str, type[OmniError]] = {
    cls.code: cls
    for cls in (OmniError, CapacityError, RequestCancelledError, RequestTimeoutError, ConfigError, CheckpointError)
}
_WIRE = re.compile(r"\b(?P<code>" + "|".join([*_FIELD_FIRST, *_PLAIN]) + r")(?: \[(?P<field>.+?)\])?: (?P<message>.*)")


def from_wire(text: str, *, stage: str) -> OmniError:
    """The error that ``to_wire`` wrote, or a StageError of ``stage`` with the text when it is somebody else's."""
    match = _WIRE.search(text)
    if match is None:
        return StageError(stage, text)
    code, field, message = match["code"], match["field"], match["message"]
    if code in _FIELD_FIRST:
        return _FIELD_FIRST[code](field or "request", message)
    return _PLAIN[code](message, field=field)
