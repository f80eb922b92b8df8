"""What the server says of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from openai_frontend.command_line import parse_settings
from tests.openai_frontend.conftest import MODEL
from tests.openai_frontend.fakes import FakeEngine, client_of
from triton_omni.model_config import ModelConfig


@pytest.mark.asyncio
async def test_models(make_app, checkpoint):
    async with client_of(make_app(FakeEngine())) as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get(f"/v1/models/{MODEL}")).json()
        missing = await client.get("/v1/models/gpt-4o")
    assert listed == {"object": "list", "data": [one]}
    assert (one["id"], one["object"]) == (MODEL, "model")
    assert sorted(one["voices"]) == sorted(ModelConfig.load(checkpoint).speakers)
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.asyncio
async def test_health(make_app):
    engine = FakeEngine()
    async with client_of(make_app(engine)) as client:
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/health/ready")).json() == {"status": "ready"}
        engine.not_ready = ["talker"]
        response = await client.get("/health/ready")
    assert response.status_code == 503
    assert response.json()["waiting_for"] == ["talker"]


@pytest.mark.asyncio
async def test_the_api_describes_itself(make_app):
    async with client_of(make_app(FakeEngine())) as client:
        described = (await client.get("/openapi.json")).json()
    body = described["components"]["schemas"]["ChatCompletionRequest"]
    assert body["additionalProperties"] is False
    assert body["properties"]["store"]["enum"] == [None, False]


def test_settings_from_the_command_line(checkpoint):
    settings = parse_settings(["--checkpoint", str(checkpoint), "--port", "7", "--triton-url", "box:1"])
    assert (settings.port, settings.triton_url) == (7, "box:1")
    assert settings.served_model == checkpoint.resolve().name


def test_the_frontend_loads_no_torch():
    program = "import sys, openai_frontend.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
