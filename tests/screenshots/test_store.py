"""The screenshot store: by content, bounded, kept while wanted, and leaking nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.screenshots import ScreenshotStore
from megatron_webrl.trajectory import image_digest

OWNER = (1, 0, 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def named(*data: bytes) -> dict[str, bytes]:
    return {image_digest(d): d for d in data}


def test_bytes_that_do_not_match_their_name_are_refused() -> None:
    with pytest.raises(ValueError, match="does not match"):
        ScreenshotStore(100).put({image_digest(b"a"): b"b"})


def test_an_unclaimed_image_expires_and_a_retained_one_stays() -> None:
    clock = Clock()
    store = ScreenshotStore(100, grace_s=10, clock=clock)
    kept, lost = named(b"kept"), named(b"lost")
    store.put(kept | lost)
    assert store.retain(OWNER, list(kept)) == []
    clock.now = 11
    assert store.sweep() == 1
    assert store.lacking([*kept, *lost]) == list(lost)
    store.release([OWNER])
    assert store.get(list(kept)), "asked about just now: kept for the grace"
    clock.now = 22
    store.sweep()
    assert store.state().images == store.state().bytes == 0


def test_repeats_change_nothing_and_every_owner_counts() -> None:
    """A request whose reply was late is sent again: two retains of one owner are one, and so are two releases."""
    clock = Clock()
    store = ScreenshotStore(100, grace_s=10, clock=clock)
    image = named(b"shared")
    store.put(image)
    for owner in (OWNER, OWNER, (2, 0, 0)):
        assert store.retain(owner, list(image)) == []
    clock.now = 11
    for owners in ([OWNER], [OWNER], [(9, 9, 9)]):
        store.release(owners)
        assert store.sweep() == 0, "the other owner still wants it"
    store.release([(2, 0, 0)])
    assert store.sweep() == 1


def test_retaining_is_all_or_none() -> None:
    clock = Clock()
    store = ScreenshotStore(100, grace_s=10, clock=clock)
    here, missing = named(b"here"), named(b"missing")
    store.put(here)
    assert store.retain(OWNER, [*here, *missing]) == list(missing)
    clock.now = 11
    assert store.sweep() == 1, "the failed attempt retained nothing"


def test_a_full_store_takes_nothing_until_there_is_room() -> None:
    clock = Clock()
    store = ScreenshotStore(10, grace_s=10, clock=clock)
    first, second = named(b"x" * 8), named(b"y" * 8)
    assert store.put(first)
    assert not store.put(second)
    clock.now = 11
    assert store.put(second), "the first was never claimed"
    with pytest.raises(ValueError, match="exceed"):
        store.put(named(b"z" * 11))


@given(st.lists(st.tuples(st.sampled_from(["put", "retain", "release", "sweep"]), st.integers(0, 5)), max_size=60))
def test_the_byte_count_is_that_of_the_images_and_never_above_the_limit(actions: list[tuple[str, int]]) -> None:
    clock = Clock()
    store = ScreenshotStore(12, grace_s=2, clock=clock)
    for action, n in actions:
        clock.now += 1
        image = named(bytes([n]) * (n + 1))
        if action == "put":
            store.put(image)
        elif action == "retain":
            store.retain((n, 0, 0), list(image))
        elif action == "release":
            store.release([(n, 0, 0)])
        else:
            store.sweep()
        assert store.bytes == sum(len(v) for v in store._images.values()) <= 12
