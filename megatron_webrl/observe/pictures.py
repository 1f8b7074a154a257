"""Pictures of a run for people: what was learned, and who worked when.  Colours are Okabe and Ito's, which people with
any colour vision can tell apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from megatron_webrl.observe.statistics import wilson
from megatron_webrl.observe.trace import Span, read_spans

BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
DPI = 200

TRAINER_LANES = {"data": ORANGE, "prox": SKY, "update": BLUE, "refresh": VERMILION, "checkpoint": PURPLE}
"""Names of the trainer's spans that `timeline` shows, a lane each, and their colours."""

TRAINING = ("prox", "update", "refresh")
"""Those during which a synchronous system would roll out nothing."""

SLOTS_SHOWN = 32


class Rate(NamedTuple):
    """A success rate with its interval, all in [0, 1]."""

    rate: float
    low: float
    high: float


class Overlap(NamedTuple):
    """Mean number of episodes in flight over the shown window; nan where there is no such time."""

    while_training: float
    """During proximal passes, updates and refreshes."""
    otherwise: float


def success_curve(
    rows: Sequence[Mapping[str, float]],
    before: Rate | tuple[float, float, float] | None,
    after: Rate | tuple[float, float, float] | None,
    path: Path,
    *,
    window: int = 256,
) -> None:
    """Training success by step and held-out success before and after, each with its 95 % interval, as a PNG.

    rows: of metrics.jsonl (`read_jsonl`), of which `step`, `rollout/success` (mean of the newest `window` episodes of
    training, those of dropped groups too) and `rollout/trajectories` (episodes so far) are used; others are skipped.
    """
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    known = [row for row in rows if row.get("rollout/trajectories", 0) > 0 and "rollout/success" in row]
    if known:
        steps = [row["step"] for row in known]
        mean = np.array([row["rollout/success"] for row in known])
        episodes = np.array([min(window, row["rollout/trajectories"]) for row in known])
        low, high = np.transpose([wilson(rate * n, n) for rate, n in zip(mean, episodes, strict=True)])
        axes.plot(steps, mean, color=BLUE, lw=2, label=f"training, newest {window} episodes, 95 % interval")
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.2, lw=0)
    last = int(rows[-1]["step"]) if rows else 1
    for label, at, result, colour, marker in (
        ("before", 0, before, ORANGE, "o"),
        ("after", last, after, VERMILION, "D"),
    ):
        if result is None:
            continue
        rate, bottom, top = result
        axes.errorbar(
            at,
            rate,
            yerr=[[rate - bottom], [top - rate]],
            fmt=marker,
            color=colour,
            ms=8,
            capsize=5,
            lw=2,
            zorder=3,
            label=f"held out, {label}: {rate:.1%} [{bottom:.1%}, {top:.1%}]",
        )
    title = "Success on the tasks"
    if before and after:
        title += f": {100 * (after[0] - before[0]):+.1f} points on held-out pages in {last} train steps"
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("train step")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.set_ylabel("share of episodes that succeed")
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axes.set_ylim(0, 1)
    axes.set_xlim(-0.03 * max(last, 1), 1.03 * max(last, 1))
    _plain(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=False)
    _save(figure, path)


