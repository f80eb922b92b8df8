"""Keys, limits and CORS, in front of the application."""

from __future__ import annotations

import asyncio

import pytest

from openai_frontend import access, keys
from openai_frontend.access import KeyMiddleware, LimitMiddleware
from openai_frontend.engine import Delta
from openai_frontend.keys import KeyRing
from tests.openai_frontend.fakes import END, START, WITHIN_S, FakeEngine, LeavingClient, client_of
from triton_omni.errors import ConfigError

CHAT = "/v1/chat/completions"
KEY = {"authorization": "Bearer sesame-2"}
OPEN = ["/docs", "/health/live", "/health/ready", "/metrics", "/version", "/openapi.json"]


def http(path="/v1/models", method="GET", client="10.0.0.1", headers=(), **more):
    headers = [(name.encode(), value.encode()) for name, value in dict(headers).items()]
    return {"type": "http", "path": path, "method": method, "headers": headers, "client": (client, 1), **more}


async def status_of(app, scope):
    """The status that ``app`` sends, 200 where it lets the request through, and the headers."""
    sent = []

    async def send(message):
        sent.append(message)

    await app(scope, None, send)
    if not sent:
        return 200, {}
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


async def passed(scope, receive, send):
    pass


def test_keys_of_a_file_and_of_the_environment(tmp_path):
    (tmp_path / "keys").write_text("# two of them\nsesame-1\n\n  sesame-2  \n")
    assert keys.load(tmp_path / "keys", {"OMNI_API_KEYS": "sesame-2, sesame-3,"}) == (
        "sesame-1",
        "sesame-2",
        "sesame-3",
    )
    assert keys.load(None, {}) == ()


@pytest.mark.parametrize(
    ("content", "environment", "field"),
    [
        (None, {}, "api_keys_file"),
        (b"# none\n", {}, "api_keys_file"),
        (b"two words\n", {}, "api_keys_file"),
        (b"\xff\xfe", {}, "api_keys_file"),
        (b"sesame", {"OMNI_API_KEYS": "s\u00e9same"}, "OMNI_API_KEYS"),
    ],
)
def test_keys_that_cannot_be_used(tmp_path, content, environment, field):
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        keys.load(tmp_path / "keys", environment)
    assert caught.value.field == field


def test_each_key_is_compared_each_time(monkeypatch):
    compared = []
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b)
    ring = KeyRing(["sesame-1", "sesame-2", "sesame-3"])
    assert ring.identify("sesame-1") != ring.identify("sesame-3") is not None
    assert ring.identify("sesame") is None
    assert compared == [(32, 32)] * 9
    assert "sesame" not in str(ring.identify("sesame-1"))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "sesame-2"},
        {"authorization": "Basic sesame-2"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer sesame-22"},
        {"authorization": "Bearer sesame-1,sesame-2"},
        {"authorization": b"Bearer s\xe9same"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/nothing"), ("GET", "/docs/none")]
)
async def test_without_a_key_nothing_is_answered(make_app, chat, headers, method, path):
    engine = FakeEngine(START, END)
    async with client_of(make_app(engine, api_keys=("sesame-1", "sesame-2"))) as client:
        response = await client.request(method, path, json=chat(), headers=headers)
    error = response.json()["error"]
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert "sesame" not in response.text
    assert not engine.request


@pytest.mark.asyncio
async def test_with_a_key_all_is_as_without_keys(make_app, chat):
    async with client_of(make_app(FakeEngine(START, END), api_keys=("sesame-1", "sesame-2"))) as client:
        assert (await client.post(CHAT, json=chat(), headers=KEY)).status_code == 200
        assert (await client.get("/v1/models", headers={"authorization": "bearer sesame-1"})).status_code == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("protect", [False, True])
async def test_what_needs_no_key(make_app, protect):
    async with client_of(make_app(FakeEngine(), api_keys=("sesame-2",), protect_metrics=protect)) as client:
        statuses = {path: (await client.get(path)).status_code for path in OPEN}
        assert (await client.get("/metrics", headers=KEY)).status_code == 200
    assert statuses == dict.fromkeys(OPEN, 200) | ({"/metrics": 401} if protect else {})


@pytest.mark.asyncio
async def test_a_websocket_names_its_key_among_its_subprotocols():
    app = KeyMiddleware(passed, KeyRing(["sesame-2"]))
    socket = http("/v1/realtime") | {"type": "websocket"}
    good = [(b"sec-websocket-protocol", b"realtime, openai-insecure-api-key.sesame-2")]
    bad = [(b"sec-websocket-protocol", b"realtime, openai-insecure-api-key.sesame")]
    assert (await status_of(app, socket | {"headers": good}))[0] == 200
    assert (await status_of(app, socket | {"headers": bad}))[0] == 401
    assert (await status_of(app, socket))[0] == 401


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.mark.asyncio
async def test_requests_per_minute():
    clock = Clock()
    app = LimitMiddleware(passed, requests_per_minute=3, max_concurrent=0, clock=clock)
    post = http(CHAT, "POST")
    assert [(await status_of(app, post))[0] for _ in range(4)] == [200, 200, 200, 429]
    status, headers = await status_of(app, post)
    assert (status, headers["retry-after"]) == (429, "20")
    assert (await status_of(app, http()))[0] == 200  # reading is free
    assert (await status_of(app, http(CHAT, "POST", client="10.0.0.2")))[0] == 200
    clock.now_s += 19.9
    assert (await status_of(app, post))[0] == 429
    clock.now_s += 0.2
    assert [(await status_of(app, post))[0] for _ in range(2)] == [200, 429]
    clock.now_s += 3_600
    assert [(await status_of(app, post))[0] for _ in range(4)] == [200, 200, 200, 429]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (http(client="10.0.0.1"), http(client="10.0.0.1"), True),
        (http(client="10.0.0.1"), http(client="10.0.0.2"), False),
        (http(client="2001:db8::1"), http(client="2001:db8::2:1"), True),
        (http(client="2001:db8:0:1::1"), http(client="2001:db8:0:2::1"), False),
        (http(state={"client": "key 1"}, client="10.0.0.1"), http(state={"client": "key 1"}, client="10.0.0.2"), True),
        (http(state={"client": "key 1"}), http(state={"client": "key 2"}), False),
        (http(), http() | {"type": "websocket"}, True),
    ],
)
async def test_who_counts_as_one_client(first, second, same):
    app = LimitMiddleware(passed, requests_per_minute=1, max_concurrent=0, clock=Clock())
    assert (await status_of(app, first | {"method": "POST"}))[0] == 200
    assert (await status_of(app, second | {"method": "POST"}))[0] == (429 if same else 200)


