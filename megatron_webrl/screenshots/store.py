"""The content-addressed screenshot store: encoded bytes on disk, by hash, bounded, each kept as long as somebody owns it.

DIRECTORY/123.pack       the images of one upload, one after another; those that outlive others of their pack move to a new one
DIRECTORY/index.sqlite   which image is where, and which attempts own it

A pack is whole before its images are in the index, and never changed: a store that is killed loses nothing that it
acknowledged.  A power loss may cost what was written last: a damaged image is found by its hash, and is missing then.  No
bytes are kept in memory; what is read again soon is in the page cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

from megatron_webrl.errors import UserError
from megatron_webrl.run_directory import hold
from megatron_webrl.trajectory import AttemptKey, image_digest
from megatron_webrl.wire import Keys, Message, Server
from megatron_webrl.wire.messages import (
    ClaimImages,
    Done,
    GetImages,
    Images,
    KeepImages,
    Lacking,
    LackingImages,
    PutImages,
    ReleaseImages,
    StoreState,
    StoreStatus,
)

log = logging.getLogger(__name__)

PUT_WAIT_S = 30.0
"""An upload waits so long for room."""
WAITING_BYTES = 1 << 30
"""Uploads that wait hold no more in memory; further ones fail at once."""
LOOK_AGAIN_S = 0.5
PREDECESSOR_S = 20.0
"""A store whose driver was killed may live on for some seconds."""
REPLY_BYTES = 4 << 20
"""A reply with images carries no more, but always one."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS images (digest TEXT PRIMARY KEY, pack INTEGER, position INTEGER, bytes INTEGER) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS images_of_pack ON images (pack);
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, claimed_at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS claims (owner TEXT, digest TEXT, PRIMARY KEY (owner, digest)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS claims_of_image ON claims (digest);
"""


class StoreFull(Exception):
    """No room came free before the deadline of the upload, or too many wait for it."""


class ScreenshotStore:
    """Images by digest.  Not thread-safe, but may be used from one thread after another.

    directory: made if need be, and then its own; limit_bytes: bound of all encoded bytes; clock: seconds that go on over
    restarts; wait_s: for the end of another store there.  Raises UserError if the directory or its index cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        *,
        clock: Callable[[], float] = time.time,
        wait_s: float = PREDECESSOR_S,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._directory = directory
        self._clock = clock
        self._written: list[Path] = []
        self._left: list[Path] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = hold(directory / "lock", "replay.screenshot_dir", wait_s=wait_s)
            self._db = sqlite3.connect(directory / "index.sqlite", isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
            self._reconcile()
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"the screenshot store in {directory} cannot be opened ({error}): give another replay.screenshot_dir, or "
                "remove it"
            ) from None
        self._count()
        self._unproved = {digest for (digest,) in self._db.execute("SELECT digest FROM images")}
        """Written before this process, and not read since."""

    def _reconcile(self) -> None:
        """Make packs and index agree: whoever was killed between the two left one without the other."""
        packs = {int(file.stem): file.stat().st_size for file in self._directory.glob("*.pack")}
        self._next_pack = max(packs, default=0) + 1
        rows = self._db.execute("SELECT pack, max(position + bytes), count(*) FROM images GROUP BY pack").fetchall()
        for pack, end, images in rows:
            if packs.get(pack, -1) < end:
                log.warning("%d screenshots are lost", images)
                self._db.execute("DELETE FROM images WHERE pack=?", (pack,))
            else:
                del packs[pack]
        for pack in packs:
            self._path(pack).unlink()

    def _count(self) -> None:
        self.images, self.bytes = self._db.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM images").fetchone()

    def _path(self, pack: int) -> Path:
        return self._directory / f"{pack}.pack"

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Of the index.  Packs written in it go if it fails; packs that everything left go when it is done."""
        self._written, self._left = [], []
        self._db.execute("BEGIN")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._count()
            for path in self._written:
                path.unlink(missing_ok=True)
            raise
        for path in self._left:
            path.unlink(missing_ok=True)

    def claim(self, owner: AttemptKey, digests: list[str]) -> list[str]:
        """`owner` owns these from now on, besides what it owns already.  Returns those that are not here."""
        name = _name(owner)
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO owners VALUES (?, ?)", (name, self._clock()))
            self._db.executemany("INSERT OR IGNORE INTO claims VALUES (?, ?)", [(name, digest) for digest in digests])
        return self.lacking(digests)

    def lacking(self, digests: list[str]) -> list[str]:
        """Those that are not here; what the disk lost is not.  What an earlier process wrote is read once: the machine may have
        failed, too."""
        places = {digest: self._place(digest) for digest in digests}
        gone = {pack for pack in {place[0] for place in places.values() if place} if not self._path(pack).exists()}
        lost = [
            digest for digest, place in places.items() if place and (place[0] in gone or not self._sound(digest, place))
        ]
        if lost:
            log.warning("%d screenshots are lost: %s", len(lost), lost[:3])
            with self._transaction():
                self._remove(lost)
        return [digest for digest, place in places.items() if place is None or digest in lost]

    def _sound(self, digest: str, place: tuple[int, int, int]) -> bool:
        if digest in self._unproved:
            if image_digest(self._read(*place)) != digest:
                return False
            self._unproved.discard(digest)
        return True

    def _place(self, digest: str) -> tuple[int, int, int] | None:
        """(pack, position, bytes) of an image that is here."""
        found = self._db.execute("SELECT pack, position, bytes FROM images WHERE digest=?", (digest,)).fetchone()
        return cast("tuple[int, int, int] | None", found)

    def put(self, owner: AttemptKey, images: dict[str, bytes]) -> bool:
        """Add images of `owner`; False, and nothing is added, if there is no room for them now.  Raises ValueError for bytes
        that do not match their name, for what `owner` does not own and for more than the store can ever hold."""
        name = _name(owner)
        for digest, data in images.items():
            if image_digest(data) != digest:
                raise ValueError(f"image {digest} does not match its {len(data)} bytes")
            if self._db.execute("SELECT 1 FROM claims WHERE owner=? AND digest=?", (name, digest)).fetchone() is None:
                raise ValueError(f"image {digest} was not claimed by attempt {name}")
        new = {digest: data for digest, data in images.items() if self._place(digest) is None}
        size = sum(map(len, new.values()))
        if size > self.limit_bytes:
            raise ValueError(f"{size} bytes exceed replay.screenshot_bytes={self.limit_bytes}: raise it")
        if self.bytes + size > self.limit_bytes:
            return False
        if new:
            try:
                with self._transaction():
                    places = self._write(list(new.values()))
                    rows = [(digest, *place) for digest, place in zip(new, places, strict=True)]
                    self._db.executemany("INSERT INTO images VALUES (?, ?, ?, ?)", rows)
            except (OSError, sqlite3.OperationalError) as error:
                if not _disk_full(error):
                    raise
                log.warning("the disk of %s is full", self._directory)
                return False
        self.images += len(new)
        self.bytes += size
        return True

    def _write(self, images: list[bytes]) -> list[tuple[int, int, int]]:
        """A new pack of these, within a transaction; returns their places."""
        pack, self._next_pack = self._next_pack, self._next_pack + 1
        self._written.append(self._path(pack))
        with self._path(pack).open("xb") as file:
            file.writelines(images)
        starts = itertools.accumulate(map(len, images), initial=0)
        return [(pack, start, len(data)) for start, data in zip(starts, images, strict=False)]

    def _read(self, pack: int, position: int, size: int) -> bytes:
        """Those bytes; fewer if the disk lost them."""
        try:
            with self._path(pack).open("rb", buffering=0) as file:
                file.seek(position)
                return file.read(size)
        except OSError as error:
            log.warning("screenshots: %s", error)
            return b""

    def get(self, digests: list[str], limit_bytes: int = REPLY_BYTES) -> tuple[dict[str, bytes], list[str]]:
        """Images by digest, and those that are not here; the rest would exceed limit_bytes.  What is damaged on disk is not
        here any more: the first reading of what an earlier process wrote says so (clients check the rest)."""
        found: dict[str, bytes] = {}
        missing: list[str] = []
        size = 0
        for digest in digests:
            place = self._place(digest)
            if place is None:
                missing.append(digest)
                continue
            if found and size + place[2] > limit_bytes:
                break
            data = self._read(*place)
            if len(data) == place[2] and (digest not in self._unproved or image_digest(data) == digest):
                self._unproved.discard(digest)
                found[digest] = data
                size += len(data)
            else:
                log.warning("screenshot %s is damaged on disk", digest)
                with self._transaction():
                    self._remove([digest])
                missing.append(digest)
        return found, missing

    def release(self, owners: Iterable[AttemptKey]) -> None:
        """They own nothing any more, and what nobody owns is deleted; unknown ones are ignored."""
        self._release([_name(owner) for owner in owners])

    def keep(self, owners: Iterable[AttemptKey], older_than_s: float) -> None:
        """Release all others that claimed last so long ago."""
        kept = {_name(owner) for owner in owners}
        old = self._db.execute("SELECT owner FROM owners WHERE claimed_at < ?", (self._clock() - older_than_s,))
        if forgotten := [owner for (owner,) in old if owner not in kept]:
            log.warning("%d owners of screenshots are nobody's attempts any more", len(forgotten))
            self._release(forgotten)

    def _release(self, names: list[str]) -> None:
        touched: set[str] = set()
        owned = "SELECT 1 FROM claims WHERE digest=? LIMIT 1"
        with self._transaction():
            for name in names:
                touched.update(d for (d,) in self._db.execute("SELECT digest FROM claims WHERE owner=?", (name,)))
            self._db.executemany("DELETE FROM claims WHERE owner=?", [(name,) for name in names])
            self._db.executemany("DELETE FROM owners WHERE owner=?", [(name,) for name in names])
            self._remove([digest for digest in touched if self._db.execute(owned, (digest,)).fetchone() is None])

    def _remove(self, digests: list[str]) -> None:
        """Within a transaction.  A pack of which nothing is left goes before the commit, which may need its room."""
        packs: set[int] = set()
        for digest in digests:
            for pack, size in self._db.execute("DELETE FROM images WHERE digest=? RETURNING pack, bytes", (digest,)):
                packs.add(pack)
                self._unproved.discard(digest)
                self.images -= 1
                self.bytes -= size
        shared = []
        for pack in packs:
            rest = self._db.execute("SELECT digest, position, bytes FROM images WHERE pack=?", (pack,)).fetchall()
            if rest:
                shared.append((pack, rest))
            else:
                self._path(pack).unlink(missing_ok=True)
        for pack, rest in shared:
            self._move(pack, rest)

    def _move(self, pack: int, rest: list[tuple[str, int, int]]) -> None:
        """What is left of a pack, (digest, position, bytes), into a new one, so that its bytes are all that the disk holds; if
        the disk has no room for that it stays."""
        data = [self._read(pack, position, size) for _, position, size in rest]
        try:
            places = self._write(data)
        except OSError as error:
            self._written.pop().unlink(missing_ok=True)
            if not _disk_full(error):
                raise
            return
        self._left.append(self._path(pack))
        self._unproved.update(digest for (digest, _, size), found in zip(rest, data, strict=True) if len(found) != size)
        self.bytes += sum(map(len, data)) - sum(size for _, _, size in rest)
        rows = [(*place, digest) for place, (digest, _, _) in zip(places, rest, strict=True)]
        self._db.executemany("UPDATE images SET pack=?, position=?, bytes=? WHERE digest=?", rows)

    def state(self) -> StoreState:
        owners = self._db.execute("SELECT count(*) FROM owners").fetchone()[0]
        return StoreState(self.images, self.bytes, self.limit_bytes, owners, 0)

    def close(self) -> None:
        self._db.close()
        self._lock.close()


def _name(owner: AttemptKey) -> str:
    return "/".join(map(str, owner))


def _disk_full(error: Exception) -> bool:
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in str(error)


async def serve_store(
    address: str, run_id: str, directory: Path, limit_bytes: int, *, keys: Keys | None = None
) -> None:
    """Run a store at `address` until cancelled.  Raises UserError as `ScreenshotStore` does."""
    store = ScreenshotStore(directory, limit_bytes)
    disk = ThreadPoolExecutor(1, "disk")  # one after another, beside the loop that answers
    loop = asyncio.get_running_loop()
    freed = asyncio.Event()
    first = asyncio.Lock()
    """Of the upload that gets the next room: those that wait do so in the order in which they came."""
    waiting: list[int] = []

    async def claim(_: str, m: ClaimImages) -> Message:
        return Lacking(await loop.run_in_executor(disk, store.claim, m.owner, m.digests))

    async def put(_: str, m: PutImages) -> Message:
        if not waiting and await loop.run_in_executor(disk, store.put, m.owner, m.images):
            return Done()
        full = f"replay.screenshot_bytes={limit_bytes}, or on the disk of {directory}"
        size = sum(map(len, m.images.values()))
        if waiting and sum(waiting) + size > WAITING_BYTES:
            raise StoreFull(f"no room in {full}, and {len(waiting)} uploads wait for it already")
        waiting.append(size)
        try:
            async with asyncio.timeout(PUT_WAIT_S), first:
                while True:
                    freed.clear()
                    if await loop.run_in_executor(disk, store.put, m.owner, m.images):
                        return Done()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_AGAIN_S):
                            await freed.wait()
        except TimeoutError:
            raise StoreFull(f"no room for {PUT_WAIT_S:.0f} s in {full}") from None
        finally:
            waiting.remove(size)

    async def get(_: str, m: GetImages) -> Message:
        return Images(*await loop.run_in_executor(disk, store.get, m.digests, REPLY_BYTES))

    async def lacking(_: str, m: LackingImages) -> Message:
        return Lacking(await loop.run_in_executor(disk, store.lacking, m.digests))

    async def release(_: str, m: ReleaseImages) -> Message:
        await loop.run_in_executor(disk, store.release, m.owners)
        freed.set()
        return Done()

    async def keep(_: str, m: KeepImages) -> Message:
        await loop.run_in_executor(disk, store.keep, m.owners, m.older_than_s)
        freed.set()
        return Done()

    async def status(_: str, m: StoreStatus) -> Message:
        state = await loop.run_in_executor(disk, store.state)
        state.waiting = len(waiting)
        return state

    handlers = {
        ClaimImages: claim,
        PutImages: put,
        GetImages: get,
        LackingImages: lacking,
        ReleaseImages: release,
        KeepImages: keep,
        StoreStatus: status,
    }
    server = Server(address, run_id, handlers, keys=keys)  # type: ignore[arg-type]
    try:
        await server.start()
        try:
            await asyncio.Event().wait()
        finally:
            await server.close()
    finally:
        await loop.run_in_executor(None, disk.shutdown)
        store.close()
