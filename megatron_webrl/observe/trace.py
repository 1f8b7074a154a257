"""What each role did when: spans as JSON lines, one file a role, for the timeline and for Perfetto.

A span is `{"name", "lane", "start", "end", "args"}` in wall-clock seconds (machines of a run share a clock well enough
for a picture).  A file is bounded: after `limit` spans it takes no more, and says how many it left out.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from megatron_webrl.observe.lines import open_lines


class Span(NamedTuple):
    """Something that took time."""

    role: str
    """Which process: the tracer's role."""
    name: str
    """What: `episode`, `generate`, `proximal`, `update`, `refresh`, …"""
    lane: str
    """Which row of the picture: `slot 3`, `trainer`, …"""
    start: float
    """Seconds since the epoch."""
    end: float
    args: dict[str, Any]


class Tracer:
    """Writes the spans of one role to `path` (appended, so that a restarted role goes on).  Thread-safe.

    path: None traces nothing.  Lines reach the disk at most once a second, and at `close`.
    limit: spans in a file.
    """

    def __init__(self, path: Path | None, role: str, *, limit: int = 200_000) -> None:
        self.role = role
        self.left_out = 0
        self._limit = limit
        self._written = 0
        self._lock = threading.Lock()
        self._flushed = 0.0
        self._file: TextIO | None = None
        if path is not None:
            self._file = open_lines(path)
            with open(path, "rb") as existing:
                self._written = sum(1 for _ in existing)

    @contextlib.contextmanager
    def span(self, name: str, lane: str, **args: Any) -> Iterator[dict[str, Any]]:
        """Record the block, also when it raises.  Yields `args`, to add to them inside the block."""
        start = time.time()
        try:
            yield args
        finally:
            self.record(name, lane, start, time.time(), **args)

    def record(self, name: str, lane: str, start: float, end: float, **args: Any) -> None:
        """A span that has ended.  `args` must be JSON.  A full disk loses the span, not the run."""
        self._append(name, lane, start, end, args, self._limit)

    def _append(self, name: str, lane: str, start: float, end: float, args: dict[str, Any], limit: float) -> None:
        if self._file is None:
            return
        line = json.dumps(
            {
                "role": self.role,
                "name": name,
                "lane": lane,
                "start": round(start, 4),
                "end": round(end, 4),
                "args": args,
            }
        )
        with self._lock, contextlib.suppress(OSError, ValueError):  # ValueError: closed meanwhile
            if self._written >= limit:
                self.left_out += 1
                return
            self._file.write(line + "\n")
            self._written += 1
            now = time.monotonic()
            if now - self._flushed >= 1.0:
                self._flushed = now
                self._file.flush()

    def close(self) -> None:
        """Write out the rest."""
        if self._file is None:
            return
        if self.left_out:
            now = time.time()
            self._append("left out", "tracer", now, now, {"spans": self.left_out}, math.inf)
        with self._lock, contextlib.suppress(OSError):
            self._file.close()


def read_spans(trace_dir: Path) -> list[Span]:
    """All spans of a run in order of their start; torn lines (a killed writer) are left out."""
    spans = []
    for file in sorted(trace_dir.glob("*.jsonl")):
        with open(file, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with contextlib.suppress(ValueError, TypeError):
                    spans.append(Span(**json.loads(line)))
    return sorted(spans, key=lambda span: span.start)


def export_chrome(trace_dir: Path, out: Path) -> int:
    """Merge all roles into one Chrome trace (JSON), which Perfetto and chrome://tracing open: a process a role, a
    thread a lane, times from the first span on.  Returns how many spans it holds."""
    spans = read_spans(trace_dir)
    origin = spans[0].start if spans else 0.0
    roles: dict[str, int] = {}
    lanes: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = []
    for span in spans:
        if span.role not in roles:
            roles[span.role] = len(roles) + 1
            events.append({"ph": "M", "name": "process_name", "pid": roles[span.role], "args": {"name": span.role}})
        pid = roles[span.role]
        if (span.role, span.lane) not in lanes:
            lanes[span.role, span.lane] = len(lanes) + 1
            thread = {"pid": pid, "tid": lanes[span.role, span.lane]}
            events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": span.lane}})
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.role,
                "pid": pid,
                "tid": lanes[span.role, span.lane],
                "ts": round((span.start - origin) * 1e6),
                "dur": round((span.end - span.start) * 1e6),
                "args": span.args,
            }
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return len(spans)
