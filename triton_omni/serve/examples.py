"""What a ready server prints: where it answers, and two ways to make it speak."""

from __future__ import annotations

import json

WAV_FILE = "answer.wav"
KEY_VARIABLE = "OMNI_API_KEY"


def chat_request(model: str, voice: str | None) -> dict[str, object]:
    """A chat request that asks for speech as WAV; for text when the checkpoint has no voices."""
    request: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
    }
    if voice is not None:
        request |= {"modalities": ["text", "audio"], "audio": {"voice": voice, "format": "wav"}}
    return request


def curl_example(url: str, model: str, voice: str | None, *, keyed: bool = False) -> str:
    """A shell command that prints the answer's text and, with a voice, writes its speech to a WAV file.

    ``keyed``: the server wants a key; it is taken from the environment.
    """
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if keyed else ""
    message = "message = json.load(sys.stdin)['choices'][0]['message']; print(message['content'])"
    if voice is not None:
        message += f"; open('{WAV_FILE}', 'wb').write(base64.b64decode(message['audio']['data']))"
    return f"""\
curl -sSf {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\
  -d '{json.dumps(chat_request(model, voice))}' |
  python3 -c "import base64, json, sys; {message}"
"""


def python_example(url: str, model: str, voice: str | None, *, keyed: bool = False) -> str:
    """A program on the ``openai`` client: prints text as it comes and, with a voice, writes the speech as it comes."""
    key = f'os.environ["{KEY_VARIABLE}"]' if keyed else '"unused"'
    opening = f"""\
import base64, {"os, " if keyed else ""}wave
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key={key})
"""
    if voice is None:
        return f"""{opening}
stream = client.chat.completions.create(
    model="{model}", stream=True, messages=[{{"role": "user", "content": "Tell me about the sea."}}]
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
"""
    return f"""{opening}
stream = client.chat.completions.create(
    model="{model}", stream=True, modalities=["text", "audio"], audio={{"voice": "{voice}", "format": "pcm16"}},
    messages=[{{"role": "user", "content": "Tell me about the sea."}}],
)
with wave.open("{WAV_FILE}", "wb") as wav:
    wav.setparams((1, 2, 24000, 0, "NONE", ""))
    for chunk in stream:
        delta = chunk.choices[0].delta.to_dict() if chunk.choices else {{}}
        print(delta.get("content") or "", end="", flush=True)
        wav.writeframes(base64.b64decode((delta.get("audio") or {{}}).get("data") or ""))
"""
