"""Files from other hosts: what is fetched, and everything that is not. All traffic stays on loopback addresses."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import ssl

import pytest
import trustme

from openai_frontend.fetch import AllowedHost, Fetcher, FetchRules, is_public
from openai_frontend.media import Budget, MediaReader
from tests.openai_frontend.fakes import END, START, WITHIN_S, FakeEngine, LeavingClient, client_of
from tests.openai_frontend.loopback import Loopback, endless, loopback, ok, redirect, silent
from triton_omni.errors import ConfigError, InvalidRequestError

HERE = ipaddress.ip_address("127.0.0.1")
LIMIT = 1 << 20
FIELD = "messages[0].content[0].image_url.url"


class Names:
    """A name server that knows ``addresses``, and how often it was asked."""

    def __init__(self, **addresses: list[str]) -> None:
        self.addresses = {name.replace("_", "."): found for name, found in addresses.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if host not in self.addresses:
            raise OSError("no such name")
        return self.addresses[host]


def fetcher(
    *hosts: str, names: Names | None = None, timeout_s: float = WITHIN_S, is_allowed=lambda a: a == HERE
) -> Fetcher:
    rules = FetchRules.of(hosts, timeout_s)
    return Fetcher(dataclasses.replace(rules, is_allowed=is_allowed), names or Names(media_example=["127.0.0.1"]))


async def fetch(source: Fetcher, url: str, limit: int = LIMIT) -> bytes:
    budget = Budget(limit, limit)
    return await source.fetch(url, field=FIELD, count=lambda size: budget.count(FIELD, size))


async def refused(source: Fetcher, url: str, words: str, limit: int = LIMIT) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        await fetch(source, url, limit)
    assert raised.value.field == FIELD
    assert words in raised.value.message


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("100.64.0.1", "192.0.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "192.88.99.1"),
        *("224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "fe80::1", "fec0::1", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1", "3fff::1", "100::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::1"),
        *("2002:7f00:1::", "2002:0808:0808::", "2001:0:7f00:1::", "2001:10::1", "5f00::1"),
    ],
)
def test_addresses_that_are_not_public(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_that_are_public(address):
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    ("entry", "yes", "no"),
    [
        ("example.com", [("example.com", 80, "http"), ("example.com", 443, "https")], [("example.com", 8080, "http")]),
        (
            "example.com",
            [],
            [("a.example.com", 80, "http"), ("badexample.com", 80, "http"), ("example.co", 80, "http")],
        ),
        (
            "*.example.com",
            [("a.b.example.com", 80, "http")],
            [("example.com", 80, "http"), ("xexample.com", 80, "http")],
        ),
        ("Example.com:8443", [("example.com", 8443, "https")], [("example.com", 443, "https")]),
        ("*", [("anything", 443, "https")], [("anything", 22, "http"), ("anything", 443, "http")]),
    ],
)
def test_the_list_of_hosts(entry, yes, no):
    host = AllowedHost.parse(entry)
    assert all(host.covers(*target) for target in yes)
    assert not any(host.covers(*target) for target in no)


@pytest.mark.parametrize("entry", ["", "http://example.com", "example.com/path", "*.", "ex*mple.com", "a:b", "a b"])
def test_entries_that_are_no_hosts(entry):
    with pytest.raises(ConfigError, match="must hold host names"):
        AllowedHost.parse(entry)


@pytest.mark.asyncio
class TestFetching:
    async def test_a_file_comes_from_the_checked_address(self):
        names = Names(media_example=["127.0.0.1"])
        async with loopback({"/a%20b.png?x=1&y=%C3%A9": ok(b"picture")}) as server:
            source = fetcher(f"media.example:{server.port}", names=names)
            assert await fetch(source, f"http://Media.Example.:{server.port}/a%20b.png?x=1&y=é#part") == b"picture"
        assert f"Host: media.example:{server.port}\r\n" in server.requests[0]
        assert names.asked == ["media.example"]  # once: what was checked is what was connected to

    async def test_a_redirect_is_followed(self):
        async with loopback({"/a": redirect("/b", 307), "/b": redirect("c"), "/c": ok(b"found")}) as server:
            source = fetcher(f"media.example:{server.port}")
            assert await fetch(source, f"http://media.example:{server.port}/a") == b"found"

    async def test_a_certificate_must_be_the_name_s(self):
        """Though the connection goes to a number."""
        authority, server_side, ours = (
            trustme.CA(),
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
            ssl.create_default_context(),
        )
        authority.issue_cert("media.example").configure_cert(server_side)
        authority.configure_trust(ours)
        names = Names(media_example=["127.0.0.1"], other_example=["127.0.0.1"])
        async with loopback({"/": ok(b"picture")}, tls=server_side) as server:
            rules = dataclasses.replace(FetchRules.of([f"*:{server.port}"], WITHIN_S), is_allowed=lambda a: a == HERE)
            assert await fetch(Fetcher(rules, names, ours), f"https://media.example:{server.port}/") == b"picture"
            await refused(Fetcher(rules, names, ours), f"https://other.example:{server.port}/", "could not be fetched")
            await refused(Fetcher(rules, names), f"https://media.example:{server.port}/", "could not be fetched")
        assert len(server.requests) == 1

    async def test_another_address_of_the_name_is_tried(self):
        """The server is at the second one; nobody listens at the first."""
        names = Names(media_example=["127.0.0.9", "127.0.0.1"])
        async with loopback({"/": ok(b"found")}) as server:
            source = fetcher(f"media.example:{server.port}", names=names, is_allowed=lambda a: a.is_loopback)
            assert await fetch(source, f"http://media.example:{server.port}") == b"found"

    @pytest.mark.parametrize(
        "addresses",
        [["127.0.0.1"], ["10.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["::1"], ["::ffff:127.0.0.1"], ["fe80::1%eth0"]],
        ids=str,
    )
    async def test_a_name_that_leads_to_a_private_address(self, addresses):
        async with loopback({"/": ok(b"secret")}) as server:
            host = f"media.example:{server.port}"
            source = fetcher(host, names=Names(media_example=addresses), is_allowed=is_public)
            await refused(source, f"http://{host}/", "not public")
        assert server.requests == []

    @pytest.mark.parametrize(
        "host", ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "localhost", "[::1]", "[::ffff:7f00:1]", "[fe80::1]"]
    )
    async def test_numbers_and_local_names_that_lead_to_this_machine(self, host):
        source = Fetcher(FetchRules.of(["*"], WITHIN_S))
        await refused(source, f"http://{host}/", "not public")

    async def test_a_redirect_to_an_address_that_is_not_allowed(self):
        async with loopback({"/secret": ok(b"secret")}, "127.0.0.2") as inside:
            answers = {"/": redirect(f"http://127.0.0.2:{inside.port}/secret")}
            async with loopback(answers) as server:
                names = Names(**{"media_example": ["127.0.0.1"], "127_0_0_2": ["127.0.0.2"]})
                source = fetcher(f"media.example:{server.port}", f"*:{inside.port}", names=names)
                await refused(source, f"http://media.example:{server.port}/", "not public")
        assert (len(server.requests), inside.requests) == (1, [])

    @pytest.mark.parametrize(
        ("location", "words"),
        [
            ("http://elsewhere.example/", "fetches only from: media.example"),
            ("http://media.example/", "fetches only from: media.example"),  # another port
            ("file:///etc/passwd", "leads away from http"),
            ("ftp://media.example/", "leads away from http"),
            ("//user@media.example/", "without a user's name"),
            ("/", "more than 3 times"),
        ],
    )
    async def test_redirects_that_are_not_followed(self, location, words):
        async with loopback({"/": redirect(location)}) as server:
            names = Names(media_example=["127.0.0.1"], elsewhere_example=["127.0.0.1"])
            source = fetcher(f"media.example:{server.port}", names=names)
            await refused(source, f"http://media.example:{server.port}/", words)
        assert len(server.requests) <= 4

    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("http://elsewhere.example/", "fetches only from: media.example"),
            ("http://media.example:22/", "fetches only from: media.example"),
            ("http://media.example@elsewhere.example/", "user's name"),
            ("http://elsewhere.example\\@media.example/", "backslashes"),
            ("http://media.example/\r\nHost: x", "control characters"),
            ("http://", "user's name"),
            ("http://media.example:99999/", "no valid address"),
            ("http://[::1/", "no valid address"),
            ("http://" + "a" * 64 + ".example/", "no valid address"),
            ("http://media.example/" + "a" * 9_000, "8192 characters"),
        ],
    )
    async def test_addresses_that_are_not_asked(self, url, words):
        names = Names()
        await refused(fetcher("media.example", names=names), url, words)
        assert names.asked == []

    async def test_an_endless_body_is_cut_off_at_the_limit(self):
        async with loopback({"/": endless}) as server:
            source = fetcher(f"media.example:{server.port}")
            await refused(source, f"http://media.example:{server.port}/", f"larger than the {LIMIT} bytes")
            await server.left.wait()
        assert server.sent_bytes < 32 * LIMIT  # what the sockets' buffers took, not what was kept

    async def test_a_huge_body_is_refused_before_it_comes(self):
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999\r\n\r\n"
        async with loopback({"/": head}) as server:
            source = fetcher(f"media.example:{server.port}")
            await refused(source, f"http://media.example:{server.port}/", "larger than")

    @pytest.mark.parametrize(
        ("answer", "words"),
        [
            (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answered 404"),
            (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "answered 302"),
            (ok(b"\x1f\x8b", "Content-Encoding: gzip"), "compressed"),
            (b"SSH-2.0-OpenSSH\r\n", "RemoteProtocolError"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "RemoteProtocolError"),
            (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1_000_000, "RemoteProtocolError"),
        ],
    )
    async def test_answers_that_are_no_file(self, answer, words):
        async with loopback({"/": answer}) as server:
            await refused(fetcher(f"media.example:{server.port}"), f"http://media.example:{server.port}/", words)

    async def test_a_server_that_is_too_slow(self):
        async with loopback({"/": silent}) as server, asyncio.timeout(WITHIN_S):
            source = fetcher(f"media.example:{server.port}", timeout_s=0.2)
            while not server.sent_bytes:  # on a busy machine the time may be over before it was asked
                await refused(source, f"http://media.example:{server.port}/", "within 0.2 s")
            await server.left.wait()

    async def test_a_name_server_that_is_too_slow(self):
        async def never(host: str, port: int) -> list[str]:
            await asyncio.Event().wait()
            return []

        await refused(fetcher("media.example", names=never, timeout_s=0.1), "http://media.example/", "within 0.1 s")

    async def test_nobody_there(self):
        async with loopback({}) as server:
            port = server.port
        source = fetcher(f"media.example:{port}", f"lost.example:{port}")
        await refused(source, f"http://media.example:{port}/", "ConnectError")
        await refused(source, f"http://lost.example:{port}/", "cannot be found")


def with_fetcher(app, source: Fetcher):
    """The application with another way of getting files."""
    app.state.context = dataclasses.replace(app.state.context, media=MediaReader(source, None))
    return app


def parts(*urls: str) -> list[dict]:
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": content}]


@pytest.mark.asyncio
class TestRequests:
    async def ask(self, app, body):
        async with client_of(app) as client:
            return await client.post("/v1/chat/completions", json=body)

    async def test_fetched_files_travel_in_the_order_of_their_parts(self, make_app, chat):
        async def late(server: Loopback, writer: asyncio.StreamWriter) -> None:
            while len(server.requests) < 3:  # the others are asked meanwhile
                await asyncio.sleep(0.01)
            await server.send(writer, ok(b"one"))

        async with loopback({"/1": late, "/2": ok(b"two"), "/3": ok(b"three")}) as server:
            engine = FakeEngine(START, END)
            app = with_fetcher(make_app(engine), fetcher(f"media.example:{server.port}"))
            base = f"http://media.example:{server.port}"
            messages = parts(f"{base}/1", "data:image/png;base64,AAAA", f"{base}/2")
            messages[0]["content"].append({"type": "video_url", "video_url": {"url": f"{base}/3"}})
            response = await self.ask(app, chat(messages=messages))
        assert response.status_code == 200, response.text
        assert list(engine.media) == [b"one", b"\0\0\0", b"two", b"three"]
        kinds = [part["type"] for part in engine.request["messages"][0]["content"]]
        assert kinds == ["image", "image", "image", "video"]

    @pytest.mark.parametrize("settings", [{}, {"allowed_media_domains": ("elsewhere.example",)}])
    async def test_nothing_is_fetched_unless_allowed(self, make_app, chat, settings):
        async with loopback({"/": ok(b"picture")}) as server:
            url = f"http://127.0.0.1:{server.port}/"
            response = await self.ask(make_app(FakeEngine(START, END), **settings), chat(messages=parts(url)))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == FIELD
        assert server.requests == []

    async def test_what_is_wrong_otherwise_is_told_before_anything_is_fetched(self, make_app, chat):
        async with loopback({"/": ok(b"picture")}) as server:
            app = with_fetcher(make_app(FakeEngine(START, END)), fetcher(f"media.example:{server.port}"))
            messages = parts(f"http://media.example:{server.port}/")
            response = await self.ask(app, chat(messages=messages, temperature=9))
        assert response.json()["error"]["param"] == "temperature"
        assert server.requests == []

    async def test_the_files_of_a_request_have_a_limit_together(self, make_app, chat):
        async with loopback({"/": ok(bytes(6_000))}) as server:
            app = make_app(FakeEngine(START, END), max_body_bytes=10_000, max_media_bytes=8_000)
            app = with_fetcher(app, fetcher(f"media.example:{server.port}"))
            url = f"http://media.example:{server.port}/"
            assert (await self.ask(app, chat(messages=parts(url)))).status_code == 200
            response = await self.ask(app, chat(messages=parts(url, url)))
        assert response.status_code == 400
        assert "10000 bytes together" in response.json()["error"]["message"]

    async def test_an_empty_file(self, make_app, chat):
        async with loopback({"/": ok(b"")}) as server:
            app = with_fetcher(make_app(FakeEngine(START, END)), fetcher(f"media.example:{server.port}"))
            response = await self.ask(app, chat(messages=parts(f"http://media.example:{server.port}/")))
        assert "empty" in response.json()["error"]["message"]

    async def test_a_client_that_leaves_ends_its_fetches(self, make_app, chat):
        async with loopback({"/": silent}) as server:
            engine = FakeEngine(START, END)
            app = with_fetcher(make_app(engine), fetcher(f"media.example:{server.port}", timeout_s=WITHIN_S))
            client = LeavingClient(app, chat(messages=parts(f"http://media.example:{server.port}/")))
            async with asyncio.timeout(WITHIN_S):
                while not server.sent_bytes:
                    await asyncio.sleep(0.01)
                client.leave()
                await server.left.wait()
                await client.done
        assert not engine.request
