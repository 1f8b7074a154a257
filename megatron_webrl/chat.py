"""Chat completions of an OpenAI-compatible server: one request, its failures told apart."""

from __future__ import annotations

import os
import random
from typing import Any

import aiohttp
import msgspec

from megatron_webrl.errors import UserError

BACK_OFF_S = (1.0, 60.0)
"""First and longest pause after a failed request; doubled each time, times 0.5 to 1."""
REPLY_BYTES = 1 << 20
RETRIED = frozenset((408, 409, 425, 429, 500, 502, 503, 504))


class ChatFailed(Exception):
    """A request had no reply.  final: nor would it have one later; pause_s: that the server asks for."""

    def __init__(self, why: str, *, final: bool = False, pause_s: float = 0.0) -> None:
        super().__init__(why)
        self.final, self._pause_s = final, pause_s

    def pause_s(self, tries: int) -> float:
        """Seconds to wait before the next of `tries` + 2 tries."""
        return self._pause_s or back_off(tries)


class Completion(msgspec.Struct):
    """What a server replied."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class _Text(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Text
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Response(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class ChatClient:
    """url: base URL, as `http://host:8000/v1`; key: sent as bearer token; timeout_s: of a request."""

    def __init__(self, url: str, key: str | None, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """End the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def complete(self, body: dict[str, Any]) -> Completion:
        """Raises ChatFailed."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            async with self._session.post(f"{self.url}/chat/completions", json=body, headers=headers) as answer:
                raw = b"".join([chunk async for chunk in _bounded(answer)])
                if answer.status != 200:
                    raise ChatFailed(
                        f"HTTP {answer.status}: {raw[:200].decode(errors='replace')}",
                        final=answer.status not in RETRIED,
                        pause_s=seconds(answer.headers.get("Retry-After")),
                    )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ChatFailed(f"{type(error).__name__}: {error}") from error
        try:
            response = msgspec.json.decode(raw, type=_Response)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ChatFailed(f"its response is no chat completion: {error}") from None
        if not response.choices:
            raise ChatFailed("its response has no choices")
        usage = response.usage or _Usage()
        choice = response.choices[0]
        return Completion(
            choice.message.content or "", choice.finish_reason or "stop", usage.prompt_tokens, usage.completion_tokens
        )


async def _bounded(answer: aiohttp.ClientResponse) -> Any:
    """Chunks of the body, REPLY_BYTES at most."""
    left = REPLY_BYTES
    async for chunk in answer.content.iter_any():
        yield chunk[:left]
        left -= len(chunk)
        if left <= 0:
            return


def api_key(key: str, variable: str | None) -> str | None:
    """Of the environment.  key: of the configuration, that names the variable.  Raises UserError if it is not set."""
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise UserError(f"{key}={variable} is not set in the environment: export it, or give null")
    return value


def back_off(tries: int) -> float:
    """Seconds to wait after so many failures before."""
    first, longest = BACK_OFF_S
    return min(first * 2**tries, longest) * random.uniform(0.5, 1.0)


def seconds(header: str | None) -> float:
    """Of Retry-After; dates are not read.  At most the longest pause."""
    try:
        return min(max(0.0, float(header or 0)), BACK_OFF_S[1])
    except ValueError:
        return 0.0
