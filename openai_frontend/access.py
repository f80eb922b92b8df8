"""Who may ask, and how often: keys, then limits. Plain ASGI, so that a refused request's body is never read.

Everything but ``OPEN`` needs a key when there are keys. It comes as ``Authorization: Bearer KEY``; a WebSocket of a
browser, which cannot send headers, names it among its subprotocols as ``openai-insecure-api-key.KEY``.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import time
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from openai_frontend import errors
from openai_frontend.keys import KeyRing

# The page asks for the key, so it cannot need one.
OPEN = frozenset({"/", "/docs", "/health/live", "/health/ready", "/metrics", "/version", "/openapi.json"})
OPEN_BELOW = ("/static/",)
SUBPROTOCOL_PREFIX = "openai-insecure-api-key."
_READ_ONLY = ("GET", "HEAD", "OPTIONS")
# With this many clients, those that have all their requests left are forgotten.
_MANY_CLIENTS = 10_000


class KeyMiddleware:
    """Refuses who brings no key of ours with a 401. ``protected``: paths of ``OPEN`` that need one all the same."""

    def __init__(self, app: ASGIApp, keys: KeyRing, protected: Iterable[str] = ()) -> None:
        self.app = app
        self.keys = keys
        self.open = OPEN - set(protected)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not self.keys:
            return await self.app(scope, receive, send)
        if scope["path"] in self.open or scope["path"].startswith(OPEN_BELOW):
            return await self.app(scope, receive, send)
        key = _key(Headers(scope=scope))
        name = self.keys.identify(key) if key else None
        if name is None:
            what = "is none of this server's" if key else "is missing; send the header 'Authorization: Bearer KEY'"
            return await errors.response(errors.UnauthorizedError(f"the API key {what}"))(scope, receive, send)
        scope.setdefault("state", {})["client"] = f"key {name}"
        await self.app(scope, receive, send)


def _key(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    for protocol in headers.get("sec-websocket-protocol", "").split(","):
        if protocol.strip().startswith(SUBPROTOCOL_PREFIX):
            return protocol.strip().removeprefix(SUBPROTOCOL_PREFIX)
    return ""


@dataclasses.dataclass(slots=True)
class _Client:
    """``left``: requests that may come at once; grows by the rate up to the rate of a minute."""

    left: float
    seen_s: float
    open_requests: int = 0


class LimitMiddleware:
    """At most ``requests_per_minute`` (as many at once after a quiet minute) and ``max_concurrent`` open ones per key,
    or per client address without keys; 0: no limit. Counts what makes answers: WebSockets, and all but reading methods.
    """

    def __init__(
        self,
        app: ASGIApp,
        requests_per_minute: int,
        max_concurrent: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.app = app
        self.requests_per_minute = requests_per_minute
        self.max_concurrent = max_concurrent
        self._clock = clock
        self._clients: dict[str, _Client] = {}
        self._forget_at = _MANY_CLIENTS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limited = self.requests_per_minute or self.max_concurrent
        makes_answers = scope["type"] == "websocket" or (scope["type"] == "http" and scope["method"] not in _READ_ONLY)
        if not limited or not makes_answers:
            return await self.app(scope, receive, send)
        client = self._client(_client_name(scope))
        if refusal := self._refusal(client):
            return await errors.response(refusal)(scope, receive, send)
        client.left -= 1 if self.requests_per_minute else 0
        client.open_requests += 1
        try:
            await self.app(scope, receive, send)
        finally:
            client.open_requests -= 1

    def _client(self, name: str) -> _Client:
        now_s, full = self._clock(), float(self.requests_per_minute)
        if name not in self._clients:
            if len(self._clients) >= self._forget_at:
                self._forget(now_s)
            self._clients[name] = _Client(full, now_s)
        client = self._clients[name]
        client.left = self._left(client, now_s)
        client.seen_s = now_s
        return client

    def _left(self, client: _Client, now_s: float) -> float:
        grown = client.left + (now_s - client.seen_s) * self.requests_per_minute / 60
        return min(float(self.requests_per_minute), grown)

    def _forget(self, now_s: float) -> None:
        def counts(client: _Client) -> bool:
            return client.open_requests > 0 or self._left(client, now_s) < self.requests_per_minute

        self._clients = {name: client for name, client in self._clients.items() if counts(client)}
        self._forget_at = max(_MANY_CLIENTS, 2 * len(self._clients))

    def _refusal(self, client: _Client) -> errors.RateLimitError | None:
        if self.max_concurrent and client.open_requests >= self.max_concurrent:
            return errors.RateLimitError(
                f"this client may have {self.max_concurrent} requests open at once; wait for one to end", 1
            )
        if self.requests_per_minute and client.left < 1:
            wait_s = math.ceil((1 - client.left) * 60 / self.requests_per_minute)
            return errors.RateLimitError(
                f"this client may send {self.requests_per_minute} requests a minute; the next in {wait_s} s", wait_s
            )
        return None


def _client_name(scope: Scope) -> str:
    """The key's name or the address; of an IPv6 address its /64 network, which one client has to itself."""
    named: str | None = scope.get("state", {}).get("client")
    if named:
        return named
    host = scope["client"][0] if scope.get("client") else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"address {host}"
    if address.version == 6:
        return f"address {ipaddress.ip_network((int(address) >> 64 << 64, 64))}"
    return f"address {address}"
