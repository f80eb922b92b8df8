"""Each row of the ablation is the one before it with one thing more."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from triton_omni.errors import ConfigError
from triton_omni.serve.machine import Device, Machine
from triton_omni.sweep.main import parser
from triton_omni.sweep.rows import ROWS, known, of_profile, overrides, settings

CPU = Machine("cpu")
TWO, THREE = (Machine("cuda", tuple(Device("a GPU") for _ in range(count))) for count in (2, 3))


def test_every_row_switches_something_on_and_nothing_off() -> None:
    every = [set(overrides(row, CPU)) for row in ROWS]
    for row, (before, after) in zip(ROWS[1:], pairwise(every), strict=True):
        assert after - before == ({"talker.replicas=2", "code2wav.replicas=2"} if row == "replicas" else set())
        assert (before - after) or row == "replicas"


def test_the_thinker_is_loaded_three_times() -> None:
    """Without batches, eager, and as it stays."""
    for machine, profile in ((CPU, "cpu-demo"), (TWO, "two-gpus"), (THREE, "three-gpus")):
        thinkers = [settings(row, profile, [], machine)["thinker"] for row in ROWS]
        assert [a == b for a, b in pairwise(thinkers)] == [False, False, True, True, True]


def test_replicas_go_where_there_is_room() -> None:
    two = settings("replicas", "two-gpus", [], TWO)
    assert two["talker"].layout.cards == two["code2wav"].layout.cards == ((0,), (1,))
    assert json.loads(two["thinker"].layout.parameters["vllm_args"])["gpu_memory_utilization"] == 0.7
    assert settings("async_output", "two-gpus", [], TWO)["talker"].layout.cards == ((1,),)
    assert settings("replicas", "three-gpus", [], THREE)["talker"].layout.cards == ((1,), (2,))
    for profile, machine in (("two-gpus", TWO), ("three-gpus", THREE)):
        assert settings("async_output", profile, [], machine)["code2wav"].layout.cards == ((1,),)
    replicas = settings("replicas", "cpu-demo", [], CPU)["talker"].layout.replicas
    assert replicas is not None and len(replicas) == 2


def test_no_batch_reaches_every_stage() -> None:
    row = settings("no_batch", "cpu-demo", [], CPU)
    assert row["thinker"].layout.parameters["max_num_seqs"] == row["talker"].layout.parameters["max_sessions"] == "1"
    assert row["code2wav"].max_batch == 1 and row["omni_bls"].layout.parameters["async_chunk"] == "false"
    assert settings("batch", "cpu-demo", [], CPU)["code2wav"].max_batch is None


def test_what_is_given_wins() -> None:
    row = settings("batch", "cpu-demo", ["talker.max_sessions=7", "talker.async_output=true"], CPU)
    assert row["talker"].layout.parameters["max_sessions"] == "7"
    assert row["talker"].layout.parameters["async_output"] == "true"


def test_a_variant_is_the_profile_with_its_own_settings() -> None:
    name, given = parser().parse_args(["--variant", "apart:talker.devices=[0,1],code2wav.devices=[0]"]).variant[0]
    found = of_profile("two-gpus", given, TWO)
    assert name == "apart"
    assert [found[stage].layout.cards for stage in ("thinker", "talker", "code2wav")] == [
        ((0,),),
        ((0,), (1,)),
        ((0,),),
    ]
    assert known(["batch", "apart"], ["apart"]) == ["batch", "apart"]
    assert settings("profile", "two-gpus", [], TWO) == of_profile("two-gpus", [], TWO)
    for refused in ("nothing", ":talker.max_sessions=8", "replicas:talker.max_sessions=8"):
        with pytest.raises(SystemExit):
            parser().parse_args(["--variant", refused])


def test_rows_are_known_and_keep_their_order() -> None:
    assert known(["replicas", "vllm_omni", "batch", "replicas"]) == ["replicas", "vllm_omni", "batch"]
    with pytest.raises(ConfigError, match="did you mean 'cuda_graph'") as caught:
        known(["cuda_graphs"])
    assert caught.value.field == "--rows"
