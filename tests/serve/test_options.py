from __future__ import annotations

from pathlib import Path

import pytest

from triton_omni.serve.command_line import ROOT, parse_options
from triton_omni.serve.main import main


def test_defaults() -> None:
    options = parse_options([])
    assert options.checkpoint is None
    assert options.url == "http://127.0.0.1:9000"
    assert options.model_repository == ROOT / "model_repository"


def test_tritons_ports_follow_the_frontends() -> None:
    options = parse_options(["--port", "9100", "--http-port", "8000"])
    assert (options.port, options.grpc_port, options.http_port, options.metrics_port) == (9100, 9101, 8000, 9103)


def test_every_option_reaches_its_field() -> None:
    options = parse_options(
        ["--checkpoint", "weights", "--host", "0.0.0.0", "--drain-s", "2.5", "--model-name", "omni"]
    )
    assert options.checkpoint == Path("weights")
    assert options.host == "0.0.0.0"
    assert options.url == "http://127.0.0.1:9000"
    assert options.drain_s == 2.5
    assert options.model_name == "omni"


@pytest.mark.parametrize(
    ("host", "url"),
    [("::1", "http://[::1]:9000"), ("::", "http://[::1]:9000"), ("omni.internal", "http://omni.internal:9000")],
)
def test_the_url_of_a_host(host: str, url: str) -> None:
    assert parse_options(["--host", host]).url == url


def test_the_profile_and_its_changes() -> None:
    options = parse_options(["--profile", "two-gpus", "--set", "talker.max_sessions=8", "--set", "omni_bls.replicas=3"])
    assert options.profile == "two-gpus"
    assert options.overrides == ("talker.max_sessions=8", "omni_bls.replicas=3")
    assert (parse_options([]).profile, parse_options([]).overrides, parse_options([]).dry_run) == (None, (), False)


def test_what_follows_two_dashes_is_the_frontends() -> None:
    options = parse_options(["--port", "9100", "--", "--workers", "2", "--ssl-certfile", "cert.pem"])
    assert options.frontend_arguments == ("--workers", "2", "--ssl-certfile", "cert.pem")
    assert options.url == "https://127.0.0.1:9100"
    assert parse_options([]).frontend_arguments == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prot", "9000"], "unrecognized arguments: --prot"),
        (["--check", "weights"], "unrecognized arguments: --check"),
        (["extra"], "unrecognized arguments: extra"),
        (["--port", "0"], "argument --port: must be a port from 1 to 65532, got '0'"),
        (["--port", "seven"], "argument --port: must be a port from 1 to 65532, got 'seven'"),
        (["--ready-timeout-s", "-1"], "argument --ready-timeout-s: must be a number of seconds above 0, got '-1'"),
        (["--drain-s", "nan"], "argument --drain-s: must be a number of seconds above 0, got 'nan'"),
    ],
)
def test_a_wrong_command_line_names_the_option(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-kyes-file", "x"], "unrecognized arguments: --api-kyes-file"),
        (["--api-keys-file", "missing"], "--api-keys-file: cannot be read"),
        (["--ssl-certfile", __file__], "--ssl-keyfile: is missing"),
    ],
)
def test_the_frontends_options_are_checked_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
