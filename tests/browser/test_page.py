"""The page in a browser, against tritonserver with null engines: typed, stopped, spoken, interrupted."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from openai_frontend.engine import Delta
from tests.openai_frontend.fakes import END, START, WITHIN_S, FakeEngine
from tests.openai_frontend.realtime.talk import served
from tests.triton.client import open_sessions
from triton_omni.serve.frontend import FrontendProcess
from triton_omni.serve.tritonserver import TritonServer

pytestmark = [pytest.mark.slow, pytest.mark.triton]
WITHIN_MS = 1_000 * WITHIN_S
expect.set_options(timeout=WITHIN_MS)
OpenPage = Callable[..., Page]


def ready(page: Page) -> None:
    expect(page.get_by_role("status")).to_have_text("Ready")


def ask(page: Page, question: str) -> None:
    page.get_by_role("textbox", name="Message").fill(question)
    page.keyboard.press("Enter")


def seconds(page: Page) -> tuple[float, float]:
    """Played, and received."""
    numbers = re.findall(r"[\d.]+", page.locator("#played").inner_text())
    return (float(numbers[0]), float(numbers[1])) if numbers else (0.0, 0.0)


def has_more_than(page: Page, length_s: float) -> bool:
    """Whether so much of what it has received is still to be played."""
    played_s, received_s = seconds(page)
    return received_s - played_s > length_s


def test_a_typed_question_is_answered_in_text_and_sound(open_page: OpenPage, null_frontend: FrontendProcess):
    page = open_page(null_frontend.url)
    ready(page)
    ask(page, "How is the sea?")
    log = page.get_by_role("log", name="Conversation")
    expect(log.locator(".user .body")).to_have_text("How is the sea?")
    expect(log.locator(".assistant .body")).to_contain_text("w0 w1 w2 w3")
    expect(page.locator("#first-audio")).to_have_text(re.compile(r"^\d+ ms$"))
    ready(page)  # all is played
    played_s, received_s = seconds(page)
    assert played_s == received_s > 1
    assert re.fullmatch(r"\d+ \(\d+ ms\)", page.locator("#underruns").inner_text())
    assert float(page.locator("#rtf").inner_text()) > 0
    assert page.problems == []


class HeldEngine(FakeEngine):
    """Speaks, and says the rest when ``released``."""

    def __init__(self) -> None:
        super().__init__()
        self.first_s = 0.1
        self.released = threading.Event()

    async def generate(self, request: Mapping[str, Any], media: Sequence[bytes]) -> AsyncGenerator[Delta, None]:
        yield START
        yield Delta("One, ", sound(self.first_s))
        await asyncio.to_thread(self.released.wait)
        yield Delta("two.", sound(0.1))
        yield END


def sound(length_s: float) -> bytes:
    return np.full(round(length_s * 24_000), 1_000, np.int16).tobytes()


@pytest.fixture
def held(make_app: Callable[..., FastAPI]) -> Iterator[tuple[str, HeldEngine]]:
    """The page of a frontend in a thread of this process, since the browser's driver keeps this one; its engine."""
    addresses: queue.Queue[str] = queue.Queue()
    over, engine = threading.Event(), HeldEngine()

    async def serve() -> None:
        async with served(make_app(engine)) as url:
            addresses.put(url)
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    yield addresses.get(timeout=60), engine
    engine.released.set()
    over.set()
    thread.join()


def test_a_gap_is_seen(open_page: OpenPage, held: tuple[str, HeldEngine]):
    url, engine = held
    page = open_page(url)
    ready(page)
    begun_s = time.monotonic()
    ask(page, "Slowly, please.")
    expect(page.locator("#played")).to_have_text("0.10 of 0.10 s")
    page.wait_for_timeout(500)
    engine.released.set()
    expect(page.locator(".assistant .body")).to_have_text("One, two.")
    ready(page)
    assert seconds(page) == (0.2, 0.2)
    underruns, missing_ms = map(int, re.findall(r"\d+", page.locator("#underruns").inner_text()))
    assert underruns == 1
    assert 100 < missing_ms < (time.monotonic() - begun_s) * 1_000


def test_what_comes_in_time_is_played_without_a_gap(open_page: OpenPage, held: tuple[str, HeldEngine]):
    url, engine = held
    engine.first_s = 60
    page = open_page(url)
    ready(page)
    ask(page, "At length, please.")
    expect(page.locator("#played")).to_have_text(re.compile(r"^0\.[1-9]\d of 60.00 s|^[1-9]"))
    engine.released.set()
    expect(page.locator("#played")).to_have_text(re.compile("of 60.10 s"))
    assert page.locator("#underruns").inner_text() == "0 (0 ms)"
    assert float(page.locator("#rtf").inner_text()) < 1
    page.keyboard.press("Escape")
    expect(page.get_by_role("status")).to_have_text("Stopped")


