"""What docs/configuration.md and docs/api.md say of keys and defaults is what the code has."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from openai_frontend import keys
from openai_frontend.app import create_app
from openai_frontend.settings import Settings
from tests.openai_frontend.fakes import END, START, FakeEngine
from triton_omni.bench import command_line as bench
from triton_omni.code2wav.config import Code2WavConfig
from triton_omni.pipeline.pipeline import PipelineConfig
from triton_omni.pipeline.request import _KEYS as REQUEST_KEYS
from triton_omni.sampling import TalkerSampling, ThinkerSampling
from triton_omni.serve import examples
from triton_omni.talker.config import TalkerConfig
from triton_omni.thinker.config import ThinkerConfig
from triton_omni.triton.bls_config import BlsConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"
CONFIGURATION = (DOCS / "configuration.md").read_text(encoding="utf-8")
API = (DOCS / "api.md").read_text(encoding="utf-8")
REPOSITORY = DOCS.parent / "model_repository"
MODELS: dict[str, tuple[type, ...]] = {
    "thinker": (ThinkerConfig,),
    "talker": (TalkerConfig,),
    "code2wav": (Code2WavConfig,),
    "omni_bls": (PipelineConfig, BlsConfig),
}
# "engine" is no field where "auto" and "null" are all that it can be.
OF_ALL = {"engine": "auto"}


def table(text: str, heading: str) -> dict[str, str]:
    """The first column of the table below ``heading``, to the second; the backticks of both left out."""
    part = text[text.index(f"{heading}\n") if heading.startswith("#") else text.index(heading) :]
    rows = re.search(r"^\|(?:.*\n\|)+.*$", part, re.MULTILINE)
    assert rows is not None
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[0].splitlines()[2:]]
    return {name: row[1].strip("`") for row in cells for name in re.findall(r"`([^`]+)`", row[0])}


def written(value: Any) -> str:
    """A default as config.pbtxt and the pages have it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def defaults(*classes: type) -> dict[str, str]:
    fields = [field for cls in classes for field in dataclasses.fields(cls)]
    return {f.name: written(f.default_factory() if callable(f.default_factory) else f.default) for f in fields}


@pytest.mark.parametrize("model", MODELS)
def test_a_models_parameters(model: str) -> None:
    known = defaults(*MODELS[model])
    expected = known if "engine" in known or model == "omni_bls" else OF_ALL | known
    assert table(CONFIGURATION, f"### {model}") == expected


@pytest.mark.parametrize("model", MODELS)
def test_config_pbtxt_names_all_of_them(model: str) -> None:
    text = (REPOSITORY / model / "config.pbtxt").read_text(encoding="utf-8")
    assert [name for name in defaults(*MODELS[model]) if not re.search(rf"\b{name}\b", text)] == []


def test_the_frontends_options() -> None:
    known = defaults(Settings)
    named = {"api_keys_file" if name == "api_keys" else name: value for name, value in known.items()}
    expected = {f"--{name.replace('_', '-')}": value for name, value in named.items()}
    assert table(CONFIGURATION, "## Options of the frontend") == expected | {"--checkpoint": ""}


def test_the_variables_that_hold_keys() -> None:
    read_by = table(CONFIGURATION, "## Environment")
    assert "the frontend" in read_by[keys.VARIABLE]
    assert "`serve.sh` prints" in read_by[examples.KEY_VARIABLE]
    assert "scripts/bench.py" in read_by[bench.KEY_VARIABLE]


def test_the_keys_of_omni_bls() -> None:
    assert set(table(API, "| key of `REQUEST`")) == set(REQUEST_KEYS)


@pytest.mark.parametrize(("name", "cls"), [("thinker", ThinkerSampling), ("talker", TalkerSampling)])
def test_sampling(name: str, cls: type) -> None:
    expected = defaults(cls)
    expected |= {key: "[]" for key in ("stop", "stop_token_ids") if key in expected}
    assert table(API, f"| key of `{name}`") == expected


def test_the_endpoints(checkpoint: Path) -> None:
    app = create_app(Settings(checkpoint=checkpoint), FakeEngine(START, END))
    known = {path for path in app.openapi()["paths"] if path.startswith("/v1/")}
    named = set(re.findall(r"/v1/[\w/]+", " ".join(table(API, "## OpenAI's endpoints"))))
    assert named == {re.sub(r"/\{.*", "", path) for path in known} | {"/v1/realtime"}
