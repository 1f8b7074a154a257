"""A fake SGLang in this process: streams what it is told, for tests of the host around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from megatron_webrl.engine.sglang_server import SglangGone


class FakeSglang:
    """Stands in for `SglangServer`.  Every request samples 10, 11, 12, … , one a `feed`, and ends with `finish`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.controls: list[tuple[str, dict[str, Any]]] = []
        self.version = 7
        self.up = self.healthy_now = True
        self.starts = self.probes = 0
        self._streams: list[asyncio.Queue[Any]] = []

    # What a test does -------------------------------------------------------------------------------------------------

    def feed(self, tokens: int = 1, *, finish: str = "", **meta: Any) -> None:
        """Hand out the next tokens of every request that runs, as one chunk."""
        for stream in self._streams:
            stream.put_nowait((tokens, finish, meta))

    def die(self) -> None:
        """As if killed."""
        self.up = False
        for stream in self._streams:
            stream.put_nowait(SglangGone("it died"))

    # What the host sees -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.starts += 1
        self.up = True

    async def wait_ready(self, timeout_s: float) -> None:
        await asyncio.sleep(0.01)

    def alive(self) -> bool:
        return self.up

    async def healthy(self, timeout_s: float) -> bool:
        self.probes += 1
        return self.healthy_now

    def log_tail(self) -> str:
        return "its log"

    def kill(self) -> None:
        self.up = False

    async def close(self) -> None:
        self.kill()

    async def control(self, path: str, timeout_s: float, **body: Any) -> dict[str, Any]:
        self.controls.append((path, body))
        return {}

    async def generate(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        self.bodies.append(dict(body))
        stream: asyncio.Queue[Any] = asyncio.Queue()
        self._streams.append(stream)
        total = 0
        try:
            while True:
                said = await stream.get()
                if isinstance(said, Exception):
                    raise said
                tokens, finish, meta = said
                ids = list(range(10 + total, 10 + total + tokens))
                total += tokens
                spans = [{"version": str(self.version), "start": 0, "end": total}]
                yield {
                    "output_ids": ids,
                    "meta_info": {
                        "finish_reason": {"type": finish, **meta} if finish else None,
                        "output_token_logprobs": [[-float(i), i, None] for i in ids],
                        "weight_version": str(self.version),
                        "weight_versions": spans if finish else None,
                    },
                }
                if finish:
                    return
        finally:
            self._streams.remove(stream)