def test_stop_ends_the_answer_in_every_stage(
    open_page: OpenPage, tight_frontend: FrontendProcess, tight_server: TritonServer, eventually
):
    page = open_page(tight_frontend.url)
    ready(page)
    ask(page, "Tell me everything.")
    expect(page.locator("#first-audio")).to_have_text(re.compile("ms"))
    expect(page.locator("#played")).to_have_text(re.compile(r"^0\.[1-9]|^[1-9]"))
    eventually(lambda: not has_more_than(page, 4), WITHIN_S)  # the first chunks last no longer than the next ones take
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("status")).to_have_text("Stopped")
    expect(page.locator(".assistant .note")).to_have_text("stopped")
    eventually(lambda: open_sessions(tight_server), WITHIN_S)
    played_s, received_s = seconds(page)
    assert 0 < played_s < received_s < 79  # of 80
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    assert page.problems == []


def test_a_spoken_question_and_a_barge_in(
    open_page: OpenPage, tight_frontend: FrontendProcess, tight_server: TritonServer, eventually
):
    page = open_page(tight_frontend.url, permissions=["microphone"])
    ready(page)
    microphone = page.get_by_role("button", name="Microphone")
    microphone.click()
    expect(microphone).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".user.spoken").first).to_contain_text("spoken")
    expect(page.locator("#first-audio")).to_have_text(re.compile("ms"))
    # The recording starts again: somebody speaks into the answer.
    expect(page.locator(".assistant .note").first).to_have_text("stopped")
    expect(page.locator(".user.spoken").nth(1)).to_contain_text("spoken")
    microphone.click()
    expect(microphone).to_have_attribute("aria-pressed", "false")
    page.close()
    eventually(lambda: open_sessions(tight_server), WITHIN_S)


def test_text_alone_and_another_voice(open_page: OpenPage, null_frontend: FrontendProcess):
    page = open_page(null_frontend.url)
    ready(page)
    voices = page.get_by_role("combobox", name="Voice").locator("option").all_inner_texts()
    page.get_by_role("combobox", name="Voice").select_option(voices[-1])
    page.get_by_role("combobox", name="Answer").select_option("text")
    ask(page, "Silently, please.")
    expect(page.locator(".assistant .body")).to_contain_text("w0 w1")
    ready(page)
    assert page.locator("#first-audio").inner_text() == "–"
    expect(page.get_by_role("alert")).to_be_hidden()


def test_who_asks_again_at_once_gets_the_second_answer(open_page: OpenPage, tight_frontend: FrontendProcess):
    page = open_page(tight_frontend.url)
    ready(page)
    ask(page, "One?")
    ask(page, "Two?")
    expect(page.locator(".assistant .body").last).to_contain_text("w0 w1")
    expect(page.locator("#played")).to_have_text(re.compile(r"^0\.[1-9]|^[1-9]"))
    expect(page.locator(".user .body")).to_have_text(["One?", "Two?"])
    expect(page.get_by_role("alert")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(page.get_by_role("status")).to_have_text("Stopped")
    assert page.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_telephone_shows_all_of_it(open_page: OpenPage, null_frontend: FrontendProcess, scheme: str):
    page = open_page(null_frontend.url, viewport={"width": 360, "height": 640}, color_scheme=scheme)
    ready(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for name in ("Send", "Stop", "Microphone"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 360 and box["y"] + box["height"] <= 640
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.get_by_role("textbox", name="Message").evaluate("node => node === document.activeElement"):
            break
    else:
        pytest.fail("the message cannot be reached by keyboard")


def test_the_api_can_be_read_and_tried(open_page: OpenPage, null_frontend: FrontendProcess):
    page = open_page(f"{null_frontend.url}/docs")
    page.get_by_role("button", name="get /v1/models", exact=True).click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Execute").click()
    answer = page.locator(".live-responses-table")  # another table tells what may come
    expect(answer.get_by_role("cell", name="200", exact=True)).to_be_visible()
    assert page.problems == []


def test_the_demo_model_speaks(open_page: OpenPage, demo_frontend: FrontendProcess):
    """OMNI_SCREENSHOTS names a directory for pictures of it, those in docs/images."""
    for name, size, scheme in (
        ("page", (900, 560), "light"),
        ("page-dark", (900, 560), "dark"),
        ("phone", (360, 640), "light"),
    ):
        width, height = size
        page = open_page(demo_frontend.url, viewport={"width": width, "height": height}, color_scheme=scheme)
        ready(page)
        ask(page, "Tell me about the sea.")
        ready(page)
        ask(page, "And what lives in it?")
        expect(page.locator("#played")).to_have_text(re.compile(r"^0\.[1-9]|^[1-9]"))
        if directory := os.environ.get("OMNI_SCREENSHOTS"):
            page.screenshot(path=f"{directory}/{name}.png")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".assistant").last).to_have_attribute("aria-busy", "false")
        assert page.problems == []
        page.close()
