"""Replies from a script, through the same path as sampled ones: for demonstrations and tests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from megatron_webrl.processor import Processor
from megatron_webrl.trajectory import FLOAT32, INT32, pack
from megatron_webrl.wire.messages import Generated


class ScriptedPolicy:
    """Gives `replies` one after another, then empty ones.  Logprobs and versions are 0."""

    def __init__(self, processor: Processor, replies: Sequence[str]) -> None:
        self._processor = processor
        self._replies = list(replies)
        self.prompts: list[str] = []
        """What it was asked, decoded."""

    async def __call__(
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
        self.prompts.append(self._processor.decode(prompt_ids))
        reply = self._replies.pop(0) if self._replies else ""
        ids = [*self._processor.encode(reply), self._processor.end_token_id]
        zeros = [0] * len(ids)
        return Generated(pack(ids, INT32), pack(zeros, FLOAT32), pack(zeros, INT32), "stop", waited_s=0.0, running=0)
