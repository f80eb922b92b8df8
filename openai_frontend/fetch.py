"""Files behind http(s) addresses, fetched under guard.

Only hosts on the list are asked, and only where their addresses are public: a name is resolved once, all its addresses
are checked, and the connection goes to a checked address, so that a second answer of the name server changes nothing.
Redirects are followed by hand and each target is checked like the first address. Nothing is unpacked, no proxy of the
environment is used, and what is read is counted while it comes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import httpcore

from triton_omni.errors import ConfigError, InvalidRequestError

MAX_REDIRECTS = 3
MAX_FETCHES = 16  # at once, in this process
MAX_URL_LENGTH = 8_192
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_SAFE_IN_TARGET = "%/:=&?~+!$,;'@()*[]"

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]

_RELAYS_6TO4 = ipaddress.ip_network("192.88.99.0/24")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NOT_UNICAST = tuple(map(ipaddress.ip_network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: IPAddress) -> bool:
    """Whether anybody on the internet may be found there: no private, loopback, link-local, shared, multicast, reserved
    or documentation address, nor one of these inside an IPv6 form of it (mapped, NAT64; tunnels are refused).
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if address not in _GLOBAL_UNICAST or any(address in network for network in _NOT_UNICAST):
            return False
    elif address in _RELAYS_6TO4:
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


@dataclasses.dataclass(frozen=True, slots=True)
class AllowedHost:
    """``example.com``, ``*.example.com`` (what is below it) or ``*``, with ``:port`` for another than the scheme's."""

    pattern: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> AllowedHost:
        """Raises: ConfigError."""
        name, colon, port = text.strip().lower().partition(":")
        plain = name.removeprefix("*.") if name != "*" else "any"
        if not plain or not all(c.isalnum() or c in "-._" for c in plain) or (colon and not port.isdecimal()):
            raise ConfigError(
                f"must hold host names (example.com, *.example.com, example.com:8443 or *), got {text!r}",
                field="allowed_media_domains",
            )
        return cls(name.rstrip("."), int(port) if colon else None)

    def covers(self, host: str, port: int, scheme: str) -> bool:
        if port != (self.port or _PORTS[scheme]):
            return False
        if self.pattern.startswith("*."):
            return host.endswith(self.pattern[1:])
        return self.pattern in ("*", host)


@dataclasses.dataclass(frozen=True, slots=True)
class FetchRules:
    """What may be fetched. ``timeout_s`` bounds one file from the name look-up to its last byte."""

    hosts: tuple[AllowedHost, ...] = ()
    timeout_s: float = 10.0
    is_allowed: Callable[[IPAddress], bool] = is_public

    @classmethod
    def of(cls, hosts: Iterable[str], timeout_s: float) -> FetchRules:
        """Raises: ConfigError."""
        return cls(tuple(map(AllowedHost.parse, hosts)), timeout_s)


