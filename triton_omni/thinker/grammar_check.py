"""Judges grammars before vLLM gets them: whether llguidance takes them, and at what cost.

A few lines of schema can ask for hours and gigabytes (``minItems: 1e9``). So each grammar is prepared once in a process
of its own, which the kernel ends when CPU time or memory run out, and its parent when no answer comes. vLLM prepares
the same grammar with the same limits, in a thread beside its step loop, and from then on pays for each token's mask at
most what llguidance's limits allow.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

from triton_omni.errors import InvalidRequestError, StageError
from triton_omni.thinker.constraint import Constraint

CPU_S = 2.0  # for one grammar, whatever else the machine does
MEMORY_BYTES = 2 << 30  # for the tokenizer's tables (0.2 GB of a vocabulary of 152k) and one grammar
WALL_S = 120.0  # for one answer of the process, its start's too; a busy machine gives it a small part of a core
_TRIED_MASKS = 4  # what is too large fails with the first tokens: the whole of an object's keys, of a string's pattern
_MAX_MESSAGE_CHARS = 300
_TOO_COSTLY = (
    f"takes more than {CPU_S:g} s of CPU time, {MEMORY_BYTES >> 30} GiB or {WALL_S:g} s to prepare; give a simpler one"
)


class GrammarChecker:
    """Starts its process with ``start`` or the first grammar. One check at a time, from a thread that may wait."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def start(self) -> None:
        """Start the process ahead of the first grammar; where it does not start, that grammar's check says so."""
        with self._lock, contextlib.suppress(StageError, OSError):
            self._process = self._process or self._start()

    def check(self, constraint: Constraint) -> None:
        """Raises InvalidRequestError naming ``constraint.field``, or StageError when nothing can be judged."""
        with self._lock:
            process = self._process or self._start()
            verdict = _ask(process, [constraint.kind, constraint.text])
            if verdict is None:
                self._end(process)
        if verdict != "":
            told = _TOO_COSTLY if verdict is None else f"cannot be used: {verdict}"
            raise InvalidRequestError(constraint.field, told)

    def close(self) -> None:
        """A check that is running fails."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise StageError("thinker", "is shutting down")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._process = process
        backend = self._tokenizer.backend_tokenizer.to_str()
        if _ask(process, [backend, self._vocab_size, self._tokenizer.eos_token_id]) != "":
            self._end(process)
            raise StageError("thinker", "the process that checks grammars does not start")
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        process.kill()
        with contextlib.suppress(OSError), process:  # what it did not read is lost
            pass


def _ask(process: subprocess.Popen[bytes], message: Any) -> str | None:
    """None: it ended instead of answering, or was ended after WALL_S."""
    assert process.stdin is not None and process.stdout is not None
    overdue = threading.Event()

    def end() -> None:
        overdue.set()
        process.kill()

    timer = threading.Timer(WALL_S, end)
    timer.daemon = True
    timer.start()
    try:
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except OSError:
        return None
    finally:
        timer.cancel()
        timer.join()  # it kills now or never
    return str(json.loads(answer)) if answer.endswith(b"\n") and not overdue.is_set() else None


def main() -> None:
    """The process: one JSON line in, one out; ends with its input."""
    import llguidance

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines = iter(sys.stdin.buffer)
    backend, vocab_size, eos_id = json.loads(next(lines))
    tokenizer = llguidance.LLTokenizer(backend, n_vocab=vocab_size, eos_token=eos_id)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    verdict = ""
    while True:
        sys.stdout.write(json.dumps(verdict) + "\n")
        sys.stdout.flush()
        if (line := next(lines, None)) is None:
            return
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # CPU time of all its threads; its signal ends the process
        verdict = _judge(tokenizer, *json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _judge(tokenizer: Any, kind: str, text: str) -> str:
    """What is wrong with the grammar; "" when nothing is."""
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(text) if kind == "json" else LLMatcher.grammar_from_lark(text)
    except ValueError as error:
        return str(error)[:_MAX_MESSAGE_CHARS]
    # As vLLM judges it, without tokenizer: what needs one (special tokens by name) does not pass there.
    fault: str = LLMatcher.validate_grammar(grammar) or _try(LLMatcher(tokenizer, grammar, log_level=0))
    return fault.partition("\n<state>")[0][:_MAX_MESSAGE_CHARS]


def _try(matcher: Any) -> str:
    """Masks of the first tokens, as far as there is one way only."""
    for _ in range(_TRIED_MASKS):
        matcher.compute_bitmask()
        if matcher.is_error():
            break
        forced = matcher.compute_ff_tokens()
        taken = matcher.validate_tokens(forced)  # not all, where a special token is proposed for its name as text
        if not taken or not matcher.consume_tokens(forced[:taken]):
            break
    return str(matcher.get_error())


if __name__ == "__main__":
    main()
