"""The refresh, led by trainer rank 0: every engine gets the newest weights, and none ever serves a mixture.

    for each cell of engines, in turn:
        groups stand (one a pipeline stage: that stage's first rank and the cell's engines), if they do not yet
        begin at all engines | for each bucket of the plan: load at all engines, send at its stage | end at all engines

One bucket is under way at a time, over all stages: SGLang receives one at a time, and two orders at two engines would
wait for each other for ever.  The replies of the engine hosts are the truth about a broadcast, and every one is checked.
When a step fails at one engine, a broadcast can be lost for all: the cell's engines then load the same version from an
export on disk, and so does every engine that appears between two refreshes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from megatron_webrl.config import RefreshConfig
from megatron_webrl.trainer.export import Bucket, begin_directory, complete_directory
from megatron_webrl.trainer.source import in_thread
from megatron_webrl.wire import Client, Keys, Message, RequestFailed, RequestTimeout, WireError
from megatron_webrl.wire.messages import (
    BeginRefresh,
    Checksum,
    ChecksumValue,
    Done,
    DropGroup,
    EndRefresh,
    Engines,
    EngineStatus,
    GiveUpBroadcast,
    JoinWeightGroup,
    LeaveWeightGroup,
    ListEngines,
    LoadBucket,
    LoadFromDisk,
    OpenRendezvous,
    Rendezvous,
    SendBucket,
    StandGroup,
    WriteStage,
)

log = logging.getLogger(__name__)

TRIES = 3
"""To make a weight group; and loads from disk that an engine may refuse before the run ends."""
REPLY_GRACE_S = 10.0
"""A host answers at its deadline at the latest, when it has killed its SGLang; so much later we give up on itself."""
GIVE_UP_S = 5.0
"""When a member of a group is lost: so long the others may need to notice it, before their hosts kill them."""
REJOIN_AFTER_S = 1.0
LOOK_EVERY_S = 1.0
LEAVE_S = 3.0
"""At the end, when nothing depends on it."""
COORDINATOR_AWAY_S = 300.0
"""So long a question is repeated before the trainer gives up: a killed coordinator is back in some seconds."""

Key = tuple[str, int]
"""Name and incarnation of an engine."""
Expected = TypeVar("Expected", bound=Message)


class RefreshError(Exception):
    """Engines are there and do not take the weights, or do not hold them afterwards."""


@dataclass
class RefreshReport:
    """What a publish did."""

    version: int
    seconds: float = 0.0
    """In all."""
    pause_s: float = 0.0
    """Longest that an engine stood still."""
    engines: list[EngineStatus] = field(default_factory=list)
    """Those that serve the version."""
    failed: list[str] = field(default_factory=list)
    """Engines that were ready and do not serve it: they load it from disk when they can."""
    from_disk: list[str] = field(default_factory=list)
    """Of `engines`, those that a broadcast did not reach."""
    verified: int = 0
    """Engines whose weights were compared with a second load of the export."""

    @property
    def hosts(self) -> list[str]:
        """Names of `engines`."""
        return [engine.name for engine in self.engines]


class WeightPublisher:
    """Leads refreshes; trainer rank 0 owns the only one.  All of it runs in one event loop.

    coordinator: is asked for the engines; plan: of all stages; sources: the address of each stage's `WeightSource`;
    backend: `gloo` or `nccl`; export_dir: gets exports, as `v7`, and must be seen by stages and engines alike; model_path:
    whose configuration and tokenizer an export gets.
    """

    def __init__(
        self,
        config: RefreshConfig,
        coordinator: Client,
        plan: Sequence[Bucket],
        sources: Sequence[str],
        *,
        backend: str,
        export_dir: Path,
        model_path: Path,
        keys: Keys | None = None,
    ) -> None:
        self._config, self._coordinator, self._plan, self._backend = config, coordinator, plan, backend
        self._export_dir, self._model_path, self._keys = export_dir.resolve(), model_path, keys
        self._timeout_s = config.timeout_s
        self._sources = [Client(address, coordinator.run_id, "refresh", keys=keys) for address in sources]
        self._engines: dict[str, Client] = {}
        self._snapshot = asyncio.Lock()
        """Held while the stages' snapshots are filled or read."""
        self._version: int | None = None
        """That the snapshots hold, whole."""
        self._exported: int | None = None
        self._holds: dict[Key, int] = {}
        """What each engine is known to serve."""
        self._loading: dict[Key, asyncio.Task[None]] = {}
        self._refused: dict[str, int] = {}
        self._cell_of: dict[str, int] = {}
        self._groups: dict[int, _Groups] = {}
        """By cell."""
        self._groups_made = self._refreshes = 0
        self._seen: dict[str, EngineStatus] = {}
        """By the coordinator, when it was last asked about a host that does not answer."""
        self._looked_at = 0.0
        self._looking = asyncio.Lock()

    # What the trainer calls

    async def reserve(self) -> None:
        """Wait until nobody reads the snapshots: they may be filled from now on, and `publish` must follow."""
        await self._snapshot.acquire()
        self._version = None

    async def publish(self, version: int) -> RefreshReport:
        """Refresh every ready engine to `version`, which is being filled into the snapshots since `reserve`, or is whole.

        Raises RefreshError if an engine proves to hold other weights afterwards, WireError if the coordinator is gone.
        """
        try:
            return await self._publish(version)
        finally:
            self._snapshot.release()

    async def _publish(self, version: int) -> RefreshReport:
        began = time.monotonic()
        report = RefreshReport(version)
        if self._loading:  # one that is just done takes part
            await asyncio.wait(self._loading.values(), timeout=LOOK_EVERY_S)
        loading = {key for key, task in self._loading.items() if not task.done()}
        ready = [h for h in await self._list() if _ready(h) and _key(h) not in loading]
        if self._config.transport == "disk" and ready:
            await self._export(version)
        for cell, hosts in sorted(self._cells(ready).items()):
            await self._refresh_cell(cell, hosts, version, report)
        self._version = version
        self._refreshes += bool(report.engines)
        report.seconds = time.monotonic() - began
        if report.engines and self._due():
            report.verified = await self._verify(version, report.engines)
        return report

    def _due(self) -> bool:
        every = self._config.verify_every
        return every > 0 and (self._refreshes - 1) % every == 0

    async def load_joiners(self) -> None:
        """For ever: give the newest weights to every engine that appears between two refreshes, from disk.  Raises
        RefreshError if one refuses them again and again."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for key in [key for key, task in self._loading.items() if task.done()]:
                self._loading.pop(key).result()
            if self._version is None:
                continue
            try:
                hosts = await self._list()
            except WireError as error:
                log.warning("coordinator: %s", error)
                continue
            self._forget({_key(h) for h in hosts})
            for host in hosts:
                if self._wants(host) and _key(host) not in self._loading:
                    self._loading[_key(host)] = asyncio.create_task(self._load(host))

    async def close(self) -> None:
        """Leave the weight groups at the engines, and drop all connections and exports.  The coordinator's is the owner's."""
        for groups in self._groups.values():
            for group in groups.names:
                leave = LeaveWeightGroup(group, LEAVE_S)
                await asyncio.gather(
                    *(self._engine(h).request(leave, timeout=LEAVE_S, expect=Done) for h in groups.members),
                    return_exceptions=True,
                )
        for client in (*self._sources, *self._engines.values()):
            client.close()
        self._engines.clear()
        await in_thread(lambda: shutil.rmtree(self._export_dir, ignore_errors=True), 60.0)

    # Engines

    async def _list(self) -> list[EngineStatus]:
        reply = await self._coordinator.request(ListEngines(), timeout=5.0, expect=Engines, retry_s=COORDINATOR_AWAY_S)
        return sorted(reply.hosts, key=lambda h: h.name)

    def _wants(self, host: EngineStatus) -> bool:
        """Whether it was left out of the newest refresh."""
        newest = self._version
        if newest is None or not _ready(host):
            return False
        return host.state == "waiting_weights" or max(host.version, self._holds.get(_key(host), -1)) < newest

    def _forget(self, present: set[Key]) -> None:
        names = {name for name, _ in present}
        self._holds = {key: version for key, version in self._holds.items() if key in present}
        self._refused = {name: count for name, count in self._refused.items() if name in names}
        self._cell_of = {name: cell for name, cell in self._cell_of.items() if name in names}

    def _cells(self, hosts: Sequence[EngineStatus]) -> dict[int, list[EngineStatus]]:
        """Hosts by cell; a host stays in its own."""
        size = self._config.cell or max(1, len(hosts))
        cells: dict[int, list[EngineStatus]] = {}
        if self._config.cell is None:
            return {0: list(hosts)} if hosts else {}
        for host in hosts:
            if host.name not in self._cell_of:
                taken = list(self._cell_of.values())
                self._cell_of[host.name] = next(c for c in range(len(taken) + 1) if taken.count(c) < size)
            cells.setdefault(self._cell_of[host.name], []).append(host)
        return cells

    async def _ask(self, host: EngineStatus, message: Message, timeout_s: float) -> str:
        """Empty, or what failed."""
        try:
            await self._request(host, message, timeout_s, Done)
            return ""
        except WireError as error:
            return str(error)

    async def _request(
        self, host: EngineStatus, message: Message, timeout_s: float, expect: type[Expected]
    ) -> Expected:
        """The reply of an engine host.  Raises WireError, also as soon as its process is gone, which it does not say itself."""
        asked = asyncio.ensure_future(
            self._engine(host).request(message, timeout=timeout_s + REPLY_GRACE_S, expect=expect)
        )
        try:
            while not (await asyncio.wait({asked}, timeout=LOOK_EVERY_S))[0]:
                if await self._gone(host):
                    raise RequestTimeout(f"{type(message).__name__}: the host {host.name} is gone")
            return asked.result()
        finally:
            asked.cancel()

    async def _gone(self, host: EngineStatus) -> bool:
        """Whether its process ended, or another took its place."""
        async with self._looking:
            if time.monotonic() - self._looked_at >= LOOK_EVERY_S:
                with contextlib.suppress(WireError):  # what was heard stays good
                    reply = await self._coordinator.request(ListEngines(), timeout=2.0, expect=Engines)
                    self._seen = {h.name: h for h in reply.hosts}
                self._looked_at = time.monotonic()
        now = self._seen.get(host.name)
        return now is not None and (now.state == "dead" or _process(now) != _process(host))

    def _engine(self, host: EngineStatus) -> Client:
        client = self._engines.get(host.address)
        if client is None:
            client = self._engines[host.address] = Client(
                host.address, self._coordinator.run_id, "trainer", keys=self._keys
            )
        return client

    async def _all(self, hosts: Sequence[EngineStatus], message: Callable[[EngineStatus], Message]) -> dict[str, str]:
        """Send to all hosts at once and await every reply.  Returns failures by name."""
        replies = await asyncio.gather(*(self._ask(h, message(h), self._timeout_s) for h in hosts))
        return {h.name: error for h, error in zip(hosts, replies, strict=True) if error}

    # One cell

    async def _refresh_cell(self, cell: int, hosts: list[EngineStatus], version: int, report: RefreshReport) -> None:
        """Refresh these, and note in `report` what came of it."""
        bad: dict[str, str] = {}
        broken: _Groups | None = None
        began = time.monotonic()
        if self._config.transport == "broadcast":
            groups, hosts = await self._stand(cell, hosts, report)
            if groups is None:
                bad = dict.fromkeys((h.name for h in hosts), "no weight group")
            else:
                began = time.monotonic()
                bad = await self._broadcast(groups, hosts, version)
                if bad:
                    log.warning("refresh to version %d failed: %s", version, _told(bad))
                    broken = groups
                    await self._leave(groups, [])
        if bad or self._config.transport == "disk":
            path = await self._export(version)
            bad = await self._all(hosts, lambda h: LoadFromDisk(str(path), version, self._timeout_s))
            if bad:
                log.warning("version %d was not loaded from disk: %s", version, _told(bad))
            report.from_disk += [h.name for h in hosts if h.name not in bad]
        report.pause_s = max(report.pause_s, time.monotonic() - began)
        report.engines += [h for h in hosts if h.name not in bad]
        report.failed += sorted(bad)
        self._holds |= {_key(h): version for h in hosts if h.name not in bad}
        for host in hosts:
            if host.name not in bad:
                self._refused.pop(host.name, None)
        if broken is not None:
            await self._leave(broken, [h for h in hosts if h.name not in bad])

    async def _broadcast(self, groups: _Groups, hosts: Sequence[EngineStatus], version: int) -> dict[str, str]:
        """All buckets, once.  Returns failures, after which the groups are not to be used again."""
        if bad := await self._all(hosts, lambda h: BeginRefresh(version, self._timeout_s)):
            return bad
        for index in range(len(self._plan)):
            if bad := await self._send(groups, hosts, version, index):
                return bad
        return await self._all(hosts, lambda h: EndRefresh(version, self._timeout_s))

    async def _send(self, groups: _Groups, hosts: Sequence[EngineStatus], version: int, index: int) -> dict[str, str]:
        """One bucket.  At the first failure the others are told, and our side of the broadcast is ended."""
        bucket = self._plan[index]
        group = groups.names[bucket.stage]
        message = LoadBucket(
            group=group,
            names=list(bucket.names),
            dtypes=[str(bucket.dtype).removeprefix("torch.")] * len(bucket.names),
            shapes=[list(shape) for shape in bucket.shapes],
            timeout_s=self._timeout_s,
            version=version if index == len(self._plan) - 1 else None,
        )
        loads = {h.name: asyncio.create_task(self._ask(h, message, self._timeout_s)) for h in hosts}
        send = asyncio.create_task(self._source(bucket.stage, SendBucket(group, version, index, self._timeout_s), Done))
        waiting: set[asyncio.Task[str]] = set(loads.values())
        notices: list[asyncio.Task[str]] = []
        lost = False
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not lost and any(task.result() for task in done):
                lost = True
                notice = GiveUpBroadcast(GIVE_UP_S)
                notices = [asyncio.create_task(self._ask(h, notice, 1.0)) for h in hosts if not loads[h.name].done()]
                with contextlib.suppress(WireError):
                    await self._source(bucket.stage, DropGroup(group), Done)
        bad = {name: task.result() for name, task in loads.items() if task.result()}
        if bad:
            send.cancel()
            await asyncio.gather(*notices)
            return bad
        try:
            await send
        except WireError as error:  # every host was content, so none is to blame
            return dict.fromkeys(loads, f"the trainer's side of the broadcast: {error}")
        return {}

    async def _source(self, stage: int, message: Message, expect: type[Expected]) -> Expected:
        """Ask a pipeline stage.  Raises WireError."""
        return await self._sources[stage].request(message, timeout=2 * self._timeout_s + REPLY_GRACE_S, expect=expect)

    # Weight groups

    async def _stand(
        self, cell: int, hosts: list[EngineStatus], report: RefreshReport
    ) -> tuple[_Groups | None, list[EngineStatus]]:
        """The cell's groups with just these hosts, made anew if they are not as they should be; and the hosts that are in
        them: one that does not come to the rendezvous, which fails it for all, is left out of the next try."""
        for _ in range(TRIES):
            groups = self._groups.get(cell)
            if groups is not None and {_key(h) for h in groups.members} == {_key(h) for h in hosts}:
                return groups, hosts
            if groups is not None:
                present = {_key(h) for h in hosts}
                await self._leave(groups, [h for h in groups.members if _key(h) in present])
            if not hosts:
                return None, hosts
            self._groups_made += 1
            name = f"{self._coordinator.run_id}-{uuid.uuid4().hex[:12]}"
            groups = _Groups(cell, [f"{name}-{stage}" for stage in range(len(self._sources))], list(hosts))
            self._groups[cell] = groups
            bad: dict[str, str] = {}
            for stage, group in enumerate(groups.names):
                if bad := await self._join(stage, group, hosts):
                    break
            if not bad:
                continue
            log.warning("weight group %s: %s", name, _told(bad))
            await self._leave(groups, hosts)
            if len(bad) < len(hosts):
                report.failed += sorted(bad)
                hosts = [h for h in hosts if h.name not in bad]
            await asyncio.sleep(REJOIN_AFTER_S)
        groups = self._groups.get(cell)
        return (groups, hosts) if groups is not None else (None, hosts)

    async def _join(self, stage: int, group: str, hosts: Sequence[EngineStatus]) -> dict[str, str]:
        """A rendezvous of a stage and these hosts.  Returns failures."""
        offsets, world = {}, 1
        for host in hosts:
            offsets[host.name] = world
            world += host.ranks
        try:
            met = await self._source(stage, OpenRendezvous(group, world, self._timeout_s), Rendezvous)
            stand = asyncio.create_task(self._source(stage, StandGroup(group, self._timeout_s), Done))
            bad = await self._all(
                hosts,
                lambda h: JoinWeightGroup(
                    group=group,
                    backend=self._backend,
                    master_address=met.address,
                    master_port=met.port,
                    rank_offset=offsets[h.name],
                    world_size=world,
                    timeout_s=self._timeout_s,
                ),
            )
            if bad:
                stand.cancel()
            else:
                await stand
            return bad
        except WireError as error:
            return dict.fromkeys((h.name for h in hosts), f"the trainer's side of the rendezvous: {error}")

    async def _leave(self, groups: _Groups, hosts: Sequence[EngineStatus]) -> None:
        """Give the groups up, on our side and at these hosts."""
        self._groups.pop(groups.cell, None)
        for stage, group in enumerate(groups.names):
            with contextlib.suppress(WireError):
                await self._source(stage, DropGroup(group), Done)
            await self._all(hosts, lambda h, group=group: LeaveWeightGroup(group, self._timeout_s))  # type: ignore[misc]

    # Disk

    async def _export(self, version: int) -> Path:
        """The directory of `version`, which the snapshots hold, written once.  Raises RefreshError."""
        directory = self._export_dir / f"v{version}"
        if self._exported == version:
            return directory
        try:
            partial = await in_thread(lambda: begin_directory(directory), self._timeout_s)
            message = WriteStage(str(partial), version, self._timeout_s)
            await asyncio.gather(*(self._source(stage, message, Done) for stage in range(len(self._sources))))
            await in_thread(lambda: complete_directory(directory, self._plan, self._model_path), self._timeout_s)
        except (OSError, WireError) as error:  # TimeoutError is an OSError
            raise RefreshError(
                f"the export {directory} could not be written ({str(error) or 'too slow'}): make room there, or raise "
                f"refresh.timeout_s={self._timeout_s:g}"
            ) from None
        self._exported = version
        if not self._loading:
            older = [d for d in self._export_dir.iterdir() if d != directory]
            await in_thread(lambda: [shutil.rmtree(d, ignore_errors=True) for d in older], self._timeout_s)
        return directory

    async def _load(self, host: EngineStatus) -> None:
        """One engine, the newest version, from disk.  Raises RefreshError at the last refusal."""
        async with self._snapshot:
            if (version := self._version) is None:
                return
            path = await self._export(version)
        try:
            await self._request(host, LoadFromDisk(str(path), version, self._timeout_s), self._timeout_s, Done)
            self._holds[_key(host)] = version
            self._refused.pop(host.name, None)
            log.info("%s loaded version %d from disk", host.name, version)
        except WireError as error:
            log.warning("%s did not load version %d from disk: %s", host.name, version, error)
            refused = self._refused[host.name] = self._refused.get(host.name, 0) + isinstance(error, RequestFailed)
            if refused >= TRIES:
                raise RefreshError(f"{host.name} did not load {path} in {refused} tries: {error}") from None

    # Proof

    async def _verify(self, version: int, hosts: Sequence[EngineStatus]) -> int:
        """Compare the weights of these engines with a second load of the same export, by one of them.  Returns how many
        were compared; raises RefreshError if one differs.  One that died meanwhile is not compared."""
        path = await self._export(version)
        found: dict[str, str] = {}
        size = self._config.cell or len(hosts)
        for first in range(0, len(hosts), size):
            cell = hosts[first : first + size]
            for host, value in zip(cell, await asyncio.gather(*map(self._checksum, cell)), strict=True):
                if value is not None and value.version == version:
                    found[host.name] = value.value
        for host in hosts:
            if host.name not in found:
                continue
            if await self._ask(host, LoadFromDisk(str(path), version, self._timeout_s), self._timeout_s):
                continue
            again = await self._checksum(host)
            if again is None or again.version != version:
                continue
            if wrong := sorted(name for name, value in found.items() if value != again.value):
                raise RefreshError(
                    f"after the refresh to version {version} the weights of {', '.join(wrong)} are not those of the same export "
                    f"loaded from disk ({path}): the broadcast or the engine's loader changes them; with "
                    "refresh.transport=disk the run can go on"
                )
            log.info("version %d: the weights of %d engines are those of its export", version, len(found))
            return len(found)
        return 0

    async def _checksum(self, host: EngineStatus) -> ChecksumValue | None:
        try:
            return await self._request(host, Checksum(self._timeout_s), self._timeout_s, ChecksumValue)
        except WireError as error:
            log.warning("checksum of %s: %s", host.name, error)
            return None


@dataclass
class _Groups:
    """Of one cell: a weight group a pipeline stage."""

    cell: int
    names: list[str]
    """By stage."""
    members: list[EngineStatus]


def _key(host: EngineStatus) -> Key:
    return host.name, host.incarnation


def _process(host: EngineStatus) -> tuple[str, int]:
    """Names the host's own process: it counts its SGLang's incarnations from one base."""
    return host.address, host.incarnation - host.starts


def _ready(host: EngineStatus) -> bool:
    return host.state in ("waiting_weights", "serving")


def _told(bad: dict[str, str]) -> str:
    return "; ".join(f"{name}: {error}" for name, error in bad.items())
