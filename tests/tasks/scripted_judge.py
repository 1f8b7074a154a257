"""An OpenAI-compatible server of this machine that says what a script tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class ScriptedJudge:
    """answer: prompt text -> the reply's text, or a whole response.  `asked`: bodies, in order; `most`: at once."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.delay_s = 0.0
        self.at_once = self.most = 0
        self.url = ""

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(request.headers)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.at_once -= 1
        said = self.answer(text_of(body))
        if isinstance(said, web.Response):
            return said
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return web.json_response({"choices": [{"message": {"content": said}}], "usage": usage})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedJudge]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()


def text_of(body: dict[str, Any]) -> str:
    """Of the user's turn, without its images."""
    return next(part["text"] for part in body["messages"][1]["content"] if part["type"] == "text")


def images_of(body: dict[str, Any]) -> int:
    return sum(part["type"] == "image_url" for part in body["messages"][1]["content"])


def verdict(yes: bool, reason: str = "because") -> str:
    return json.dumps({"reason": reason, "verdict": "yes" if yes else "no"})
