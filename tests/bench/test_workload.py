"""What is sent: lengths, dialects, arrivals, and how they are spread over processes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from triton_omni.bench.load import arrivals, shares
from triton_omni.bench.workload import Workload
from triton_omni.errors import InvalidRequestError
from triton_omni.model_config import ModelConfig
from triton_omni.pipeline.request import RequestParser

FIXED = Workload(text_tokens=40, audio_frames=149)
NATURAL = Workload(text_tokens=None, audio_frames=None)


def test_prompts_are_the_same_for_the_same_seed_and_of_the_asked_length():
    assert FIXED.prompts(5) == FIXED.prompts(5) != Workload(seed=1).prompts(5)
    short, long = Workload(prompt_tokens=60).prompts(1)[0], Workload(prompt_tokens=2500).prompts(1)[0]
    assert len(long.split()) - len(short.split()) == 2440


def test_prompts_of_a_file_come_again(tmp_path: Path):
    file = tmp_path / "prompts"
    file.write_text("one\n\ntwo\n")
    prompts = Workload(prompt_file=str(file)).prompts(4)
    assert sorted(prompts[:2]) == ["one", "two"]
    assert prompts[2:] == prompts[:2]
    file.write_text("\n")
    with pytest.raises(InvalidRequestError, match="no line"):
        Workload(prompt_file=str(file)).prompts(1)


def test_ours_and_omni_bls_s_own(checkpoint: Path):
    body = FIXED.body("openai", "m", "hi")
    assert body["stream"] is True
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (40, 40, True)
    assert body["talker"] == {"max_frames": 149, "min_frames": 149}
    request = RequestParser(ModelConfig.load(checkpoint)).check(FIXED.body("grpc", "", "hi"))
    assert (request.thinker.min_tokens, request.thinker.max_tokens, request.thinker.ignore_eos) == (40, 40, True)
    assert (request.talker.min_frames, request.talker.max_frames, request.speech) == (149, 149, True)


def test_vllm_omni_s_talker_needs_a_token_more_than_frames():
    thinker, talker, _ = FIXED.body("vllm-omni", "m", "hi")["sampling_params_list"]
    assert (thinker["max_tokens"], thinker["ignore_eos"]) == (40, True)
    assert (talker["max_tokens"], talker["min_tokens"], talker["ignore_eos"]) == (150, 150, True)
    (thinker,) = Workload(modalities=("text",)).body("vllm-omni", "m", "hi")["sampling_params_list"]
    assert thinker["max_tokens"] == 40


@pytest.mark.parametrize("api", ["openai", "vllm-omni"])
def test_natural_lengths_leave_the_model_alone(api):
    body = NATURAL.body(api, "m", "hi")
    assert set(body) == {"messages", "modalities", "model", "stream", "stream_options"}


def test_extra_wins():
    assert Workload(extra={"max_tokens": 7, "seed": 1}).body("openai", "m", "hi")["max_tokens"] == 7


@pytest.mark.parametrize(
    ("values", "field"), [({"text_tokens": 0}, "text_tokens"), ({"modalities": ("speech",)}, "modalities")]
)
def test_what_cannot_be_asked_is_named(values, field):
    with pytest.raises(InvalidRequestError) as error:
        Workload(**values)
    assert error.value.field == field


def test_arrivals_are_a_poisson_process():
    due_s = arrivals(50.0, 20_000, seed=3)
    gaps = [later - earlier for earlier, later in itertools.pairwise(due_s)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert due_s[0] == 0.0
    assert due_s == arrivals(50.0, 20_000, seed=3)
    assert mean == pytest.approx(0.02, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)  # of exponential gaps


def test_shares_cover_everything_once():
    bodies = [{"n": n} for n in range(10)]
    parts = shares(bodies, 3, 8, ())
    assert sorted(body["n"] for part in parts for body in part.bodies) == list(range(10))
    assert [part.concurrency for part in parts] == [3, 3, 2]
    assert len(shares(bodies, 8, 1, ())) == 1
    parts = shares(bodies, 4, 4, [float(n) for n in range(10)])
    assert all(body["n"] == due_s for part in parts for body, due_s in zip(part.bodies, part.due_s, strict=True))
