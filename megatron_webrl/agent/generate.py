"""What an episode asks of whatever samples its replies."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from megatron_webrl.wire.messages import Generated


class Generate(Protocol):
    """`engine.GenerationClient.generate` is one, `ScriptedPolicy` another."""

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
        """Sample one reply to `prompt_ids`, which hold one image_pad for each of `digests`; `images` has the bytes by
        digest.  affinity: names the episode, whose requests are best served by one engine.  Raises
        engine.EngineUnreachable after `timeout_s`."""
