#!/usr/bin/env python3
"""Does a server say what it is given? Word error rate of its speech, as it is understood.

    scripts/speech_check.py --url http://127.0.0.1:9000                     # the model hears what it has said itself
    scripts/speech_check.py --judge-url http://HOST:PORT --judge-model NAME # another server understands it

Each sentence goes to /v1/audio/speech, the sound to /v1/audio/transcriptions, and both texts are compared without case
and punctuation. Ends with 1 when the word error rate over all sentences is above --max-wer, so that it can stand in a
pipeline; with 2 when a server refuses or cannot be reached. The demo checkpoint's speech is no language: 1 or more.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import jiwer
import openai

SENTENCES = (
    "The train to the coast leaves at a quarter past nine from platform four.",
    "Please put the blue cup next to the window and close the door behind you.",
    "Seven children ran across the wet grass to catch the last bus home.",
    "Her brother repairs old radios and sells them at the market on Sundays.",
    "It rained all night, but in the morning the sky over the harbour was clear.",
    "Nobody expected the small theatre to be full on a Tuesday evening.",
    "Mix the flour with two eggs, add some milk, and wait for half an hour.",
    "The doctor said that walking every day would help more than any medicine.",
)
PLAIN = jiwer.Compose(
    [
        jiwer.ToLowerCase(),
        jiwer.RemovePunctuation(),
        jiwer.RemoveMultipleSpaces(),
        jiwer.Strip(),
        jiwer.ReduceToListOfListOfWords(),
    ]
)


def word_error_rate(said: list[str], heard: list[str]) -> float:
    """Substitutions, deletions and insertions over the words that were to be said."""
    return float(jiwer.wer(said, heard, reference_transform=PLAIN, hypothesis_transform=PLAIN))


def model_of(client: openai.OpenAI, named: str | None) -> str:
    return named or client.models.list().data[0].id


def check(speaker: openai.OpenAI, judge: openai.OpenAI, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per sentence: ``said``, ``heard``, ``wer``."""
    voices = {"model": model_of(speaker, options.model), "voice": options.voice, "response_format": "wav"}
    judge_model = model_of(judge, options.judge_model or (None if options.judge_url else options.model))
    rows = []
    for said in options.sentences:
        sound = speaker.audio.speech.create(input=said, **voices).read()
        heard = judge.audio.transcriptions.create(file=("speech.wav", io.BytesIO(sound)), model=judge_model).text
        rows.append({"said": said, "heard": heard, "wer": round(word_error_rate([said], [heard]), 4)})
        print(f"{rows[-1]['wer']:6.3f}  {said}\n        {heard}", flush=True)
    return rows


def lines(path: str) -> list[str]:
    try:
        found = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"must be a text file: {error}") from None
    if not found:
        raise argparse.ArgumentTypeError(f"must hold a sentence, {path} is empty")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:9000")
    parser.add_argument("--model", help="none: the first that the server lists")
    parser.add_argument("--voice", default="ethan")
    parser.add_argument("--judge-url", help="a server with /v1/audio/transcriptions; none: the same one")
    parser.add_argument("--judge-model", help="none: the first that it lists")
    parser.add_argument("--sentences", type=lines, default=SENTENCES, help="text file, one a line; none: eight of ours")
    parser.add_argument("--max-wer", type=float, default=0.05, help="the most that is no failure (default 0.05)")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="for each request")
    parser.add_argument("--out", type=Path, help="JSON file of the rows and the rate")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    key = os.environ.get("OPENAI_API_KEY", "none")
    speaker, judge = (
        openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=key, timeout=options.timeout_s)
        for url in (options.url, options.judge_url or options.url)
    )
    try:
        rows = check(speaker, judge, options)
    except openai.OpenAIError as error:
        print(f"speech_check.py: {error}", file=sys.stderr)
        return 2
    rate = word_error_rate([row["said"] for row in rows], [row["heard"] for row in rows])
    print(f"word error rate {rate:.3f} over {len(rows)} sentences, at most {options.max_wer:g} wanted")
    if options.out is not None:
        options.out.write_text(json.dumps({"wer": round(rate, 4), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if rate > options.max_wer else 0


if __name__ == "__main__":
    sys.exit(main())
