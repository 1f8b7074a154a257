"""The screenshot store: by content, bounded, kept as long as somebody owns it, and leaking nothing."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from megatron_webrl.errors import UserError
from megatron_webrl.screenshots import ScreenshotStore
from megatron_webrl.trajectory import AttemptKey, image_digest

OWNER, OTHER = (1, 0, 0), (2, 0, 0)
LIMIT = 40
"""Of the machine's store, in bytes: few of its images fit."""
IMAGES = {image_digest(data): data for data in (bytes([n]) * (n + 1) for n in range(12))}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def named(*data: bytes) -> dict[str, bytes]:
    return {image_digest(d): d for d in data}


def add(store: ScreenshotStore, owner: AttemptKey, images: dict[str, bytes]) -> None:
    store.claim(owner, list(images))
    assert store.put(owner, images)


def on_disk(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.pack"))


owners = st.tuples(st.integers(0, 2), st.integers(0, 1), st.just(0))
some = st.lists(st.sampled_from(sorted(IMAGES)), max_size=5, unique=True)


class StoreMachine(RuleBasedStateMachine):
    """The store does what two dictionaries do, whatever happens to its process and its disk."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.generation = 0
        self.images: dict[str, bytes] = {}
        self.claims: dict[AttemptKey, set[str]] = {}
        self.claimed_at: dict[AttemptKey, float] = {}
        self.open()

    @property
    def directory(self) -> Path:
        return self.root / str(self.generation)

    def open(self) -> None:
        self.store = ScreenshotStore(self.directory, LIMIT, clock=self.clock)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.root)

    def forget(self, gone: list[AttemptKey]) -> None:
        """What loses its last owner goes; an image that nobody owned is never there."""
        for owner in gone:
            self.claims.pop(owner, None)
            self.claimed_at.pop(owner, None)
        owned = set().union(*self.claims.values())
        self.images = {digest: data for digest, data in self.images.items() if digest in owned}

    @rule(owner=owners, digests=some)
    def claim(self, owner: AttemptKey, digests: list[str]) -> None:
        assert self.store.claim(owner, digests) == [d for d in digests if d not in self.images]
        self.claims.setdefault(owner, set()).update(digests)
        self.claimed_at[owner] = self.clock.now

    @rule(owner=owners, digests=some)
    def put(self, owner: AttemptKey, digests: list[str]) -> None:
        images = {digest: IMAGES[digest] for digest in digests}
        new = {digest: data for digest, data in images.items() if digest not in self.images}
        size = sum(map(len, new.values()))
        if not set(digests) <= self.claims.get(owner, set()):
            with pytest.raises(ValueError, match="not claimed"):
                self.store.put(owner, images)
        elif size > LIMIT:
            with pytest.raises(ValueError, match="exceed"):
                self.store.put(owner, images)
        else:
            fits = sum(map(len, self.images.values())) + size <= LIMIT
            assert self.store.put(owner, images) == fits
            if fits:
                self.images |= new

    @rule(digests=some, limit=st.integers(1, 50))
    def get(self, digests: list[str], limit: int) -> None:
        found, missing = self.store.get(digests, limit)
        asked = digests[: len(found) + len(missing)]
        assert missing == [d for d in asked if d not in self.images]
        assert found == {d: self.images[d] for d in asked if d in self.images}
        assert len(found) < 2 or sum(map(len, found.values())) <= limit
        assert len(asked) == len(digests) or found, "asking on leads to the end"

    @rule(digests=some)
    def lacking(self, digests: list[str]) -> None:
        assert self.store.lacking(digests) == [d for d in digests if d not in self.images]

    @rule(gone=st.lists(owners, max_size=3))
    def release(self, gone: list[AttemptKey]) -> None:
        self.store.release(gone)
        self.forget(gone)

    @rule(kept=st.lists(owners, max_size=3), older=st.integers(0, 5))
    def keep(self, kept: list[AttemptKey], older: int) -> None:
        self.store.keep(kept, older)
        self.forget([o for o, at in self.claimed_at.items() if o not in kept and at < self.clock.now - older])

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()

    @rule(torn=st.binary(max_size=9))
    def kill(self, torn: bytes) -> None:
        """The files as they are, and half a pack that was being written."""
        before, self.generation = self.directory, self.generation + 1
        shutil.copytree(before, self.directory)
        self.store.close()
        shutil.rmtree(before)
        (self.directory / "99999999.pack").write_bytes(torn)
        self.open()

    @rule(digest=st.sampled_from(sorted(IMAGES)))
    def damage(self, digest: str) -> None:
        if digest in self.images:
            place = self.store._place(digest)
            assert place
            pack, position, _ = place
            with (self.directory / f"{pack}.pack").open("r+b") as file:
                file.seek(position)
                file.write(b"\xff")
            self.store.close()  # the machine failed
            self.open()
            assert self.store.get([digest]) == ({}, [digest])
            del self.images[digest]

    @invariant()
    def bytes_are_those_on_disk(self) -> None:
        state = self.store.state()
        assert state.images == len(self.images)
        assert state.bytes == sum(map(len, self.images.values())) == on_disk(self.directory) <= LIMIT
        assert state.owners == len(self.claims)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_bytes_that_do_not_match_their_name_are_refused(tmp_path: Path) -> None:
    store = ScreenshotStore(tmp_path, 100)
    wrong = {image_digest(b"a"): b"b"}
    store.claim(OWNER, list(wrong))
    with pytest.raises(ValueError, match="does not match"):
        store.put(OWNER, wrong)
    assert on_disk(tmp_path) == 0


def test_what_can_never_fit_names_the_key(tmp_path: Path) -> None:
    store = ScreenshotStore(tmp_path, 10)
    large = named(b"x" * 11)
    store.claim(OWNER, list(large))
    with pytest.raises(ValueError, match=r"11 bytes exceed replay\.screenshot_bytes=10: raise it"):
        store.put(OWNER, large)


def test_an_image_of_two_owners_stays_for_the_second_and_takes_no_more_than_its_bytes(tmp_path: Path) -> None:
    """What was uploaded together with it goes with the first."""
    store = ScreenshotStore(tmp_path, 100)
    shared, own, late = named(b"shared"), named(b"own"), named(b"late")
    add(store, OWNER, shared | own)
    assert store.claim(OTHER, [*shared, *late]) == list(late)
    assert store.put(OTHER, late)
    store.release([OWNER])
    assert store.get([*shared, *own, *late]) == (shared | late, list(own))
    assert store.state().bytes == on_disk(tmp_path) == len(b"shared" + b"late")
    store.release([OTHER, OTHER, (9, 9, 9)])
    assert store.state().images == store.state().owners == on_disk(tmp_path) == 0


def test_keep_forgets_owners_by_their_last_claim_also_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    store = ScreenshotStore(tmp_path, 100, clock=clock)
    old, young, kept = named(b"old"), named(b"young"), named(b"kept")
    add(store, OWNER, old)
    add(store, OTHER, young)
    add(store, (3, 0, 0), kept)
    clock.now += 400
    store.claim(OTHER, [])
    store.close()
    store = ScreenshotStore(tmp_path, 100, clock=clock)
    store.keep([(3, 0, 0)], 300)
    assert store.lacking([*old, *young, *kept]) == list(old)


def full_disk(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[], None]:
    """Packs are written in part only; returns what makes room again."""
    opened = Path.open

    def fail(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = opened(path, mode, *args, **kwargs)
        if mode == "xb":
            file.write(b"half")
            file.close()
            raise OSError(number, "no room")
        return file

    monkeypatch.setattr(Path, "open", fail)
    return lambda: monkeypatch.setattr(Path, "open", opened)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_full_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Nothing is added, what is there stays, and releasing works: also of half an upload, whose rest cannot be moved now."""
    store = ScreenshotStore(tmp_path, 100)
    first, shared, new = named(b"first"), named(b"shared"), named(b"new")
    add(store, OWNER, first | shared)
    store.claim(OTHER, [*shared, *new])
    room_again = full_disk(monkeypatch, number)
    assert not store.put(OTHER, new)
    assert store.state().bytes == on_disk(tmp_path) == len(b"first" + b"shared")
    store.release([OWNER])
    assert store.get([*first, *shared]) == (shared, list(first))
    room_again()
    assert store.put(OTHER, new)
    store.release([OTHER])
    assert store.state().bytes == on_disk(tmp_path) == 0


def test_another_error_of_the_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ScreenshotStore(tmp_path, 100)
    image = named(b"image")
    store.claim(OWNER, list(image))
    full_disk(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="no room"):
        store.put(OWNER, image)
    assert store.state().images == on_disk(tmp_path) == 0


class Watched(ScreenshotStore):
    """Copies its directory whenever files are changed and the index is not yet: what a kill there would leave."""

    copies: list[Path]

    def _copy(self) -> None:
        copies = self._directory.parent / "copies"
        self.copies.append(copies / str(len(self.copies)))
        shutil.copytree(self._directory, self.copies[-1])

    def _write(self, images: list[bytes]) -> list[tuple[int, int, int]]:
        places = super()._write(images)
        self._copy()
        return places

    def _remove(self, digests: list[str]) -> None:
        super()._remove(digests)
        self._copy()


def test_killed_between_disk_and_index(tmp_path: Path) -> None:
    """A put that was not acknowledged may be missing; a release that was not acknowledged may have been carried out: nothing
    else is lost, nothing is left over, and both can be said again."""
    store = Watched(tmp_path / "store", 1000)
    store.copies = []
    shared, own, new = named(b"shared"), named(b"own"), named(b"new")
    add(store, OWNER, shared | own)
    add(store, OTHER, shared | new)
    store.release([OWNER])
    store.release([OTHER])
    assert len(store.copies) == 5
    for number, copy in enumerate(store.copies):
        again = ScreenshotStore(copy, 1000)
        assert again.state().bytes == on_disk(copy)
        expected = [{}, shared | own, shared | new | own, shared | new | own, {}][number]
        assert again.get([*shared, *new, *own])[0] == expected
        again.claim(OTHER, [*shared, *new])
        assert again.put(OTHER, shared | new)
        again.release([OWNER])
        assert set(again.get([*shared, *new, *own])[0]) == set(shared | new)
        again.release([OTHER])
        assert again.state().bytes == on_disk(copy) == 0


def test_packs_that_are_gone_or_cut_are_missing(tmp_path: Path) -> None:
    """Found when it is asked for, and at the next start at the latest; the rest stays."""
    store = ScreenshotStore(tmp_path, 100)
    gone, cut, whole = named(b"gone"), named(b"cut"), named(b"whole")
    for image in (gone, cut, whole):
        add(store, OWNER, image)
    packs = sorted(tmp_path.glob("*.pack"))
    packs[0].unlink()
    assert store.lacking([*gone, *cut, *whole]) == list(gone)
    packs[1].write_bytes(b"c")
    store.close()
    store = ScreenshotStore(tmp_path, 100)
    assert store.lacking([*gone, *cut, *whole]) == [*gone, *cut]
    assert store.put(OWNER, gone | cut)
    assert store.get([*gone, *cut, *whole]) == (gone | cut | whole, [])


def test_a_cut_pack_that_is_moved_counts_as_what_is_left_of_it(tmp_path: Path) -> None:
    store = ScreenshotStore(tmp_path, 100)
    own, shared = named(b"own"), named(b"shared")
    add(store, OWNER, own | shared)
    store.claim(OTHER, list(shared))
    next(tmp_path.glob("*.pack")).write_bytes(b"ownsh")
    store.release([OWNER])
    assert store.state().bytes == on_disk(tmp_path) == len(b"sh")
    assert store.get(list(shared)) == ({}, list(shared))
    assert store.state().bytes == on_disk(tmp_path) == 0


def test_a_directory_that_is_of_no_use_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be opened.*replay\.screenshot_dir"):
        ScreenshotStore(tmp_path / "file", 100)
    (tmp_path / "index.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(UserError, match=r"cannot be opened.*or remove it"):
        ScreenshotStore(tmp_path, 100)
