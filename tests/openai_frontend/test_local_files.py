"""file: URLs, under one directory and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from openai_frontend.local_files import LocalFiles
from tests.openai_frontend.fakes import END, START, FakeEngine, client_of
from triton_omni.errors import ConfigError, InvalidRequestError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "media"
    (root / "deep").mkdir(parents=True)
    (root / "cat & dog é.png").write_bytes(b"picture")
    (root / "deep" / "link").symlink_to(root / "cat & dog é.png")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "outside").symlink_to(tmp_path)
    (root / "circle").symlink_to(root / "circle")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media-2").mkdir()
    (tmp_path / "media-2" / "secret").write_bytes(b"secret")
    os.mkfifo(root / "pipe")
    return root


@pytest.mark.parametrize("url", ["file://{root}/cat%20%26%20dog%20é.png", "FILE://localhost{root}/deep/link"])
def test_files_below_the_root_are_read(root, url):
    assert LocalFiles(root).read(url.format(root=root), field="x", max_bytes=100) == b"picture"


def test_the_root_may_be_a_link(root, tmp_path):
    (tmp_path / "other").symlink_to(root)
    files = LocalFiles(tmp_path / "other")
    assert files.read(f"file://{tmp_path}/other/deep/link", field="x", max_bytes=100) == b"picture"


def test_no_more_than_one_byte_beyond_the_limit_is_read(root):
    assert LocalFiles(root).read(f"file://{root}/deep/link", field="x", max_bytes=3) == b"pict"


@pytest.mark.parametrize(
    "url",
    [
        *(
            "file://{root}/out",
            "file://{root}/outside/secret",
            "file://{root}/../secret",
            "file://{root}/%2e%2e/secret",
        ),
        *("file://{root}-2/secret", "file:///etc/passwd", "file:/etc/passwd", "file://{root}/missing", "file://{root}"),
        *("file://{root}/pipe", "file://{root}/circle", "file:///dev/zero", "file:///proc/self/environ", "file:"),
        *("file://elsewhere{root}/deep/link", "file://{root}/%00", "file://{root}/%ff", "file:deep/link"),
    ],
)
def test_everything_else_is_refused_alike(root, url):
    with pytest.raises(InvalidRequestError) as raised:
        LocalFiles(root).read(url.format(root=root), field="here", max_bytes=100)
    assert raised.value.field == "here"
    assert raised.value.message == "is no readable file in the directory that this server reads media from"


def test_the_root_must_be_a_directory(root):
    for path in (root / "deep" / "link", root / "missing"):
        with pytest.raises(ConfigError) as raised:
            LocalFiles(path)
        assert raised.value.field == "allowed_local_media_path"


@pytest.mark.asyncio
async def test_a_request_with_files(make_app, chat, root):
    async def ask(url, **settings):
        engine = FakeEngine(START, END)
        part = {"type": "audio_url", "audio_url": {"url": url}}
        async with client_of(make_app(engine, allowed_local_media_path=str(root), **settings)) as client:
            body = chat(messages=[{"role": "user", "content": [part]}])
            return engine, await client.post("/v1/chat/completions", json=body)

    engine, response = await ask(f"file://{root}/deep/link")
    assert response.status_code == 200, response.text
    assert list(engine.media) == [b"picture"]
    for url, settings, words in (
        (f"file://{root}/deep/link", {"max_media_bytes": 3}, "larger than the 3 bytes"),
        (f"file://{root}/out", {}, "no readable file"),
    ):
        engine, response = await ask(url, **settings)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "messages[0].content[0].audio_url.url"
        assert not engine.request