class _Refused(Exception):
    """Why an address is not asked, in words."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """An address taken apart once: what is checked is what is asked."""

    scheme: str
    host: str
    port: int
    path: str
    url: str

    @classmethod
    def parse(cls, url: str) -> _Target:
        if len(url) > MAX_URL_LENGTH:
            raise _Refused(f"is longer than the {MAX_URL_LENGTH} characters an address may have")
        if any(ord(c) <= 0x20 or c in "\\\x7f" for c in url):
            raise _Refused("holds spaces, backslashes or control characters")
        try:
            parts = urlsplit(url)
            scheme, port = parts.scheme, parts.port or _PORTS.get(parts.scheme, 0)
            host = (parts.hostname or "").rstrip(".")
            host = host if ":" in host else host.encode("idna").decode("ascii")
        except ValueError:  # UnicodeError is one
            raise _Refused("is no valid address") from None
        if scheme not in _PORTS:
            raise _Refused("leads away from http and https")
        if not host or parts.username is not None or parts.password is not None:
            raise _Refused("must be http(s)://host/path, without a user's name")
        path = quote(parts.path or "/", safe=_SAFE_IN_TARGET)
        query = f"?{quote(parts.query, safe=_SAFE_IN_TARGET)}" if parts.query else ""
        return cls(scheme, host, port, path + query, url)

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


class Fetcher:
    """Fetches by ``rules``. ``resolve`` gives the addresses of a host; ``ssl_context``: None, the usual roots."""

    def __init__(
        self, rules: FetchRules, resolve: Resolver | None = None, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._rules = rules
        self._backend = _GuardedBackend(rules.is_allowed, resolve or _resolve)
        self._slots = asyncio.Semaphore(MAX_FETCHES)
        self._ssl_context = ssl_context

    @property
    def enabled(self) -> bool:
        return bool(self._rules.hosts)

    async def fetch(self, url: str, *, field: str, count: Callable[[int], None]) -> bytes:
        """The file at ``url``. ``count`` is told how many bytes are to come or have come, and raises when that is too
        much. Raises: InvalidRequestError naming ``field``.
        """
        try:
            async with asyncio.timeout(self._rules.timeout_s), self._slots:
                return await self._follow(url, count)
        except _Refused as error:
            raise InvalidRequestError(field, str(error)) from None
        except TimeoutError:
            raise InvalidRequestError(field, f"could not be fetched within {self._rules.timeout_s:g} s") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            raise InvalidRequestError(field, f"could not be fetched ({type(error).__name__})") from None

    async def _follow(self, url: str, count: Callable[[int], None]) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            target = self._permitted(url)
            answer = await self._get(target, count)
            if isinstance(answer, bytes):
                return answer
            url = urljoin(target.url, answer)
        raise _Refused(f"redirects more than {MAX_REDIRECTS} times")

    def _permitted(self, url: str) -> _Target:
        target = _Target.parse(url)
        if not any(host.covers(target.host, target.port, target.scheme) for host in self._rules.hosts):
            known = ", ".join(f"{h.pattern}:{h.port}" if h.port else h.pattern for h in self._rules.hosts)
            where = target.host_header[:128]
            raise _Refused(f"leads to {where!r}, and this server fetches only from: {known}")
        return target

    async def _get(self, target: _Target, count: Callable[[int], None]) -> bytes | str:
        """The file, or where a redirect leads."""
        headers = [("Host", target.host_header), ("Accept", "*/*"), ("Accept-Encoding", "identity")]
        address = httpcore.URL(
            scheme=target.scheme.encode(), host=target.host.encode(), port=target.port, target=target.path.encode()
        )
        if target.scheme == "https" and self._ssl_context is None:  # reads all root certificates
            self._ssl_context = await asyncio.to_thread(httpcore.default_ssl_context)
        async with (
            httpcore.AsyncConnectionPool(self._ssl_context, network_backend=self._backend) as connections,
            connections.stream("GET", address, headers=[*headers, ("User-Agent", "triton-omni")]) as response,
        ):
            told = {name.lower(): value.decode("latin-1") for name, value in response.headers}
            if response.status in _REDIRECTS and b"location" in told:
                return told[b"location"]
            if response.status != 200:
                raise _Refused(f"could not be fetched: the server answered {response.status}")
            if told.get(b"content-encoding", "identity").lower() != "identity":
                raise _Refused("could not be fetched: the server compressed the file though asked not to")
            if (declared := told.get(b"content-length", "")).isdecimal():
                count(int(declared[:18]))
            content = bytearray()
            async for piece in response.aiter_stream():
                content += piece
                count(len(content))
            return bytes(content)


class _GuardedBackend(httpcore.AsyncNetworkBackend):
    """Connects to nothing but allowed addresses."""

    def __init__(self, is_allowed: Callable[[IPAddress], bool], resolve: Resolver) -> None:
        self._is_allowed, self._resolve = is_allowed, resolve
        self._tcp = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        failure: Exception = httpcore.ConnectError("no address")
        for address in await self._checked(host, port):
            try:
                return await self._tcp.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def _checked(self, host: str, port: int) -> Sequence[str]:
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            raise _Refused("names a host that cannot be found") from None
        if not all(self._is_allowed(ipaddress.ip_address(address.partition("%")[0])) for address in addresses):
            raise _Refused("leads to an address that is not public")
        return addresses


async def _resolve(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
