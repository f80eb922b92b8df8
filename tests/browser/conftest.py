"""Headless Chromium, Debian's, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from playwright.sync_api import Page, sync_playwright

from tests.openai_frontend.conftest import demo_frontend, make_app, null_frontend, tight_frontend  # noqa: F401
from tests.openai_frontend.realtime.talk import question

CHROMIUM = shutil.which("chromium")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
START_TIMEOUT_MS = 120_000  # playwright's own, 30 s, is shorter than any other limit here
OpenPage = Callable[..., Page]


@pytest.fixture
def open_page(tmp_path: Path) -> Iterator[OpenPage]:
    """Opens a frontend's page; with ``speech`` the microphone hears a question again and again."""
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH (Debian and Ubuntu: apt-get install chromium)")
    recording = tmp_path / "microphone.wav"
    soundfile.write(recording, np.concatenate([question(), np.zeros(6_000, np.int16)]), 24_000)
    microphone = ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
    microphone.append(f"--use-file-for-fake-audio-capture={recording}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*FLAGS, *microphone], timeout=START_TIMEOUT_MS
        )

        def open_page(url: str, **options: object) -> Page:
            context = browser.new_context(**{"viewport": {"width": 900, "height": 640}} | options)
            page = context.new_page()
            page.set_default_timeout(60_000)
            problems: list[str] = []
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
            page.problems = problems
            page.goto(url)
            return page

        yield open_page
        browser.close()
