"""A pipeline stage's side of a refresh: the weight groups in which its first rank is rank 0, and its files of an export.

It does what the publisher (`refresh`) says over the wire, in threads beside training.  A broadcast that hangs is ended by
giving its group up; nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megatron_webrl.trainer.export import Snapshot, write_stage
from megatron_webrl.wire import Keys, Message, Server
from megatron_webrl.wire.messages import (
    Done,
    DropGroup,
    OpenRendezvous,
    Rendezvous,
    SendBucket,
    StandGroup,
    WriteStage,
)

log = logging.getLogger(__name__)


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit[Result](self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begin it there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, timeout_s: float = 10.0) -> None:
        """End it, with all that still runs there."""

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        with contextlib.suppress(TimeoutError):
            self.submit(cancel()).result(timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)


async def in_thread[Result](work: Callable[[], Result], timeout_s: float) -> Result:
    """Its result, from a thread of its own: one that hangs occupies nobody.  Raises TimeoutError, and what it raises."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Result] = loop.create_future()

    def settle(value: Result | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    async with asyncio.timeout(timeout_s):
        return await result


class WeightSource:
    """Rank 0 of the weight groups of one pipeline stage.

    address: to bind for the publisher's messages; host: where engines reach this process; backend: `gloo` or `nccl`;
    device: that NCCL sends from.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        run_id: str,
        address: str,
        host: str,
        backend: str,
        device: torch.device,
        keys: Keys | None = None,
    ) -> None:
        self._snapshot, self._host, self._backend, self._device = snapshot, host, backend, device
        self._groups: dict[str, _WeightGroup] = {}
        self._server = Server(
            address,
            run_id,
            {
                OpenRendezvous: self._open,
                StandGroup: self._stand,
                SendBucket: self._send,
                DropGroup: self._drop,
                WriteStage: self._write,
            },
            keys=keys,
        )

    async def start(self) -> str:
        """Answer from now on; returns at which address."""
        await self._server.start()
        return self._server.address

    async def close(self) -> None:
        """Leave all groups."""
        await self._server.close()
        for group in self._groups.values():
            group.abort()
        self._groups.clear()

    async def _open(self, sender: str, message: OpenRendezvous) -> Message:
        group = _WeightGroup(message.group, message.world_size, self._backend, self._device, message.timeout_s)
        self._groups[message.group] = group
        return Rendezvous(self._host, group.listen(self._host))

    async def _stand(self, sender: str, message: StandGroup) -> Message:
        await in_thread(self._groups[message.group].stand, message.timeout_s)
        return Done()

    async def _send(self, sender: str, message: SendBucket) -> Message:
        group = self._groups[message.group]

        def send() -> None:
            group.broadcast(self._snapshot.get(message.bucket, message.version, timeout_s=message.timeout_s))

        await in_thread(send, 2 * message.timeout_s)
        return Done()

    async def _drop(self, sender: str, message: DropGroup) -> Message:
        group = self._groups.pop(message.group, None)
        if group is not None:
            await in_thread(group.abort, 10.0)
        return Done()

    async def _write(self, sender: str, message: WriteStage) -> Message:
        def write() -> None:
            write_stage(Path(message.partial), self._snapshot, message.version, timeout_s=message.timeout_s)

        await in_thread(write, message.timeout_s)
        return Done()


class _WeightGroup:
    """A process group of this process (rank 0) and engines, independent of the trainer's own."""

    def __init__(self, name: str, world_size: int, backend: str, device: torch.device, timeout_s: float) -> None:
        self.name, self.world_size, self.backend, self._device = name, world_size, backend, device
        self._timeout = timedelta(seconds=timeout_s)
        self._store: dist.TCPStore | None = None
        self._group: Any = None
        self._stream: Any = None

    def listen(self, host: str) -> int:
        """The port on which members meet."""
        self._store = dist.TCPStore(
            host, 0, self.world_size, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        return int(self._store.port)

    def stand(self) -> None:
        """Rendezvous; returns when every member is there.

        The same as SGLang's `init_custom_process_group`, whose import would cost 12 s and 270 MB.  torch has no public
        way to make a group that is not a part of the default one.
        """
        assert self._store is not None
        self._group, _ = c10d._new_process_group_helper(
            self.world_size,
            0,
            [],
            c10d.Backend(self.backend),
            dist.PrefixStore(self.name, self._store),
            group_name=c10d.GroupName(self.name),
            timeout=self._timeout,
        )
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(self.world_size)}

    def broadcast(self, flat: Tensor) -> None:
        """Send uint8 [n], from the device that the backend wants.  Raises RuntimeError if the group was given up."""
        group = self._group
        if group is None:  # which torch would take for the trainer's own group of all ranks
            raise RuntimeError(f"weight group {self.name} was given up")
        if self.backend != "nccl":
            dist.broadcast(flat, src=0, group=group)
            return
        torch.cuda.set_device(self._device)
        self._stream = self._stream or torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            dist.broadcast(flat.cuda(non_blocking=True), src=0, group=group)
            self._stream.synchronize()

    def abort(self) -> None:
        """Give the group up, also in the middle of a collective."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(Exception):
                group.abort()
            for registry in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks):
                registry.pop(group, None)
            with contextlib.suppress(Exception):
                c10d._unregister_process_group(c10d.GroupName(self.name))
        self._store = None
