"""The content-addressed screenshot store: encoded bytes on disk, by hash, bounded, each kept as long as somebody owns it.

DIRECTORY/ab/abcdef…     one image, written under another name and renamed: whole or not there
DIRECTORY/index.sqlite   which images there are, and which attempts own them

It survives being killed (a power loss may cost what was written last: a damaged image is found by its hash, and is missing
then).  No bytes are kept in memory; what is read again soon is in the page cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_webrl.errors import UserError
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
LOOK_AGAIN_S = 0.5
REPLY_BYTES = 64 << 20
"""A reply with images carries no more, but always one."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS images (digest TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, claimed_at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS claims (owner TEXT, digest TEXT, PRIMARY KEY (owner, digest)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS claims_of_image ON claims (digest);
"""


class StoreFull(Exception):
    """No room came free before the deadline of the upload."""


class ScreenshotStore:
    """Images by digest.  Not thread-safe, but may be used from one thread after another.

    directory: made if need be, and then its own; limit_bytes: bound of all encoded bytes; clock: seconds that go on over
    restarts.  Raises UserError if the directory or its index cannot be used.
    """

    def __init__(self, directory: Path, limit_bytes: int, *, clock: Callable[[], float] = time.time) -> None:
        self.limit_bytes = limit_bytes
        self._directory = directory
        self._clock = clock
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(directory / "index.sqlite", isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=OFF")
            self._db.executescript(_SCHEMA)
            self._reconcile()
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"the screenshot store in {directory} cannot be opened ({error}): give another replay.screenshot_dir, or "
                "remove it"
            ) from None
        self.images, self.bytes = self._db.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM images").fetchone()

    def _reconcile(self) -> None:
        """Make files and index agree: whoever was killed between the two left one without the other."""
        files: dict[str, int] = {}
        for folder in self._directory.iterdir():
            if folder.is_dir():
                files |= {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
        rows = dict(self._db.execute("SELECT digest, bytes FROM images"))
        for name in [name for name, size in files.items() if rows.get(name) != size]:
            self._path(name).unlink()
        lost = [(digest,) for digest, size in rows.items() if files.get(digest) != size]
        if lost:
            log.warning("%d screenshots are lost", len(lost))
            self._db.executemany("DELETE FROM images WHERE digest=?", lost)

    def _path(self, digest: str) -> Path:
        return self._directory / digest[:2] / digest

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def claim(self, owner: AttemptKey, digests: list[str]) -> list[str]:
        """`owner` owns these from now on, besides what it owns already.  Returns those that are not here."""
        name = _name(owner)
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO owners VALUES (?, ?)", (name, self._clock()))
            self._db.executemany("INSERT OR IGNORE INTO claims VALUES (?, ?)", [(name, digest) for digest in digests])
        return self.lacking(digests)

    def lacking(self, digests: list[str]) -> list[str]:
        """Those that are not here; what the disk lost is not."""
        lost = [digest for digest in digests if self._here(digest) and not self._path(digest).exists()]
        if lost:
            log.warning("%d screenshots are lost: %s", len(lost), lost[:3])
            self._remove(lost)
        return [digest for digest in digests if not self._here(digest)]

    def _here(self, digest: str) -> bool:
        return self._db.execute("SELECT 1 FROM images WHERE digest=?", (digest,)).fetchone() is not None

    def put(self, owner: AttemptKey, images: dict[str, bytes]) -> bool:
        """Add images of `owner`; False, and nothing is added, if there is no room for them now.  Raises ValueError for bytes
        that do not match their name, for what `owner` does not own and for more than the store can ever hold."""
        name = _name(owner)
        for digest, data in images.items():
            if image_digest(data) != digest:
                raise ValueError(f"image {digest} does not match its {len(data)} bytes")
            if self._db.execute("SELECT 1 FROM claims WHERE owner=? AND digest=?", (name, digest)).fetchone() is None:
                raise ValueError(f"image {digest} was not claimed by attempt {name}")
        new = {digest: data for digest, data in images.items() if not self._here(digest)}
        size = sum(map(len, new.values()))
        if size > self.limit_bytes:
            raise ValueError(f"{size} bytes exceed replay.screenshot_bytes={self.limit_bytes}: raise it")
        if self.bytes + size > self.limit_bytes:
            return False
        written: list[str] = []
        try:
            for digest, data in new.items():
                self._write(digest, data)
                written.append(digest)
            with self._transaction():
                rows = [(digest, len(data)) for digest, data in new.items()]
                self._db.executemany("INSERT INTO images VALUES (?, ?)", rows)
        except (OSError, sqlite3.OperationalError) as error:
            for digest in written:
                self._path(digest).unlink(missing_ok=True)
            if getattr(error, "errno", None) in _NO_ROOM or "full" in str(error):
                log.warning("the disk of %s is full", self._directory)
                return False
            raise
        self.images += len(new)
        self.bytes += size
        return True

    def _write(self, digest: str, data: bytes) -> None:
        path = self._path(digest)
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        try:
            partial.write_bytes(data)
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def get(self, digests: list[str], limit_bytes: int = REPLY_BYTES) -> tuple[dict[str, bytes], list[str]]:
        """Images by digest, and those that are not here; the rest would exceed limit_bytes.  What is damaged on disk is not
        here any more."""
        found: dict[str, bytes] = {}
        missing: list[str] = []
        size = 0
        for digest in digests:
            row = self._db.execute("SELECT bytes FROM images WHERE digest=?", (digest,)).fetchone()
            if row is None:
                missing.append(digest)
                continue
            if found and size + row[0] > limit_bytes:
                break
            try:
                data = self._path(digest).read_bytes()
            except OSError as error:
                log.warning("screenshot %s: %s", digest, error)
                data = b""
            if image_digest(data) == digest:
                found[digest] = data
                size += len(data)
            else:
                log.warning("screenshot %s is damaged on disk", digest)
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
        with self._transaction():
            for name in names:
                touched.update(d for (d,) in self._db.execute("SELECT digest FROM claims WHERE owner=?", (name,)))
            self._db.executemany("DELETE FROM claims WHERE owner=?", [(name,) for name in names])
            self._db.executemany("DELETE FROM owners WHERE owner=?", [(name,) for name in names])
        owned = "SELECT 1 FROM claims WHERE digest=? LIMIT 1"
        self._remove([digest for digest in touched if self._db.execute(owned, (digest,)).fetchone() is None])

    def _remove(self, digests: list[str]) -> None:
        sizes: list[int] = []
        with self._transaction():
            for digest in digests:
                deleted = self._db.execute("DELETE FROM images WHERE digest=? RETURNING bytes", (digest,)).fetchall()
                sizes += [size for (size,) in deleted]
        self.images -= len(sizes)
        self.bytes -= sum(sizes)
        for digest in digests:
            self._path(digest).unlink(missing_ok=True)

    def state(self) -> StoreState:
        owners = self._db.execute("SELECT count(*) FROM owners").fetchone()[0]
        return StoreState(self.images, self.bytes, self.limit_bytes, owners, 0)

    def close(self) -> None:
        self._db.close()


def _name(owner: AttemptKey) -> str:
    return "/".join(map(str, owner))


async def serve_store(
    address: str, run_id: str, directory: Path, limit_bytes: int, *, keys: Keys | None = None
) -> None:
    """Run a store at `address` until cancelled.  Raises UserError as `ScreenshotStore` does."""
    store = ScreenshotStore(directory, limit_bytes)
    disk = ThreadPoolExecutor(1, "disk")  # one after another, beside the loop that answers
    loop = asyncio.get_running_loop()
    freed = asyncio.Event()
    waiting = 0

    async def claim(_: str, m: ClaimImages) -> Message:
        return Lacking(await loop.run_in_executor(disk, store.claim, m.owner, m.digests))

    async def put(_: str, m: PutImages) -> Message:
        nonlocal waiting
        if await loop.run_in_executor(disk, store.put, m.owner, m.images):
            return Done()
        deadline = time.monotonic() + PUT_WAIT_S
        waiting += 1
        try:
            while time.monotonic() < deadline:
                freed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        await freed.wait()
                if await loop.run_in_executor(disk, store.put, m.owner, m.images):
                    return Done()
        finally:
            waiting -= 1
        raise StoreFull(
            f"no room for {PUT_WAIT_S:.0f} s in replay.screenshot_bytes={limit_bytes}, or on the disk of {directory}"
        )

    async def get(_: str, m: GetImages) -> Message:
        return Images(*await loop.run_in_executor(disk, store.get, m.digests))

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
        state.waiting = waiting
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
