r"""Tool calls in the model's answer: which of its text is said, which belongs to calls, and what those say.

Qwen's form, the one its chat template teaches, any number of times in an answer:

    <tool_call>\n{"name": "<function>", "arguments": {…}}\n</tool_call>

vLLM's Hermes parser reads the same form, and tests hold this one to it. It is not used because it cannot tell which
tokens are text, loses calls that are malformed and text behind a call when it streams, depends on what vLLM installs,
and reads the whole answer again with every token.
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Callable

from triton_omni.thinker.stop import overlap
from triton_omni.tools import ToolCallDelta, ToolUse

BEGIN, END = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_BRACE = re.compile(r"\s*\}")
_TAG = re.compile(f"{BEGIN}|{END}")


def new_call_id() -> str:
    """As OpenAI's look."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """The next ``num_chars`` of the answer: either all of them are ``text``, or none is said and they may hold news of
    a call.
    """

    num_chars: int
    text: str = ""
    call: ToolCallDelta | None = None


class ToolCallParser:
    """Reads an answer piece by piece; any cut of it gives the same text and calls.

    A call is told as soon as its name and the beginning of its arguments are known; the arguments, raw, as they come.
    What begins like a call but is none leaves as the text it is. White space before a call, and behind the last one,
    is not said. With ``parallel`` False ``done`` turns true with the end of the first call, and the answer is over.
    """

    def __init__(self, *, parallel: bool = True, new_id: Callable[[], str] = new_call_id) -> None:
        self.num_calls = 0
        self._parallel = parallel
        self._new_id = new_id
        self._held = ""
        self._cut = False
        self._read: Callable[[list[Span], bool], bool] = self._read_text
        self._arguments = _ObjectEnd()

    @classmethod
    def of(cls, tools: ToolUse | None) -> ToolCallParser | None:
        """None where nothing may be called."""
        return cls(parallel=tools.parallel) if tools is not None else None

    @property
    def done(self) -> bool:
        return not self._parallel and self.num_calls == 1 and not self.inside

    @property
    def inside(self) -> bool:
        """Whether the answer is in the middle of a call's arguments."""
        return self._read == self._read_arguments

    def push(self, text: str) -> list[Span]:
        """What became certain with the next piece of text."""
        return self._advance(text, last=False)

    def finish(self, *, cut: bool = False) -> list[Span]:
        """The rest, when the answer is over: a call may lack its end tag. Where a limit has ``cut`` the answer, a call
        that has just begun is neither told nor said.
        """
        self._cut = cut
        return self._advance("", last=True)

    def _advance(self, text: str, *, last: bool) -> list[Span]:
        self._held += text
        spans: list[Span] = []
        while not self.done and self._read(spans, last):
            pass
        if self.done and self._held:
            self._take(spans, len(self._held))
        return spans

    def _take(
        self, spans: list[Span], num_chars: int, *, said: bool = False, call: ToolCallDelta | None = None
    ) -> None:
        """Move ``num_chars`` of what is held to a span."""
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        if taken or call is not None:
            spans.append(Span(num_chars, taken if said else "", call))

    # Readers: each takes what it can of ``_held`` and says whether the next one may go on.

    def _read_text(self, spans: list[Span], last: bool) -> bool:
        at = self._held.find(BEGIN)
        if at >= 0:
            self._take(spans, len(self._held[:at].rstrip()), said=True)
            self._read = self._read_head
            return True
        certain = len(self._held) - (0 if last else overlap(self._held, BEGIN))
        if self.num_calls or not last:
            certain = len(self._held[:certain].rstrip())
        self._take(spans, certain, said=True)
        if last:
            self._take(spans, len(self._held))
        return False

    def _read_head(self, spans: list[Span], last: bool) -> bool:
        """From BEGIN, with the white space before it, to the arguments."""
        begin = self._held.index(BEGIN) + len(BEGIN)
        body = self._held[begin:]
        if head := _HEAD.match(body):
            self._tell_call(spans, begin + head.end(), head[1], "")
            self._arguments = _ObjectEnd()
            self._read = self._read_arguments
            return True
        if (inside := body.lstrip()) and inside[0] != "{":
            return self._no_call(spans, begin)
        end = body.find(END)
        if end < 0 and not last:
            return False
        num_chars = len(self._held) if end < 0 else begin + end + len(END)
        call = _whole_call(body if end < 0 else body[:end])
        if call is None and end < 0 and self._cut:
            self._take(spans, num_chars)
            return False
        if call is None:
            return self._no_call(spans, num_chars)
        self._tell_call(spans, num_chars, *call)
        self._read = self._read_text
        return True

    def _read_arguments(self, spans: list[Span], last: bool) -> bool:
        num_chars, ended = self._arguments.find(self._held, last=last)
        if num_chars:
            news = {"index": self.num_calls - 1, "function": {"arguments": self._held[:num_chars]}}
            self._take(spans, num_chars, call=news)
        if ended:
            self._read = self._read_tail
        return ended

    def _read_tail(self, spans: list[Span], last: bool) -> bool:
        """From the arguments to END: a brace, or what else the model may have put there."""
        brace = _BRACE.match(self._held)
        start = brace.end() if brace else 0
        rest = self._held[start:].lstrip()
        if len(rest) < len(END) and END.startswith(rest) and not last:
            return False
        if rest.startswith(END):
            num_chars = len(self._held) - len(rest) + len(END)
        elif brace:
            num_chars = start
        elif next_tag := _TAG.search(self._held):
            num_chars = next_tag.start() if next_tag[0] == BEGIN else next_tag.end()
        elif last:
            num_chars = len(self._held)
        else:
            return False
        self._take(spans, num_chars)
        self._read = self._read_text
        return True

    def _tell_call(self, spans: list[Span], num_chars: int, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        call = {"index": self.num_calls, "id": self._new_id(), "type": "function", "function": function}
        self._take(spans, num_chars, call=call)
        self.num_calls += 1

    def _no_call(self, spans: list[Span], num_chars: int) -> bool:
        self._take(spans, num_chars, said=True)
        self._read = self._read_text
        return True


class _ObjectEnd:
    """Finds the end of a JSON object in pieces of text, the first of which begins with its brace."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str, *, last: bool) -> tuple[int, bool]:
        """(how many characters of ``text`` are the object's, whether it ends there). What the object does not reach
        must come again with the next piece. An object without its braces or quotes ends where END cannot be part of
        any JSON: outside a string, or behind a raw line break in one.
        """
        for i, char in enumerate(text):
            if self._in_string:
                if char == "\n" and (after := text[i + 1 : i + 1 + len(END)]) == END:
                    return i, True
                if char == "\n" and END.startswith(after) and not last:
                    return i, False
                self._in_string = char != '"' or self._escaped
                self._escaped = char == "\\" and not self._escaped
            elif char == "<":
                return i, True
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return i + 1, True
        return len(text), False


def _whole_call(body: str) -> tuple[str, str] | None:
    """(name, arguments) of a call that is not in the usual order; None when it is no call."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not name.isprintable() or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments)