@pytest.mark.asyncio
async def test_idle_clients_are_forgotten(monkeypatch):
    monkeypatch.setattr(access, "_MANY_CLIENTS", 10)
    clock = Clock()
    app = LimitMiddleware(passed, requests_per_minute=60, max_concurrent=1, clock=clock)
    for number in range(100):
        clock.now_s += 2
        assert (await status_of(app, http(CHAT, "POST", client=f"10.0.0.{number}")))[0] == 200
    assert len(app._clients) <= 11


@pytest.mark.asyncio
async def test_open_requests(make_app, chat):
    """A place is free again when its answer has ended or its client has left."""
    wait = asyncio.Event()
    engine = FakeEngine(START, Delta(text="Hello"), wait, END)
    app = make_app(engine, max_concurrent_requests=1)
    leaving = LeavingClient(app, chat(stream=True), client=("127.0.0.1", 123))
    async with asyncio.timeout(WITHIN_S), client_of(app) as client:
        await engine.waits.wait()
        refused = await client.post(CHAT, json=chat())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        leaving.leave()
        await leaving.done
        wait.set()
        assert [(await client.post(CHAT, json=chat())).status_code for _ in range(2)] == [200, 200]


@pytest.mark.asyncio
async def test_a_refused_requests_body_is_not_read():
    async def receive():
        pytest.fail("the body was read")

    full = LimitMiddleware(passed, requests_per_minute=0, max_concurrent=1)
    full._client("address 10.0.0.1").open_requests = 1
    for app in (KeyMiddleware(passed, KeyRing(["sesame"])), full):
        sent = []

        async def send(message, sent=sent):
            sent.append(message)

        await app(http(CHAT, "POST"), receive, send)
        assert sent[0]["status"] in (401, 429)


@pytest.mark.asyncio
async def test_cors_is_off_until_asked_for(make_app, chat):
    origin = {"origin": "https://page.example"}
    preflight = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with client_of(make_app(FakeEngine(START, END))) as client:
        response = await client.post(CHAT, json=chat(), headers=origin)
        assert "access-control-allow-origin" not in response.headers
    settings = {"cors_origins": ("https://page.example",), "api_keys": ("sesame-2",)}
    async with client_of(make_app(FakeEngine(START, END), **settings)) as client:
        asked = await client.options(CHAT, headers=preflight)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "https://page.example")
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        refused = await client.post(CHAT, json=chat(), headers=origin)  # a page must be able to read why
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://page.example")
        stranger = await client.post(CHAT, json=chat(), headers=KEY | {"origin": "https://other.example"})
        assert "access-control-allow-origin" not in stranger.headers
