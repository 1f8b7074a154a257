"""Pictures: they are drawn from whatever a run leaves behind, and the overlap that they state is right."""

from pathlib import Path

import pytest
from PIL import Image

from megatron_webrl.observe import Rate, Tracer, success_curve, timeline


@pytest.mark.parametrize(
    ("rows", "before", "after"),
    [
        (
            [{"step": n, "rollout/success": 0.5, "rollout/trajectories": 8.0 * n} for n in range(1, 30)],
            Rate(0.45, 0.42, 0.48),
            Rate(0.6, 0.57, 0.63),
        ),
        ([{"step": 1, "rollout/trajectories": 0.0, "nonfinite": 1.0}], (0.5, 0.1, 0.9), None),
        ([], None, None),
    ],
    ids=["whole run", "one step without episodes", "nothing"],
)
def test_success_curve_is_drawn(tmp_path: Path, rows, before, after):
    """A PNG at twice the usual resolution, also of runs that ended early."""
    success_curve(rows, before, after, tmp_path / "deep" / "curve.png")
    assert Image.open(tmp_path / "deep" / "curve.png").size == (1600, 960)


def trace(tmp_path: Path, *, rolls_on: bool) -> Path:
    """200 s: the trainer works for 5 s of every 10; two slots roll out throughout, or only while it waits."""
    worker, trainer = Tracer(tmp_path / "t" / "w.jsonl", "worker-0"), Tracer(tmp_path / "t" / "r.jsonl", "trainer")
    for at in range(1000, 1200, 10):
        trainer.record("update", "trainer", at, at + 4)
        trainer.record("refresh", "trainer", at + 4, at + 5)
        for slot in range(2):
            for second in range(0 if rolls_on else 5, 10):
                worker.record("episode", f"slot {slot}", at + second, at + second + 1)
                worker.record("generate", f"slot {slot}", at + second + 0.2, at + second + 0.7)
    worker.close()
    trainer.close()
    return tmp_path / "t"


def test_timeline_states_the_overlap(tmp_path: Path):
    """Two episodes in flight at all times against none during updates."""
    overlap = timeline(trace(tmp_path / "on", rolls_on=True), tmp_path / "on.png")
    assert overlap == pytest.approx((2, 2))
    overlap = timeline(trace(tmp_path / "off", rolls_on=False), tmp_path / "off.png")
    assert overlap == pytest.approx((0, 2))
    assert Image.open(tmp_path / "on.png").width == 2200


def test_timeline_of_a_short_run_and_of_none(tmp_path: Path):
    """A run shorter than the window, with no trainer yet, is drawn; without any span there is nothing to draw."""
    tracer = Tracer(tmp_path / "t" / "w.jsonl", "worker-0")
    tracer.record("episode", "slot 0", 10, 12)
    tracer.close()
    timeline(tmp_path / "t", tmp_path / "short.png")
    assert (tmp_path / "short.png").exists()
    with pytest.raises(ValueError, match="no span"):
        timeline(tmp_path / "nowhere", tmp_path / "x.png")
