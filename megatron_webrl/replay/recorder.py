"""What a run keeps of its rollouts: every n-th group as files that anything opens, and whole batches (see `batches`).

trajectories/group-000150/group.json                    task, and per trajectory its outcome, reward, steps
trajectories/group-000150/images/DIGEST.png              or .jpg (browser.screenshot_format)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from megatron_webrl.errors import UserError
from megatron_webrl.replay.batches import BatchWriter
from megatron_webrl.screenshots import fetch, write_image
from megatron_webrl.trajectory import FLOAT32, INT32, Group, Step, Trajectory, decode_steps, unpack
from megatron_webrl.wire import Client

STORE_TIMEOUT_S = 60.0
"""For the screenshots of one group."""
CLOSE_TIMEOUT_S = 30.0


class BatchRecorder:
    """Records batches beside what the coordinator does, one at a time, while their screenshots are held.

    directory: the run's `batches/`; store: where screenshots come from.
    """

    def __init__(self, directory: Path, store: Client) -> None:
        self.step = 0
        """Of the newest batch, as `batches` counts."""
        self._directory = directory
        self._store = store
        self._writing: asyncio.Task[None] | None = None

    def begin(self, step: int, version: int, groups: list[Group], lineage: tuple[tuple[int, int], ...]) -> None:
        """Record the batch of train step `step`, once the one before is `whole`; the same step again (a repeated question) is
        ignored."""
        if step != self.step:
            assert self.whole
            self.step = step
            self._writing = asyncio.create_task(self._write(step, version, groups, lineage))

    @property
    def busy(self) -> bool:
        """Whether the newest batch is not whole yet."""
        return self._writing is not None and not self._writing.done()

    @property
    def whole(self) -> bool:
        """Whether the newest batch is on disk (or there is none yet); False for ever if it could not be recorded, which
        `check` says."""
        return self._writing is None or (self._writing.done() and self._writing.exception() is None)

    def check(self) -> None:
        """Raises what went wrong with the newest batch: UserError if it could not be written, WireError if the store did
        not answer."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def close(self) -> None:
        """A batch that is not whole is given up."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing], timeout=CLOSE_TIMEOUT_S)  # a disk that hangs must not hold up the end

    async def _write(self, step: int, version: int, groups: list[Group], lineage: tuple[tuple[int, int], ...]) -> None:
        try:
            writer = await _in_thread(BatchWriter, self._directory, step)
            try:
                for group in groups:
                    images = await fetch(self._store, group.digests, timeout=STORE_TIMEOUT_S)
                    await _in_thread(writer.add_images, images)
                await _in_thread(writer.finish, version, groups, lineage)
            except BaseException:
                writer.abandon()
                raise
        except OSError as error:
            raise UserError(
                f"observe.record_batches: the batch of step {step} cannot be written to {self._directory} ({error.strerror}): "
                "make room there, or record no batches"
            ) from None


async def _in_thread[**P, R](work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`work` in a thread; cancelled, it waits for the thread: what the caller does next must not race with it."""
    thread = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait([thread])
        raise


def record_group(directory: Path, group: Group, images: dict[str, bytes]) -> Path:
    """Write one group under `directory` (the run's `trajectories/`) and return its folder."""
    folder = directory / f"group-{group.group_id:06d}"
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for digest, data in images.items():
        write_image(folder / "images", digest, data)
    task = {name: getattr(group.task, name) for name in group.task.__struct_fields__}
    content = {"group_id": group.group_id, "task": task, "trajectories": [_trajectory(t) for t in group.trajectories]}
    (folder / "group.json").write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    return folder


def _trajectory(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "sample_index": trajectory.assignment.sample_index,
        "attempt": trajectory.assignment.attempt,
        "outcome": trajectory.outcome,
        "reason": trajectory.reason,
        "reward": trajectory.reward,
        "worker": trajectory.worker,
        "seconds": round(trajectory.finished_at - trajectory.started_at, 3),
        "steps": [_step(step) for step in decode_steps(trajectory.payload)],
    }


def _step(step: Step) -> dict[str, Any]:
    return {
        "images": [ref.digest for ref in step.images],
        "text": step.text,
        "action": step.action,
        "error": step.error,
        "url": step.url,
        "title": step.title,
        "changed": step.changed,
        "finish_reason": step.finish_reason,
        "response_ids": unpack(step.response_ids, INT32).tolist(),
        "logprobs": [round(float(x), 5) for x in unpack(step.logprobs, FLOAT32)],
        "versions": unpack(step.versions, INT32).tolist(),
    }