def timeline(trace_dir: Path, path: Path, seconds: float = 120) -> Overlap:
    """Who worked when, over `seconds` from the middle of the run's refreshes (of all spans, if there are none).

    Reads spans named `episode` and `generate` in lanes of slots, and those of TRAINER_LANES.  Shows the number of
    episodes in flight, the trainer's lanes and up to 32 slots.  Raises ValueError if the directory holds no span.
    """
    spans = read_spans(trace_dir)
    if not spans:
        raise ValueError(f"{trace_dir} holds no span")
    begin, end = _window(spans, seconds)
    shown = [span for span in spans if span.end > begin and span.start < end]
    episodes = [span for span in shown if span.name == "episode"]
    training = [span for span in shown if span.name in TRAINER_LANES]
    slots = sorted({(s.role, s.lane) for s in episodes}, key=lambda slot: (slot[0], len(slot[1]), slot[1]))
    visible = slots[:SLOTS_SHOWN]
    lanes = {name: colour for name, colour in TRAINER_LANES.items() if any(span.name == name for span in training)}

    rows = max(4, len(visible))
    heights = [1.3, 0.34 * max(1, len(lanes)), 0.16 * rows + 0.3]
    figure, (flight, trainer, rollout) = plt.subplots(
        3, 1, figsize=(11, 1.7 + sum(heights)), sharex=True, layout="constrained", height_ratios=heights
    )
    overlap = _overlap(episodes, training, begin, end)
    figure.suptitle(
        f"{end - begin:.0f} seconds of a run: on average {overlap.while_training:.1f} episodes are in flight while the "
        f"trainer works, {overlap.otherwise:.1f} otherwise",
        x=0.01,
        ha="left",
        fontweight="bold",
    )
    _draw_in_flight(flight, episodes, begin, end)
    for at, (name, colour) in enumerate(lanes.items()):
        _bars(trainer, [s for s in training if s.name == name], at, begin, colour)
    trainer.set_yticks(range(len(lanes)), list(lanes))
    trainer.set_ylim(max(1, len(lanes)) - 0.4, -0.6)
    trainer.set_ylabel("trainer")

    for at, slot in enumerate(visible):
        of_slot = [s for s in shown if (s.role, s.lane) == slot]
        _bars(rollout, [s for s in of_slot if s.name == "episode"], at, begin, GREEN, edge="white")
        _bars(rollout, [s for s in of_slot if s.name == "generate"], at, begin, "#202020", height=0.3)
    several = len({role for role, _ in visible}) > 1
    labels = [f"{role} {lane}" if several else lane for role, lane in visible]
    rollout.set_yticks(range(len(visible)), labels, fontsize=7)
    rollout.set_ylim(rows - 0.4, -0.6)
    rollout.set_ylabel("slots" if len(visible) == len(slots) else f"{len(visible)} of {len(slots)} slots")
    rollout.set_xlabel("seconds")
    rollout.set_xlim(0, end - begin)
    rollout.legend(
        handles=[Patch(color=GREEN, label="episode"), Patch(color="#202020", label="of it, generation by the engine")],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.35 / heights[2]),
        ncols=2,
        frameon=False,
    )
    for axes in (flight, trainer, rollout):
        _plain(axes)
        axes.grid(axis="y", visible=axes is flight)
        for span in training:
            if span.name == "refresh":
                axes.axvline(span.start - begin, color=VERMILION, lw=0.6, alpha=0.5, zorder=0)
    _save(figure, path)
    return overlap


def _window(spans: Sequence[Span], seconds: float) -> tuple[float, float]:
    """From the middle of the refreshes, moved so that it lies within all spans where they are long enough."""
    first, last = spans[0].start, max(span.end for span in spans)
    refreshes = [span for span in spans if span.name == "refresh"] or spans
    middle = (refreshes[0].start + max(span.end for span in refreshes)) / 2
    begin = max(first, min(middle - seconds / 2, last - seconds))
    return begin, min(begin + seconds, last)


def _in_flight(episodes: Iterable[Span], begin: float, end: float) -> tuple[np.ndarray, np.ndarray]:
    """Times within [begin, end] and the number of episodes in flight from each on: float64 [n], int64 [n]."""
    changes = [(max(span.start, begin), 1) for span in episodes] + [
        (span.end, -1) for span in episodes if span.end < end
    ]
    changes.sort()
    times = np.array([begin, *(at for at, _ in changes), end])
    counts = np.cumsum([0, *(by for _, by in changes), 0])
    return times, counts


def _overlap(episodes: Sequence[Span], training: Sequence[Span], begin: float, end: float) -> Overlap:
    times, counts = _in_flight(episodes, begin, end)
    busy_times, busy = _in_flight([span for span in training if span.name in TRAINING], begin, end)
    edges = np.union1d(times, busy_times)
    width = np.diff(edges)
    flying = counts[np.searchsorted(times, edges[:-1], side="right") - 1]
    working = busy[np.searchsorted(busy_times, edges[:-1], side="right") - 1] > 0

    def mean(mask: np.ndarray) -> float:
        return float((flying * width)[mask].sum() / width[mask].sum()) if width[mask].sum() > 0 else float("nan")

    return Overlap(while_training=mean(working), otherwise=mean(~working))


def _draw_in_flight(axes: Axes, episodes: Sequence[Span], begin: float, end: float) -> None:
    times, counts = _in_flight(episodes, begin, end)
    axes.fill_between(times - begin, counts, step="post", color=GREEN, alpha=0.35, lw=0)
    axes.step(times - begin, counts, where="post", color=GREEN, lw=1)
    axes.set_ylim(0, max(1, counts.max()) * 1.15)
    axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))
    axes.set_ylabel("episodes\nin flight")


def _bars(
    axes: Axes, spans: Sequence[Span], at: float, begin: float, colour: str, height: float = 0.8, edge: str = "none"
) -> None:
    axes.broken_barh(
        [(span.start - begin, span.end - span.start) for span in spans],
        (at - height / 2, height),
        facecolors=colour,
        edgecolors=edge,
        linewidth=0.4,
    )


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def _save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
