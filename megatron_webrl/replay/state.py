"""What a checkpoint keeps of the coordinator (`replay.bin`): what the ledger does not know and a resumed run goes on from."""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_webrl.errors import UserError
from megatron_webrl.trajectory import Task

FORMAT = 1


class SavedReplay(msgspec.Struct):
    """State of the replay between two train steps."""

    sampler: dict[str, Any]
    """`UniformSampler.state`."""
    begun: list[Task]
    """Tasks of train groups that were begun and neither trained nor dropped, in order: they are practised again first."""
    recent: list[float]
    """Rewards of the newest train episodes."""
    recent_mixed: list[bool]
    """Of the newest complete groups, whether their rewards differ."""
    lag_sum: float
    """Σ lag of all trained response tokens."""
    lag_tokens: int
    """Trained response tokens."""
    lag_max: int
    format: int = FORMAT


def encode_state(state: SavedReplay) -> bytes:
    """-> the bytes of `replay.bin` (msgpack)."""
    return msgspec.msgpack.encode(state)


def decode_state(data: bytes, where: str) -> SavedReplay:
    """The bytes of `replay.bin` -> state.  Raises UserError naming `where` they come from if they are malformed or of
    another format."""
    try:
        state = msgspec.msgpack.decode(data, type=SavedReplay)
    except msgspec.MsgspecError as error:
        raise broken_state(where, str(error)) from None
    if state.format != FORMAT:
        raise broken_state(where, f"format {state.format}, this version reads {FORMAT}")
    return state


def broken_state(where: str, problem: str) -> UserError:
    """The error of a `replay.bin` that cannot be used."""
    return UserError(
        f"checkpoint {where}: replay.bin: {problem}: move the checkpoint away, and --resume goes on from the one before"
    )
