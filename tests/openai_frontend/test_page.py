"""The page's files; how it behaves is tested in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import openai_frontend
from tests.openai_frontend.fakes import FakeEngine, client_of

pytestmark = pytest.mark.asyncio
STATIC = Path(openai_frontend.__file__).parent / "static"


async def test_the_page_needs_no_key_and_nothing_from_elsewhere(make_app):
    async with client_of(make_app(FakeEngine(), api_keys=("secret",))) as client:
        named: set[str] = set()
        for path in ("/", "/docs"):
            page = await client.get(path)
            assert page.status_code == 200
            assert page.headers["content-type"].startswith("text/html")
            assert "default-src 'self'" in page.headers["content-security-policy"]
            assert not re.search(r'(src|href)="(https?:)?//', page.text)
            named |= set(re.findall(r'"(/static/[^"]+)"', page.text))
        for file in STATIC.glob("*.js"):
            source = file.read_text()
            named |= set(re.findall(r'"(/static/[^"]+)"', source))
            named |= {f"/static/{name}" for name in re.findall(r'from "\./([^"]+)"', source)}
            assert not re.search(r"https?://", source), file
        ours = {path.name for path in STATIC.iterdir()} - {"index.html", "docs.html"}
        assert named == {f"/static/{name}" for name in (*ours, "swagger-ui.css", "swagger-ui-bundle.js")}
        for path in named:
            answer = await client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(("text/javascript", "text/css")), path


@pytest.mark.parametrize("path", ["/static/none.js", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static/"])
async def test_no_other_file_is_served(make_app, path):
    async with client_of(make_app(FakeEngine())) as client:
        answer = await client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
