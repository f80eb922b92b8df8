"""What the README promises exists."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from triton_omni.code2wav.config import Code2WavConfig
from triton_omni.pipeline.pipeline import PipelineConfig
from triton_omni.serve.examples import curl_example, python_example
from triton_omni.talker.config import TalkerConfig
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.triton.bls_config import BlsConfig

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIGS: dict[str, list[type]] = {
    "thinker": [ThinkerConfig],
    "talker": [TalkerConfig],
    "code2wav": [Code2WavConfig],
    "omni_bls": [PipelineConfig, BlsConfig],
}
TABLE_ROW = re.compile(r"^\| (?P<stages>[\w, ]+) \| (?P<names>(?:`\w+`(?:, )?)+) \|", re.MULTILINE)


def documented() -> list[tuple[str, str]]:
    """(stage, parameter) of each row of the configuration table that belongs to single stages."""
    rows = [m for m in TABLE_ROW.finditer(README) if m["stages"] != "all"]
    stages = [(stage, row["names"]) for row in rows for stage in row["stages"].split(", ")]
    return [(stage, name) for stage, names in stages for name in re.findall(r"`(\w+)`", names)]


@pytest.mark.parametrize(("stage", "name"), documented())
def test_a_documented_parameter_exists(stage: str, name: str) -> None:
    fields = {field.name for config in CONFIGS[stage] for field in dataclasses.fields(config)}
    assert name in fields
    assert name in (ROOT / "model_repository" / stage / "config.pbtxt").read_text(encoding="utf-8")


def test_the_table_was_found() -> None:
    assert {stage for stage, _ in documented()} == set(CONFIGS)


def test_the_first_request_is_the_one_that_a_ready_server_prints() -> None:
    assert python_example("http://127.0.0.1:9000", "demo", "ethan") in README
    printed, shown = (
        " ".join(text.split()) for text in (curl_example("http://127.0.0.1:9000", "demo", "ethan"), README)
    )
    assert printed in shown


def links() -> list[tuple[str, str]]:
    """(page, link) of all links of all pages that lead to files or to headings."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [
        (str(page.relative_to(ROOT)), link)
        for page in pages
        for link in re.findall(r"\]\(([^):]+)\)", page.read_text(encoding="utf-8"))
    ]


def anchors(page: Path) -> set[str]:
    """Of a page's headings: lower case, words joined by hyphens, other signs left out."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(("page", "link"), links())
def test_a_link_leads_somewhere(page: str, link: str) -> None:
    path, _, anchor = link.partition("#")
    target = (ROOT / page).parent / path if path else ROOT / page
    assert target.exists()
    assert not anchor or anchor in anchors(target)


@pytest.mark.parametrize("script", sorted(set(re.findall(r"(?<![\w/])\./(scripts/[\w.]+|\.ci/run)", README))))
def test_a_named_script_exists(script: str) -> None:
    assert (ROOT / script).exists()
