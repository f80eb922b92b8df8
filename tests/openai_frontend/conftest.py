"""Requests, and an application around a fake engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from openai_frontend.app import create_app
from openai_frontend.settings import Settings
from tests.openai_frontend.fakes import FakeEngine

MODEL = "omni"


@pytest.fixture
def make_app(checkpoint: Path) -> Callable[..., FastAPI]:
    def make(engine: FakeEngine, **settings: Any) -> FastAPI:
        return create_app(Settings(checkpoint=checkpoint, model_name=MODEL, **settings), engine)

    return make


@pytest.fixture
def chat() -> Callable[..., dict[str, Any]]:
    """A body for /v1/chat/completions; None takes a key away."""

    def body(**changes: Any) -> dict[str, Any]:
        plain = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
        return {key: value for key, value in (plain | changes).items() if value is not None}

    return body
