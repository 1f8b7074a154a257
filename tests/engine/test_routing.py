"""Which host a request goes to: a pure rule."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.engine.routing import SLACK, pick
from megatron_webrl.replay.engines import share
from megatron_webrl.wire.messages import EngineStatus

LOADS = st.dictionaries(st.text(min_size=1), st.integers(0, 100), min_size=1, max_size=8)


@given(LOADS, st.integers(0, 99))
def test_never_the_busiest_of_several(loads: dict[str, int], seed: int) -> None:
    """Of two that are drawn the less loaded: the one that is busier than all others is never it."""
    chosen = pick(loads, None, Random(seed))
    assert len(loads) == 1 or any(loads[name] >= loads[chosen] for name in loads if name != chosen)


@given(LOADS, st.data())
def test_home_unless_it_is_far_busier(loads: dict[str, int], data: st.DataObject) -> None:
    home = data.draw(st.sampled_from(sorted(loads)))
    chosen = pick(loads, home, Random(1))
    assert chosen == home or loads[home] > 2 * loads[chosen] + SLACK
    if loads[home] > 2 * max(load for load in loads.values()) + SLACK:
        assert chosen != home


def test_a_home_that_cannot_be_asked_is_no_home() -> None:
    assert pick({"a": 1, "b": 2}, "gone", Random(1)) == "a"


def test_load_is_balanced_over_the_fleet() -> None:
    """64 hosts, 96 workers with 4 hosts each and 32 slots, whose episodes stay at their hosts: when all slots generate, the
    busiest host has at most 1.2 times the mean.  (Every worker's first host alone: over 2.5 times.)"""
    hosts = [EngineStatus(f"engine-{i}", "", "serving", 1, 1, 1, 0) for i in range(64)]
    workers = [f"worker-{i}" for i in range(96)]
    shares = {worker: [host.name for host in share(worker, hosts, 4)] for worker in workers}
    load = {host.name: 0 for host in hosts}
    homes: dict[tuple[str, int], str] = {}
    random = Random(3)
    for _ in range(20):
        slots = [(worker, slot) for worker in workers for slot in range(32)]
        random.shuffle(slots)
        for worker, slot in slots:  # each ends a step and begins another
            if (worker, slot) in homes:
                load[homes[worker, slot]] -= 1
            chosen = pick({name: load[name] for name in shares[worker]}, homes.get((worker, slot)), random)
            homes[worker, slot] = chosen
            load[chosen] += 1
    mean = sum(load.values()) / len(hosts)
    assert max(load.values()) < 1.2 * mean
    assert min(load.values()) > 0.4 * mean
    first = [shares[worker][0] for worker in workers]
    assert max(32 * first.count(host.name) for host in hosts) > 2.5 * mean
