"""What a run knows of its attempts on disk, ledger and spool together; and whose screenshots are needed no more."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from megatron_webrl.replay.ledger import Attempt, Batch, Ledger
from megatron_webrl.replay.spool import Spool, SpoolDamaged
from megatron_webrl.trajectory import AttemptKey, Trajectory

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Trajectory).decode


class Records:
    """Ledger and spool of `run_dir` (ledger.sqlite, spool/).  Raises UserError if the ledger cannot be read."""

    def __init__(self, run_dir: Path) -> None:
        self.ledger = Ledger(run_dir / "ledger.sqlite")
        live = [location for a in self.ledger.live() if (location := a.location) is not None]
        self.spool = Spool(run_dir / "spool", live)
        self.freed: list[AttemptKey] = []
        """Attempts that need their screenshots no more, since the caller last emptied this list; some never had any."""

    def keep(self, attempt: Attempt, trajectory: Trajectory) -> None:
        """The trajectory of a train attempt was accepted."""
        self.ledger.queue(attempt, trajectory, self.spool.append(_encode(trajectory)))

    def drop(self, attempts: Iterable[Attempt], reason: str, trajectory: Trajectory | None = None) -> None:
        """They will not be trained, for the named reason; trajectory: what came of a single one."""
        attempts = list(attempts)
        for location in self.ledger.drop(attempts, reason, trajectory):
            self.spool.free(location)
        self.freed.extend(attempt.key for attempt in attempts)

    def trajectory(self, attempt: Attempt) -> Trajectory:
        """A trajectory that was kept, with its payload.  Raises SpoolDamaged."""
        location = attempt.location
        if location is None:
            raise SpoolDamaged(f"attempt {attempt.key} has no trajectory")
        try:
            return _decode(self.spool.read(location))
        except msgspec.MsgspecError as error:
            raise SpoolDamaged(f"attempt {attempt.key}: {error}") from None

    def durable(self, step: int) -> None:
        """A checkpoint with `step` finished steps is on disk: what was trained in them is final."""
        self._forget(self.ledger.durable(step))

    def roll_back(self, step: int) -> list[Batch]:
        """As `Ledger.roll_back`: the batches to be trained again."""
        again, freed = self.ledger.roll_back(step)
        self._forget(freed)
        return again

    def _forget(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            if attempt.location is not None:
                self.spool.free(attempt.location)
        self.freed.extend(attempt.key for attempt in attempts)

    def commit(self) -> None:
        """What changed outlives this process."""
        self.ledger.commit()

    def sync(self) -> None:
        """What was committed outlives the machine.  May be called in a thread."""
        self.spool.sync()
        self.ledger.sync()

    def close(self, *, commit: bool = True) -> None:
        """commit: False leaves the disk as the last commit did."""
        self.ledger.close(commit=commit)
        self.spool.close()
