"""Traces: spans survive kills and failures, files are bounded, and the merged trace is one that Perfetto reads."""

import contextlib
import json
import threading
import time
from pathlib import Path

import pytest

from megatron_webrl.observe import Span, Tracer, export_chrome, read_spans


def test_span_is_recorded_when_its_block_raises(tmp_path: Path):
    """A span has its role, lane, times and args, those added inside the block too, also when the block raises."""
    tracer = Tracer(tmp_path / "w.jsonl", "worker-0")
    before = time.time()
    with contextlib.suppress(KeyError), tracer.span("episode", "slot 3", task="click-test") as args:
        args["outcome"] = "failure"
        raise KeyError
    tracer.close()
    (span,) = read_spans(tmp_path)
    assert span[:3] == ("worker-0", "episode", "slot 3")
    assert before - 0.001 <= span.start <= span.end <= time.time() + 0.001
    assert span.args == {"task": "click-test", "outcome": "failure"}


def test_file_is_bounded_also_over_restarts(tmp_path: Path):
    """A file takes `limit` spans, a restarted role's counted in; then one line says how many were left out."""
    path = tmp_path / "w.jsonl"
    for _ in range(3):
        tracer = Tracer(path, "w", limit=10)
        for at in range(6):
            tracer.record("generate", "slot 0", at, at + 1)
        tracer.close()
    spans = read_spans(tmp_path)
    assert sum(span.name == "generate" for span in spans) == 10
    assert [span.args["spans"] for span in spans if span.name == "left out"] == [2, 6]
    assert len(path.read_text().splitlines()) == 12


def test_torn_line_spoils_no_other(tmp_path: Path):
    """A writer killed in mid-line loses that span only; its successor's are whole."""
    (tmp_path / "w.jsonl").write_text('{"role": "w", "name": "episode", "lane": "slot 0", "sta')
    tracer = Tracer(tmp_path / "w.jsonl", "w")
    tracer.record("episode", "slot 0", 1, 2)
    tracer.close()
    assert read_spans(tmp_path) == [Span("w", "episode", "slot 0", 1, 2, {})]


def test_flushes_within_about_a_second(tmp_path: Path):
    """What was recorded more than a second before the last record is on disk without a close."""
    tracer = Tracer(tmp_path / "w.jsonl", "w")
    tracer.record("a", "x", 0, 1)
    tracer.record("b", "x", 1, 2)
    time.sleep(1.05)
    tracer.record("c", "x", 2, 3)
    assert [span.name for span in read_spans(tmp_path)] == ["a", "b", "c"]
    tracer.close()


def test_threads_do_not_mix_lines(tmp_path: Path):
    """Spans of several threads come out whole."""
    tracer = Tracer(tmp_path / "w.jsonl", "w")
    threads = [
        threading.Thread(target=lambda lane=lane: [tracer.record("n", lane, i, i + 1) for i in range(200)])
        for lane in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracer.close()
    assert len(read_spans(tmp_path)) == 800


def test_no_path_traces_nothing():
    """`path=None` switches tracing off; recording after close is no error."""
    tracer = Tracer(None, "w")
    with tracer.span("a", "b"):
        pass
    tracer.close()


def test_full_disk_loses_spans_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writing to a full disk raises nothing."""
    tracer = Tracer(tmp_path / "w.jsonl", "w")
    monkeypatch.setattr(tracer, "_file", open("/dev/full", "w"))  # noqa: SIM115 (never closable: its disk is full)
    for at in range(3000):
        tracer.record("a", "x", at, at + 1)
    tracer.close()


def test_chrome_trace_holds_all_roles(tmp_path: Path):
    """One process a role, one thread a lane, named; microseconds from the first span on."""
    for role, lanes in (("trainer", ["trainer"]), ("worker-0", ["slot 0", "slot 1"])):
        tracer = Tracer(tmp_path / "trace" / f"{role}.jsonl", role)
        for at, lane in enumerate(lanes):
            tracer.record("work", lane, 1e9 + at, 1e9 + at + 0.5, version=at)
        tracer.close()
    assert export_chrome(tmp_path / "trace", tmp_path / "out.json") == 3
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert names == {("process_name", "trainer"), ("process_name", "worker-0")} | {
        ("thread_name", lane) for lane in ("trainer", "slot 0", "slot 1")
    }
    complete = [e for e in events if e["ph"] == "X"]
    assert sorted(e["ts"] for e in complete) == [0, 0, 1_000_000]
    assert {e["dur"] for e in complete} == {500_000}
    assert len({(e["pid"], e["tid"]) for e in complete}) == 3


def test_no_trace_is_an_empty_chrome_trace(tmp_path: Path):
    """A run without a trace exports an empty, valid one."""
    assert export_chrome(tmp_path, tmp_path / "out.json") == 0
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"] == []
