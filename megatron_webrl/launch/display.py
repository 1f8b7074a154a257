"""The live display: a table that renews itself on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from megatron_webrl.wire.messages import EvaluationState, Status

LINE_EVERY_S = 10.0


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{share:.1%}"


class Display:
    """Shows a phase and its newest state.  Use as a context manager.  live: None means: if standard output is a terminal."""

    def __init__(self, title: str, live: bool | None = None) -> None:
        self.title = title
        self._console = Console()
        self._live = (
            Live(console=self._console, refresh_per_second=2)
            if live or (live is None and sys.stdout.isatty())
            else None
        )
        self._line_at = 0.0

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """One line that stays."""
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def training(self, status: Status, total_steps: int, max_minutes: float | None) -> None:
        """Newest state of the RL phase."""
        account = status.account
        hours = status.minutes / 60
        fields = {
            "step": f"{status.step}/{total_steps}",
            "minutes": f"{status.minutes:.1f}" + (f"/{max_minutes:g}" if max_minutes else ""),
            "success": _percent(status.success),
            "lag": f"{status.lag_mean:.2f} (max {status.lag_max})",
            "groups": f"{status.running_groups} run, {status.queued_groups} queued, {status.in_training_groups} in training",
            "mixed": _percent(status.mixed_share),
            "traj/h": f"{status.trajectories / hours:,.0f}" if hours > 0.005 else "–",
            "trained": f"{account.trained:,}/{account.issued:,}",
            "engines": " ".join(f"{e.name}:{e.state}@{e.version}" for e in status.engines) or "–",
        }
        self._show("asynchronous GRPO", fields)

    def evaluating(self, name: str, state: EvaluationState) -> None:
        """Newest state of an evaluation."""
        share = state.successes / state.finished if state.finished else math.nan
        self._show(f"evaluation {name}", {"episodes": f"{state.finished}/{state.total}", "success": _percent(share)})

    def progress(self, what: str, done: int, total: int, detail: str = "") -> None:
        """A phase that counts."""
        self._show(what, {"done": f"{done}/{total}", **({"": detail} if detail else {})})

    def _show(self, phase: str, fields: dict[str, str]) -> None:
        if self._live is not None:
            table = Table(title=f"{self.title} · {phase}", show_header=True, header_style="bold")
            for name in fields:
                table.add_column(name)
            table.add_row(*fields.values())
            self._live.update(table)
        elif time.monotonic() - self._line_at >= LINE_EVERY_S:
            self._line_at = time.monotonic()
            print(f"[{phase}] " + ", ".join(f"{name} {value}".strip() for name, value in fields.items()), flush=True)
