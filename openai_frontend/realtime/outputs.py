"""The items of one answer, opened and closed in the client's sight."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from openai_frontend.realtime.conversation import AnyItem, FunctionCall, Status, new_id

Send: TypeAlias = Callable[..., Awaitable[None]]
Remember: TypeAlias = Callable[[AnyItem], "str | None"]


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """``index``: among the answer's items; ``before``: the id of the one before it in the conversation."""

    item: AnyItem
    index: int
    before: str | None


class Outputs:
    """``remember``: puts an item into the conversation and tells the id of the one before it; None: the answer is
    outside the conversation.
    """

    def __init__(self, response_id: str, send: Send, remember: Remember | None) -> None:
        self._response_id = response_id
        self._send = send
        self._remember = remember
        self._opened: list[Output] = []

    @property
    def json(self) -> list[dict[str, Any]]:
        return [output.item.json() for output in self._opened]

    async def open(self, item: AnyItem) -> Output:
        output = Output(item, len(self._opened), self._remember(item) if self._remember else None)
        self._opened.append(output)
        await self._tell("added", output)
        return output

    async def close(self, output: Output, status: Status) -> None:
        output.item.status = status
        await self._tell("done", output)

    async def send_of(self, output: Output, event: str, **fields: Any) -> None:
        """An event about an item."""
        about = {"response_id": self._response_id, "output_index": output.index}
        await self._send(event, **about, **fields)

    async def _tell(self, what: str, output: Output) -> None:
        item = output.item.json()
        await self.send_of(output, f"response.output_item.{what}", item=item)
        if self._remember:
            await self._send(f"conversation.item.{what}", previous_item_id=output.before, item=item)


class FunctionCalls:
    """The calls of one answer; one ends where the next begins."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._begun = 0
        self._open: tuple[Output, FunctionCall] | None = None

    async def take(self, deltas: Sequence[Mapping[str, Any]]) -> None:
        """The first delta of a call brings its id and its function's name; later ones more of the arguments."""
        for delta in deltas:
            function = delta["function"]
            if self._open is None or delta["index"] == self._begun:
                await self.finish("completed")
                call = FunctionCall(new_id("item"), delta["id"], function["name"], status="in_progress")
                self._open = await self._outputs.open(call), call
                self._begun += 1
            output, call = self._open
            if piece := function.get("arguments"):
                call.arguments += piece
                await self._send_of(output, call, "delta", delta=piece)

    async def finish(self, status: Status) -> None:
        if self._open is None:
            return
        (output, call), self._open = self._open, None
        await self._send_of(output, call, "done", name=call.name, arguments=call.arguments)
        await self._outputs.close(output, status)

    async def _send_of(self, output: Output, call: FunctionCall, what: str, **fields: Any) -> None:
        about = {"item_id": call.id, "call_id": call.call_id}
        await self._outputs.send_of(output, f"response.function_call_arguments.{what}", **about, **fields)
