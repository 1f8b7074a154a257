"""One trainer rank's part in publishing: what it exports travels in a thread beside training."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from megatron_webrl.trainer.export import Snapshot
from megatron_webrl.trainer.layout import own_address
from megatron_webrl.trainer.policy import PolicyTrainer
from megatron_webrl.trainer.refresh import RefreshReport, WeightPublisher
from megatron_webrl.trainer.source import LoopThread, WeightSource
from megatron_webrl.wire import Client, Keys

log = logging.getLogger(__name__)

CLOSE_S = 15.0


class Publishing:
    """The snapshot and source of a pipeline stage on its first rank; on rank 0 the publisher, too.  All ranks make one and
    call `publish` together; the rest is for rank 0, and does nothing elsewhere.

    refreshed: is called in the thread, with each report.
    """

    def __init__(
        self,
        trainer: PolicyTrainer,
        *,
        run_id: str,
        coordinator_address: str,
        master_address: str,
        keys: Keys | None,
        refreshed: Callable[[RefreshReport], None] = lambda report: None,
    ) -> None:
        layout, config = trainer.layout, trainer.config
        self._trainer, self._refreshed = trainer, refreshed
        self._snapshot = trainer.snapshot()
        self._version = -1
        self._job: Future[RefreshReport] | None = None
        self._joiners: Future[None] | None = None
        self._publisher: WeightPublisher | None = None
        self._thread = LoopThread("publishing")
        backend = "nccl" if layout.device.type == "cuda" else "gloo"
        self._source: WeightSource | None = None
        address = ""
        if self._snapshot is not None:
            host = own_address(master_address)
            self._source = WeightSource(
                self._snapshot,
                run_id=run_id,
                address=_address(coordinator_address, layout.pp_rank, host),
                host=host,
                backend=backend,
                device=layout.device,
                keys=keys,
            )
            address = self._thread.submit(self._source.start()).result(CLOSE_S)
        places = {stage: where for stage, where in layout.gather((layout.pp_rank, address)) if where}
        if layout.rank == 0:

            async def make() -> WeightPublisher:
                return WeightPublisher(
                    config.refresh,
                    Client(coordinator_address, run_id, "publisher", keys=keys),
                    trainer.plan,
                    [places[stage] for stage in range(layout.pp)],
                    backend=backend,
                    export_dir=Path(config.run_dir) / "export",
                    model_path=config.model.path,
                    keys=keys,
                )

            self._publisher = self._thread.submit(make()).result(CLOSE_S)
            self._joiners = self._thread.submit(self._publisher.load_joiners())

    def reserve(self) -> RefreshReport | None:
        """Before `publish`, on rank 0 before the others may begin it: wait until nothing travels any more and nobody reads the
        snapshots.  Returns the report of what travelled since the last call.  Raises what went wrong."""
        report = self.wait()
        if self._publisher is not None:
            self._thread.submit(self._publisher.reserve()).result()
        return report

    def publish(self, version: int) -> None:
        """Copy the weights out, and let them travel as they come.  Rank 0 must have called `reserve`."""
        self._version = version
        if self._publisher is not None:
            self._job = self._thread.submit(self._publish(version))
        self._trainer.export(self._snapshot, version)

    @property
    def exported(self) -> tuple[Snapshot | None, int]:
        """What `PolicyTrainer.save_hf` takes: the weights that were published last."""
        return self._snapshot, self._version

    async def _publish(self, version: int) -> RefreshReport:
        assert self._publisher is not None
        report = await self._publisher.publish(version)
        if report.failed:
            log.warning("version %d: refresh failed at %s", version, ", ".join(report.failed))
        self._refreshed(report)
        return report

    def wait(self) -> RefreshReport | None:
        """Until nothing travels any more; the report of what did since the last call.  Raises what went wrong."""
        job, self._job = self._job, None
        report = job.result() if job is not None else None
        self.check()
        return report

    def check(self) -> None:
        """Raises what went wrong in the background."""
        for job in (self._job, self._joiners):
            if job is not None and job.done() and (error := job.exception()) is not None:
                raise error

    def close(self) -> None:
        """Leave the weight groups; what still travels is given up."""
        for part in (self._publisher, self._source):
            if part is not None:
                with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                    self._thread.submit(part.close()).result(CLOSE_S)
        self._thread.close()


def _address(coordinator_address: str, stage: int, host: str) -> str:
    """Where a stage's source listens: beside the coordinator's Unix socket, or at a free port."""
    if coordinator_address.startswith("ipc://"):
        return f"{coordinator_address}-weights-{stage}"
    return f"tcp://{host}:*"
