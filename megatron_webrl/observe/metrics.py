"""Numbers by step, to sinks that can neither slow nor stop the run.

Each sink works in a daemon thread behind a bounded queue.  What does not fit is dropped and counted; a sink that
raises is asked again with the next row.  `MetricsLogger.close` says what was lost.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatron_webrl.config import RunConfig
from megatron_webrl.observe.lines import open_lines

logger = logging.getLogger(__name__)


class Row(NamedTuple):
    """What a sink gets: a step, seconds since the epoch, finite numbers by name."""

    step: int
    time: float
    values: dict[str, float]


class MetricsSink(Protocol):
    """Where rows go.  `open` and everything after it is called from one thread of the sink's own; any may raise."""

    def open(self) -> None: ...

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object a line: `{"step": …, "time": …, name: value, …}`, appended and flushed at each row."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_lines(self.path)

    def write(self, row: Row) -> None:
        self._file.write(json.dumps({"step": row.step, "time": round(row.time, 3), **row.values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WandbSink:
    """Weights & Biases, under `run_dir/wandb`.

    resume_id: the wandb run's id; the same id continues the same run after a resume (`resume="allow"`).  `step` is a
    value of its own and the x-axis of the rest, so that steps trained again after a resume are not refused.
    """

    def __init__(self, config: RunConfig, run_dir: Path, resume_id: str) -> None:
        self.config, self.run_dir, self.resume_id = config, run_dir, resume_id
        self._run: Any = None

    def open(self) -> None:
        observe = self.config.observe
        if observe.wandb == "disabled":
            return
        import wandb  # a second to import, and only here

        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=observe.wandb_project,
            name=self.config.name,
            id=self.resume_id,
            resume="allow",
            mode=observe.wandb,
            dir=self.run_dir,
            config=self.config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Row) -> None:
        if self._run is not None:
            self._run.log({"step": row.step, **row.values})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class _Worker:
    """One sink's thread and queue."""

    def __init__(self, sink: MetricsSink, capacity: int) -> None:
        self.name = type(sink).__name__
        self.dropped = 0
        self.failed = 0
        self.error = ""
        self._sink = sink
        self._rows: queue.Queue[Row | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._work, name=f"metrics-{self.name}", daemon=True)
        self._thread.start()

    def offer(self, row: Row) -> None:
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout: float) -> str:
        """Wait for the rest to be written; what was lost, in words, or the empty string."""
        deadline = time.monotonic() + timeout
        try:
            self._rows.put(None, timeout=timeout)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        unwritten = self._rows.qsize() if self._thread.is_alive() else 0
        parts = []
        if self.dropped:
            parts.append(f"{self.dropped} rows dropped because its queue was full")
        if self.failed:
            parts.append(f"{self.failed} calls failed, the last with {self.error}")
        if self._thread.is_alive():
            parts.append(f"not finished after {timeout:g} s, {unwritten} rows unwritten")
        return f"metrics sink {self.name}: {'; '.join(parts)}" if parts else ""

    def _work(self) -> None:
        opened = False
        while (row := self._rows.get()) is not None:
            try:
                if not opened:
                    self._sink.open()
                    opened = True
                self._sink.write(row)
            except Exception as error:  # a sink is other people's code: whatever it raises, the run goes on
                self._fail(error)
        if opened:
            try:
                self._sink.close()
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self.failed:
            logger.warning("metrics sink %s failed, the run goes on: %r", self.name, error)
        self.failed += 1
        self.error = repr(error)


class MetricsLogger:
    """Hands rows to every sink and returns at once.

    capacity: rows that a slow sink may be behind by before further ones are dropped for it.
    """

    def __init__(self, sinks: Sequence[MetricsSink], *, capacity: int = 1024) -> None:
        self._workers = [_Worker(sink, capacity) for sink in sinks]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of `step`.  Values that are not finite numbers are written as they are not: they are left out, and
        `nonfinite` counts them."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        if len(finite) < len(values):
            finite["nonfinite"] = float(len(values) - len(finite))
        row = Row(step, time.time(), finite)
        for worker in self._workers:
            worker.offer(row)

    def close(self, timeout: float = 30.0) -> list[str]:
        """Write out what is queued, for at most `timeout` seconds a sink.  Returns what was lost, a line a sink (also
        logged as warnings); empty if nothing was."""
        lost = [line for worker in self._workers if (line := worker.close(timeout))]
        for line in lost:
            logger.warning("%s", line)
        return lost


def read_jsonl(path: Path) -> list[dict[str, float]]:
    """Rows of a JsonlSink, one a step, in order; torn lines (a killed writer) are left out.

    Several rows of one step are merged, later values win.  A row of a smaller step removes those of larger ones: they
    were rolled back by a resume and are trained again.
    """
    rows: list[dict[str, float]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        while rows and rows[-1]["step"] > row["step"]:
            rows.pop()
        if rows and rows[-1]["step"] == row["step"]:
            rows[-1] |= row
        else:
            rows.append(row)
    return rows
