"""Requests, an application around a fake engine, and frontends of real tritonservers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from openai_frontend.app import create_app
from openai_frontend.settings import Settings
from tests.openai_frontend.fakes import FakeEngine
from triton_omni.serve.frontend import FrontendProcess
from triton_omni.serve.tritonserver import TritonServer, free_ports

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


def client_for(frontend: FrontendProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="unused", max_retries=0)


@contextmanager
def frontend_of(server: TritonServer, directory: Path, *options: str) -> Iterator[FrontendProcess]:
    """``options``: more of the frontend's."""
    (port,) = free_ports(1)
    arguments = ["--port", str(port), "--triton-url", server.grpc_target, "--model-name", MODEL]
    arguments += ["--checkpoint", str(server.checkpoint), "--drain-s", "2", *options]
    url = f"http://127.0.0.1:{port}"
    with FrontendProcess(url, arguments, log_path=directory / "frontend.log", drain_s=2) as frontend:
        frontend.wait_ready(240)
        yield frontend


@pytest.fixture(scope="session")
def null_frontend(null_server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendProcess]:
    with frontend_of(null_server, tmp_path_factory.mktemp("frontend")) as frontend:
        yield frontend


@pytest.fixture(scope="session")
def tight_frontend(tight_server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendProcess]:
    with frontend_of(tight_server, tmp_path_factory.mktemp("frontend")) as frontend:
        yield frontend


@pytest.fixture(scope="session")
def demo_frontend(demo_server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendProcess]:
    with frontend_of(demo_server, tmp_path_factory.mktemp("frontend")) as frontend:
        yield frontend


@pytest.fixture
def client(null_frontend: FrontendProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's, of a frontend with null engines."""
    with client_for(null_frontend) as client:
        yield client


@pytest.fixture
def demo(demo_frontend: FrontendProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's, of a frontend with the demo checkpoint."""
    with client_for(demo_frontend) as client:
        yield client
