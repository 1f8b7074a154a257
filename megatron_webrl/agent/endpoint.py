"""Replies of a model behind an OpenAI-compatible endpoint, for evaluation: the same prompts, as messages.

Tokens are our tokenizer's of the text that came back; logprobs are 0 and the version is −1, for nothing trains on them.
"""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import Hashable, Sequence
from typing import Any

from megatron_webrl.chat import ChatClient, ChatFailed, api_key
from megatron_webrl.config import RunConfig
from megatron_webrl.engine import EngineUnreachable
from megatron_webrl.processor import END_TOKEN, Processor
from megatron_webrl.screenshots import is_jpeg
from megatron_webrl.trajectory import FLOAT32, INT32, pack
from megatron_webrl.wire.messages import Generated

_TURN = re.compile(rf"<\|im_start\|>(\w+)\n(.*?)(?:{re.escape(END_TOKEN)}\n|\Z)", re.DOTALL)
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def check_endpoint(config: RunConfig) -> None:
    """Raises UserError if its API key is not there."""
    api_key("evaluation.api_key_env", config.evaluation.api_key_env)


class EndpointPolicy:
    """A `Generate` over chat completions."""

    def __init__(self, config: RunConfig, processor: Processor) -> None:
        how = config.evaluation
        assert how.endpoint is not None
        key = api_key("evaluation.api_key_env", how.api_key_env)
        self._chat = ChatClient(how.endpoint, key, config.engine.request_timeout_s)
        self._model = how.endpoint_model
        self._max_tokens = config.sampling.max_new_tokens
        self._stop = config.sampling.stop
        self._processor = processor

    async def close(self) -> None:
        """End the connections."""
        await self._chat.close()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        images: dict[str, bytes],
        *,
        seed: int,
        temperature: float,
        timeout_s: float,
        digests: Sequence[str],
        top_p: float,
        top_k: int,
        affinity: Hashable,
    ) -> Generated:
        """See `Generate`."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages(
                self._processor.tokenizer.decode(list(prompt_ids), skip_special_tokens=False), digests, images
            ),
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": self._max_tokens,
            "seed": seed,
        }
        if top_k:
            body["top_k"] = top_k  # SGLang's and vLLM's; OpenAI's own refuses it
        if self._stop:
            body["stop"] = self._stop
        deadline = time.monotonic() + timeout_s
        tries = 0
        while True:
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                    reply = await self._chat.complete(body)
            except TimeoutError:
                raise EngineUnreachable(f"{self._chat.url}: no reply within {timeout_s:g} s") from None
            except ChatFailed as failed:
                pause_s = failed.pause_s(tries)
                if failed.final or time.monotonic() + pause_s > deadline:
                    raise EngineUnreachable(f"{self._chat.url}: {failed}") from None
                await asyncio.sleep(pause_s)
                tries += 1
            else:
                break
        cut = reply.finish_reason == "length"
        ids = [*self._processor.encode(reply.text), *([] if cut else [self._processor.end_token_id])]
        return Generated(
            pack(ids, INT32),
            pack([0] * len(ids), FLOAT32),
            pack([-1] * len(ids), INT32),
            "length" if cut else "stop",
            0.0,
            0,
        )


def messages(prompt: str, digests: Sequence[str], images: dict[str, bytes]) -> list[dict[str, Any]]:
    """A prompt's turns; screenshots as data URLs in their places.  What begins the reply is left out."""
    shown = iter(digests)
    turns = [(role, text) for role, text in _TURN.findall(prompt) if role != "assistant"]
    return [{"role": role, "content": _content(text, shown, images)} for role, text in turns]


def _content(text: str, shown: Any, images: dict[str, bytes]) -> Any:
    if _IMAGE not in text:
        return text
    content: list[dict[str, Any]] = []
    for number, part in enumerate(text.split(_IMAGE)):
        if number:
            data = images[next(shown)]
            url = f"data:image/{'jpeg' if is_jpeg(data) else 'png'};base64,{base64.b64encode(data).decode()}"
            content.append({"type": "image_url", "image_url": {"url": url}})
        if part.strip():
            content.append({"type": "text", "text": part})
    return content
