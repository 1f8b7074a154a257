"""Which engine hosts a worker is given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_system import Start

from megatron_webrl.replay import engines
from megatron_webrl.replay.engines import EngineRegistry, share
from megatron_webrl.wire.messages import Done, Engines, EngineStatus, ListEngines


def host(name: str, state: str = "serving") -> EngineStatus:
    return EngineStatus(name, f"ipc://{name}", state, 1, 1, 1, 0)


def names(hosts: list[EngineStatus]) -> list[str]:
    return [h.name for h in hosts]


FLEET = [host(f"engine-{i}") for i in range(64)]
WORKERS = [f"worker-{i}" for i in range(96)]


@given(st.integers(1, 20), st.integers(1, 8))
def test_as_many_as_there_are(hosts: int, count: int) -> None:
    """Never fewer than min(n, k), and none twice."""
    given_ = share("w", FLEET[:hosts], count)
    assert len({h.name for h in given_}) == len(given_) == min(hosts, count)


def test_a_host_that_leaves_or_joins_moves_few() -> None:
    """Only those that have it among theirs, and of theirs only that one."""
    changed = 0
    for worker in WORKERS:
        with_all, without = set(names(share(worker, FLEET, 4))), set(names(share(worker, FLEET[1:], 4)))
        assert with_all - without <= {"engine-0"}
        changed += with_all != without
    assert 0 < changed < 3 * 96 * 4 / 64


def test_every_host_is_somebodys() -> None:
    given_ = [name for worker in WORKERS for name in names(share(worker, FLEET, 4))]
    counts = [given_.count(h.name) for h in FLEET]
    assert min(counts) > 0
    assert max(counts) <= 3 * 96 * 4 / 64


def test_hosts_that_serve_come_first() -> None:
    """A worker is never left with hosts that start while others serve."""
    fleet = [host(f"engine-{i}", "serving" if i == 7 else "starting") for i in range(8)]
    for worker in WORKERS:
        assert names(share(worker, fleet, 4))[0] == "engine-7"


def test_those_that_leave_or_are_gone_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draining, dead, or silent; the trainer sees them all."""
    registry = EngineRegistry()
    for status in (host("a"), host("b", "draining"), host("c", "dead"), host("d", "waiting_weights")):
        registry.hear(status)
    assert set(names(registry.given("w", 4))) == {"a", "d"}
    assert set(names(registry.hosts())) == {"a", "b", "c", "d"}
    monkeypatch.setattr(engines, "SILENT_S", -1.0)
    assert registry.given("w", 4) == []


async def test_the_coordinator_gives_a_worker_its_share_and_the_trainer_all(start: Start) -> None:
    """engine.hosts_per_worker of those that live."""
    system = start(engine={"hosts_per_worker": 3})
    for status in (*FLEET[:5], host("leaving", "draining")):
        await system.ask(status, Done)
    given_ = (await system.ask(ListEngines("w"), Engines)).hosts
    assert names(given_) == names(share("w", FLEET[:5], 3))
    assert len((await system.ask(ListEngines(), Engines)).hosts) == 6
