"""What flows through the system, from task to group.

Token ids, logprobs and versions travel as packed little-endian bytes (int32, float32, int32): use `pack` and `unpack`.
A trajectory is a small envelope, which the coordinator reads, and an opaque payload (its encoded steps), which only
the trainer and the recorder decode.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np

INT32 = np.dtype("<i4")
FLOAT32 = np.dtype("<f4")


def pack(values: Any, dtype: np.dtype) -> bytes:
    """Sequence of numbers -> packed little-endian bytes of `dtype` (INT32 or FLOAT32)."""
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def unpack(data: bytes, dtype: np.dtype) -> np.ndarray:
    """Packed bytes -> read-only array [n] of `dtype`."""
    return np.frombuffer(data, dtype=dtype)


def image_digest(data: bytes) -> str:
    """Name of encoded image bytes: the first 32 hexadecimal digits of their SHA-256 (which CPUs compute in hardware)."""
    return sha256(data).hexdigest()[:32]


class Lane(StrEnum):
    """What an episode is for."""

    TRAIN = "train"
    EVAL = "eval"


class Outcome(StrEnum):
    """How an attempt ended, and so what becomes of it (`Trajectory.reason` says why)."""

    SUCCESS = "success"
    """The environment or judge said so; trains."""
    FAILURE = "failure"
    """The policy's own doing: wrong, horizon, malformed reply, own deadline, context overflow; trains with its reward."""
    FAULT = "fault"
    """Independent of the policy (a process died, an engine was unreachable): the attempt is issued again."""
    ENVIRONMENT = "environment"
    """Blocked site or page time-out: the whole group is dropped."""


class Task(msgspec.Struct, frozen=True, gc=False):
    """One task as a sampler draws it.  The G episodes of a group share it, seed included."""

    task_id: str
    """Unique, readable: `miniwob/click-test/17`."""
    environment: str
    """Which environment runs it: `miniwob`."""
    name: str
    """Its name there: `click-test`."""
    seed: int
    """Seed of the page."""
    horizon: int
    """Most steps of an episode."""
    difficulty: int = 1
    """1 (easy) to 15."""
    data: str = ""
    """What the environment needs beside, JSON: a row of a task file."""


AttemptKey = tuple[int, int, int]
"""The unit of the account: (group_id, sample_index, attempt)."""


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """One attempt at one episode, leased to a slot."""

    task: Task
    group_id: int
    """Unique in the run, also across restarts."""
    sample_index: int
    """0 … G−1 within the group."""
    attempt: int
    """0, then one more for every re-issue."""
    lane: Lane
    seed: int
    """Seed of the sampler for this episode."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    deadline_s: float
    """Seconds that the episode's own steps may take; waiting for an engine or a refresh is not counted."""
    top_p: float = 1.0
    """Of the eval lane only, as `top_k`: the fewest tokens with this share of the probability; 1 is all."""
    top_k: int = 0
    """So many most likely tokens; 0 is all."""

    @property
    def key(self) -> AttemptKey:
        """What the account knows it by."""
        return (self.group_id, self.sample_index, self.attempt)


class ImageRef(msgspec.Struct, frozen=True, gc=False):
    """A screenshot by name; its bytes are in the screenshot store."""

    digest: str
    width: int
    """Pixels of the encoded image."""
    height: int
    grid: tuple[int, int, int]
    """Patches (t, h, w) that the processor makes of it; tokens = t·h·w / merge²."""


class Step(msgspec.Struct, gc=False):
    """One turn of the agent: a fresh prompt, what was sampled, what it did."""

    prompt_ids: bytes
    """int32 [P]; unexpanded: one image_pad an image, in the order of `images`."""
    images: list[ImageRef]
    response_ids: bytes
    """int32 [R], the end token included when it was sampled."""
    logprobs: bytes
    """float32 [R], at the sampling temperature with never-sampled tokens masked, as the engine gave them."""
    versions: bytes
    """int32 [R]: policy version that sampled each token."""
    finish_reason: str
    """`stop` or `length`."""
    text: str
    """The response decoded, end token removed."""
    action: dict[str, Any] | None
    """Parsed arguments of the tool call; None if the reply was malformed."""
    error: str = ""
    """What the agent is told went wrong (malformed reply, failed action); empty if nothing."""
    notes: list[str] = []
    """What else the agent is told that its action brought about: a dialog, a new tab, a refused download or request."""
    url: str = ""
    title: str = ""
    changed: bool = False
    """Whether the next screenshot differs from the one of this step."""
    generate_s: float = 0.0
    """Seconds from sending the request to its reply."""
    act_s: float = 0.0
    """Seconds of browser work (observe and act)."""


class JudgeCost(msgspec.Struct, gc=False):
    """What a model that judged an episode took."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    """From the first question to the verdict, waiting included."""
    cost: float = 0.0
    """By judge.price_prompt and judge.price_completion."""


class Trajectory(msgspec.Struct, gc=False):
    """An attempt that ended: envelope and payload."""

    assignment: Assignment
    outcome: Outcome
    reason: str
    """One word: solved, wrong, horizon, malformed, deadline, browser_crash, engine_unreachable, blocked, …"""
    reward: float
    num_steps: int
    response_tokens: int
    tokens: int
    """Σ over its steps with response tokens: prompt, images expanded, and response; what training on it costs."""
    min_version: int
    """Oldest policy version among its response tokens; −1 if it has none."""
    max_version: int
    digests: list[str]
    """Every screenshot it refers to, without duplicates."""
    worker: str
    started_at: float
    """Seconds since the epoch."""
    finished_at: float
    payload: bytes
    """`encode_steps(steps)`."""
    verdict: str = ""
    """What the judge said, in words; empty where none was asked."""
    judge_cost: JudgeCost | None = None
    """None where no model judged."""


class Group(msgspec.Struct, gc=False):
    """The G trajectories of one task, in order of sample_index."""

    group_id: int
    task: Task
    trajectories: list[Trajectory]

    @property
    def tokens(self) -> int:
        """Σ tokens of its trajectories."""
        return sum(trajectory.tokens for trajectory in self.trajectories)

    @property
    def digests(self) -> list[str]:
        """Every screenshot of its trajectories, without duplicates."""
        return list(dict.fromkeys(digest for trajectory in self.trajectories for digest in trajectory.digests))


_steps_encoder = msgspec.msgpack.Encoder()
_steps_decoder = msgspec.msgpack.Decoder(list[Step])


def encode_steps(steps: list[Step]) -> bytes:
    """Steps -> payload of a trajectory (msgpack)."""
    return _steps_encoder.encode(steps)


def decode_steps(payload: bytes) -> list[Step]:
    """Payload -> steps.  Raises msgspec.DecodeError or ValidationError on malformed bytes."""
    return _steps_decoder.decode(payload)
