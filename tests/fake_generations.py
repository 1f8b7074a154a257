"""A fake of the generations of an engine host, for tests of what is on the other side of the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from megatron_webrl.trajectory import FLOAT32, INT32, pack
from megatron_webrl.wire.messages import (
    CancelGeneration,
    Done,
    EngineUnavailable,
    Generate,
    Generated,
    Generating,
    Message,
    PollGeneration,
)


def tokens(ids: list[int], version: int = 1) -> tuple[bytes, bytes, bytes]:
    """Packed ids, logprobs (a token's own id, negative) and versions."""
    return pack(ids, INT32), pack([-float(i) for i in ids], FLOAT32), pack([version] * len(ids), INT32)


def generated(ids: list[int], version: int = 1, **fields: Any) -> Generated:
    """A finished reply."""
    return Generated(*tokens(ids, version), **{"finish_reason": "stop", "waited_s": 0.0, "running": 0, **fields})


class FakeGenerations:
    """Has `answer` make the reply of every generation; keeps what it was asked."""

    def __init__(self, answer: Callable[[Generate], Awaitable[Message]]) -> None:
        self.answer = answer
        self.requests: list[Generate] = []
        """Those that began."""
        self.messages: list[Message] = []
        self.cancelled: list[str] = []
        self.sampled: list[int] = []
        """So far, of every generation that is not finished."""
        self.waited_s = 0.0
        self._tasks: dict[str, asyncio.Task[Message]] = {}

    def handlers(self) -> dict[type[Message], Callable[[str, Any], Awaitable[Message]]]:
        """Of a Server."""
        return {Generate: self._begin, PollGeneration: self._poll, CancelGeneration: self._cancel}

    def forget(self) -> None:
        """As a host whose process was replaced."""
        self._tasks.clear()

    async def _begin(self, _: str, message: Generate) -> Message:
        self.messages.append(message)
        if message.request not in self._tasks:
            self.requests.append(message)
            self._tasks[message.request] = asyncio.ensure_future(self.answer(message))
        return await self._tell(message.request, 0, message.wait_s)

    async def _poll(self, _: str, message: PollGeneration) -> Message:
        self.messages.append(message)
        return await self._tell(message.request, message.have, message.wait_s)

    async def _tell(self, request: str, have: int, wait_s: float) -> Message:
        task = self._tasks.get(request)
        if task is None:
            return EngineUnavailable("no such generation")
        await asyncio.wait({task}, timeout=wait_s)
        if task.done():
            if not isinstance(task.result(), Generated):  # a repeat begins anew
                del self._tasks[request]
            return task.result()
        return Generating(*tokens(self.sampled[have:]), self.waited_s, running=1)

    async def _cancel(self, _: str, message: CancelGeneration) -> Message:
        self.cancelled.append(message.request)
        return Done()
