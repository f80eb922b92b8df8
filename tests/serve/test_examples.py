from __future__ import annotations

import json
import re

import pytest

from triton_omni.serve.examples import curl_example, python_example

URL = "http://127.0.0.1:9000"


@pytest.mark.parametrize("voice", ["ethan", None])
def test_the_python_example_is_a_program(voice: str | None) -> None:
    program = python_example(URL, "demo", voice)
    compile(program, "example", "exec")
    assert f'base_url="{URL}/v1"' in program
    assert ('"voice": "ethan"' in program) == (voice is not None)


@pytest.mark.parametrize("voice", ["ethan", None])
def test_the_curl_example_sends_a_chat_request(voice: str | None) -> None:
    command = curl_example(URL, "demo", voice)
    found = re.search(r"-d '(.*)'", command)
    assert found is not None
    request = json.loads(found[1])
    assert request["model"] == "demo"
    assert request.get("audio") == ({"voice": voice, "format": "wav"} if voice else None)


def test_a_server_with_keys_shows_where_one_belongs() -> None:
    program = python_example(URL, "demo", "ethan", keyed=True)
    compile(program, "example", "exec")
    assert 'api_key=os.environ["OMNI_API_KEY"]' in program
    assert 'Authorization: Bearer $OMNI_API_KEY"' in curl_example(URL, "demo", "ethan", keyed=True)
