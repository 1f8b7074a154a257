"""What an environment gives the agent: episodes that are reset, observed and acted on."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Observation(NamedTuple):
    """What the agent sees before a step."""

    utterance: str
    """The task in words."""
    screenshot: bytes
    """Encoded image."""
    url: str
    title: str


class Acted(NamedTuple):
    """What an action brought about."""

    error: str
    """What the agent is told went wrong; empty if nothing."""
    done: bool
    """The environment ended the episode."""
    reward: float
    """0 or 1; counts when done."""


class Episode(Protocol):
    """One episode.  Every method raises BrowserFault (independent of the policy), PageTimeout or PageError (the
    environment's doing)."""

    async def reset(self) -> Observation:
        """Begin; called once."""

    async def act(self, action: dict[str, Any]) -> Acted:
        """Do one action that `browser.check_action` accepts."""

    async def observe(self) -> Observation:
        """The page after an action."""

    async def close(self) -> None:
        """Give everything back; raises nothing."""
