"""Weights from trainer rank 0 to every engine that is ready for them: join, begin, one broadcast a bucket, end.

Every step has a deadline.  The replies of the engine hosts are the truth about a broadcast: nothing waits on the
collective itself before all of them have answered.  An engine that fails a step is killed by its own host, left out,
and the refresh is repeated for the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_webrl.wire import BlockingClient, Keys, WireError
from megatron_webrl.wire.messages import (
    BeginRefresh,
    Done,
    EndRefresh,
    Engines,
    EngineStatus,
    JoinWeightGroup,
    LeaveWeightGroup,
    ListEngines,
    LoadBucket,
    Message,
)

log = logging.getLogger(__name__)

TRIES = 3
REPLY_GRACE_S = 10.0
"""A host answers at its deadline at the latest, when it has killed its SGLang; so much later we give up on itself."""

REJOIN_AFTER_S = 1.0
LEAVE_TIMEOUT_S = 5.0
COORDINATOR_AWAY_S = 300.0
"""So long a question is repeated before the trainer gives up: a killed coordinator is back in some seconds."""

NamedTensors = Sequence[tuple[str, torch.Tensor]]


class RefreshError(Exception):
    """Engines were ready, and none could be refreshed."""


@dataclass
class RefreshReport:
    """What a publish did."""

    version: int
    seconds: float
    hosts: list[str] = field(default_factory=list)
    """Engines that serve the version."""
    failed: list[str] = field(default_factory=list)
    """Engines that were ready and failed a step: they restart and wait for weights."""


class WeightPublisher:
    """Leads refreshes; trainer rank 0 owns the only one.

    coordinator: is asked for the engines; backend: `gloo` (CPU) or `nccl`; timeout_s: deadline of every step;
    bucket_bytes: most bytes of a broadcast (a larger tensor goes alone); address: where engines reach this process.
    """

    def __init__(
        self,
        coordinator: BlockingClient,
        run_id: str,
        backend: str,
        timeout_s: float,
        bucket_bytes: int = 512 << 20,
        address: str = "127.0.0.1",
        keys: Keys | None = None,
    ) -> None:
        self._coordinator, self._run_id, self._backend, self._timeout_s = coordinator, run_id, backend, timeout_s
        self._bucket_bytes, self._address, self._keys = bucket_bytes, address, keys
        self._group: _WeightGroup | None = None
        self._groups_made = 0
        self._clients: dict[str, BlockingClient] = {}

    def publish(self, version: int, tensors: NamedTensors, engines: list[EngineStatus] | None = None) -> RefreshReport:
        """Refresh every ready engine to `version`.

        tensors: Hugging Face name and whole tensor, any device and dtype.  engines: as the coordinator lists them;
        None asks it.  Returns with `hosts` empty if no engine is ready, or none any more: those in `failed` restart and
        will wait for weights.  Raises RefreshError if engines stayed ready and no try reached them.
        """
        began = time.monotonic()
        report = RefreshReport(version, 0.0)
        out: set[tuple[str, int]] = set()
        for attempt in range(TRIES):
            listed = engines if engines is not None and attempt == 0 else self._list()
            ready = [h for h in listed if h.state in ("waiting_weights", "serving") and _key(h) not in out]
            if not ready:
                break
            bad, killed = self._refresh(ready, version, tensors)
            if not bad:
                report.hosts = [h.name for h in ready]
                break
            log.warning("refresh to version %d failed: %s", version, "; ".join(f"{n}: {e}" for n, e in bad.items()))
            self._drop_group()
            report.failed = sorted({*report.failed, *bad})
            if killed:
                out |= {_key(h) for h in ready if h.name in bad}
            else:
                time.sleep(REJOIN_AFTER_S)
        else:
            raise RefreshError(
                f"version {version} reached no engine in {TRIES} tries; failed: {', '.join(report.failed)}"
            )
        report.failed = [name for name in report.failed if name not in report.hosts]
        report.seconds = time.monotonic() - began
        return report

    def close(self) -> None:
        """Leave the weight group and drop all connections."""
        if self._group is not None:
            members, name = self._group.members, self._group.name
            self._drop_group()
            self._all(members, lambda h: LeaveWeightGroup(name, LEAVE_TIMEOUT_S), LEAVE_TIMEOUT_S)
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def _list(self) -> list[EngineStatus]:
        return self._coordinator.request(ListEngines(), timeout=5.0, expect=Engines, retry_s=COORDINATOR_AWAY_S).hosts

    def _refresh(self, hosts: list[EngineStatus], version: int, tensors: NamedTensors) -> tuple[dict[str, str], bool]:
        """One try.  Returns what failed, by host, and whether those that failed are being restarted (a step failed) or
        may be asked again (only the rendezvous did: one that does not come fails it for all)."""
        timeout = self._timeout_s
        stands = self._group is not None and self._group.keys == {_key(h) for h in hosts}
        if not stands and (bad := self._join(hosts)):
            return bad, False
        assert self._group is not None
        group = self._group
        if bad := self._all(hosts, lambda h: BeginRefresh(version, timeout), timeout):
            return bad, True
        for bucket in buckets(tensors, self._bucket_bytes):
            if bad := self._send(hosts, group, bucket):
                return bad, True
        return self._all(hosts, lambda h: EndRefresh(version, timeout), timeout), True

    def _send(
        self, hosts: list[EngineStatus], group: _WeightGroup, bucket: list[tuple[str, torch.Tensor]]
    ) -> dict[str, str]:
        """One bucket, as one broadcast of its bytes."""
        message = LoadBucket(
            group=group.name,
            names=[name for name, _ in bucket],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            shapes=[list(tensor.shape) for _, tensor in bucket],
            timeout_s=self._timeout_s,
        )
        flat = torch.cat([tensor.detach().contiguous().flatten().view(torch.uint8) for _, tensor in bucket])
        return self._all(hosts, lambda h: message, self._timeout_s, meanwhile=lambda: group.broadcast(flat))

    def _join(self, hosts: list[EngineStatus]) -> dict[str, str]:
        """Leave the old group, make a new one, on a fresh port and under a fresh name, with these hosts."""
        if self._group is not None:
            present = {_key(h) for h in hosts}
            stay = [h for h in self._group.members if _key(h) in present]
            old = self._group.name
            self._drop_group()
            self._all(stay, lambda h: LeaveWeightGroup(old, self._timeout_s), self._timeout_s)
        self._groups_made += 1
        name = self._group_name()
        offsets, world = {}, 1
        for host in hosts:
            offsets[host.name] = world
            world += host.ranks
        store = dist.TCPStore(
            self._address, 0, world, is_master=True, timeout=timedelta(seconds=self._timeout_s), wait_for_workers=False
        )

        def message(host: EngineStatus) -> JoinWeightGroup:
            return JoinWeightGroup(
                group=name,
                backend=self._backend,
                master_address=self._address,
                master_port=store.port,
                rank_offset=offsets[host.name],
                world_size=world,
                timeout_s=self._timeout_s,
            )

        group = _WeightGroup(name, hosts, self._backend)
        bad = self._all(hosts, message, self._timeout_s, meanwhile=lambda: group.stand(store, world, self._timeout_s))
        self._group = group
        return bad

    def _group_name(self) -> str:
        return f"{self._run_id}-{os.getpid()}-{self._groups_made}"

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _all(
        self,
        hosts: Sequence[EngineStatus],
        message: Callable[[EngineStatus], Message],
        timeout_s: float,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[str, str]:
        """Send to all hosts at once, take part in the collective meanwhile, and await every reply.  Returns failures.

        The collective runs in a thread of its own: it must not outlive the replies, and if they fail it is aborted.
        """
        pool = ThreadPoolExecutor(max_workers=len(hosts) + 1, thread_name_prefix="refresh")
        ours = pool.submit(meanwhile) if meanwhile is not None else None
        futures = {h.name: pool.submit(self._ask, h, message(h), timeout_s + REPLY_GRACE_S) for h in hosts}
        pool.shutdown(wait=False)
        bad = {}
        for name, future in futures.items():
            if error := future.result():
                bad[name] = error
        if ours is not None and not bad:
            try:
                ours.result(timeout=timeout_s)
            except Exception as error:  # every host was content, so none is to blame: all are asked again
                bad = {h.name: f"the trainer's side of the collective: {error}" for h in hosts}
        return bad

    def _ask(self, host: EngineStatus, message: Message, timeout_s: float) -> str:
        """Empty, or what failed.  One request at a time for a host, from whichever thread."""
        client = self._clients.get(host.address)
        if client is None:
            client = self._clients[host.address] = BlockingClient(
                host.address, self._run_id, "trainer", keys=self._keys
            )
        try:
            client.request(message, timeout=timeout_s, expect=Done)
            return ""
        except WireError as error:
            return str(error)


class _WeightGroup:
    """A process group of the trainer (rank 0) and the engines, independent of the trainer's own."""

    def __init__(self, name: str, members: Sequence[EngineStatus], backend: str) -> None:
        self.name, self.members, self.backend = name, list(members), backend
        self.keys = {_key(h) for h in members}
        self._group: Any = None

    def stand(self, store: dist.Store, world_size: int, timeout_s: float) -> None:
        """Rendezvous; returns when every member is there.

        The same as SGLang's `init_custom_process_group`, whose import would cost 12 s and 270 MB.  torch has no public
        way to make a group that is not a part of the default one.
        """
        timeout = timedelta(seconds=timeout_s)
        self._group, _ = c10d._new_process_group_helper(
            world_size,
            0,
            [],
            c10d.Backend(self.backend),
            dist.PrefixStore(self.name, store),
            group_name=c10d.GroupName(self.name),
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send bytes, uint8 [n], on the device that the backend wants."""
        if self.backend == "nccl":
            flat = flat.cuda()
        dist.broadcast(flat, src=0, group=self._group)
        if self.backend == "nccl":
            torch.cuda.current_stream().synchronize()

    def abort(self) -> None:
        """Give the group up, also in the middle of a collective."""
        group, self._group = self._group, None
        if group is None:
            return
        with contextlib.suppress(Exception):
            group.abort()
        for registry in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks):
            registry.pop(group, None)
        with contextlib.suppress(Exception):
            c10d._unregister_process_group(c10d.GroupName(self.name))


def buckets(tensors: NamedTensors, limit: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Neighbours of one dtype (a bucket's tensors must be aligned), together at most `limit` bytes, at least one."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and (size + tensor.nbytes > limit or tensor.dtype != bucket[0][1].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _key(host: EngineStatus) -> tuple[str, int]:
    return host.name, host.incarnation
