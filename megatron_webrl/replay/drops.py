"""What drops do to the data: how often train attempts are lost, for which reasons, and whether hard, long or old ones are lost
more often than others (then what is trained leans towards the rest)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from typing import NamedTuple

BY_RULE = frozenset(
    ("zero_variance", "not_a_success", "run_ended", "lost_at_restart", "no_longer_practised", "rolled_back")
)
"""Reasons that are no loss: an algorithm's rule left out a whole result, or the user ended, resumed or changed the run."""

WINDOW = 1000
"""Newest train attempts that rates are taken of."""
LEAST = 64
"""Attempts from which on a rate is worth a warning."""
WARN_ABOVE = 0.05
WARN_EVERY_S = 300.0
MOST_REASONS = 32
"""Names of reasons in rows; what comes on top is `other`."""

STEPS = ((0, "0"), (1, "1-2"), (3, "3-5"), (6, "6-10"), (11, "11-20"), (21, "21-up"))
AGES_S = ((0, "0-10"), (10, "10-30"), (30, "30-100"), (100, "100-300"), (300, "300-1000"), (1000, "1000-up"))
"""Buckets of steps and of seconds: (smallest value, name)."""


class _Ended(NamedTuple):
    reason: str
    """Empty if a batch took it."""
    difficulty: str
    steps: str
    age: str

    @property
    def lost(self) -> bool:
        return self.reason != "" and self.reason not in BY_RULE


class DropRates:
    """Of the newest train attempts that ended."""

    def __init__(self) -> None:
        self._window: deque[_Ended] = deque(maxlen=WINDOW)
        self._reasons: set[str] = set()
        """That were ever seen: their names stay in the rows."""
        self._quiet_until = -math.inf

    def ended(self, reason: str | None, *, difficulty: int, steps: int, age_s: float) -> None:
        """A train attempt ended: None if a batch takes it, else why it was dropped.  steps: that are known of, 0 for an
        attempt that gave no result; age_s: seconds since it was issued."""
        if reason is not None and reason not in self._reasons:
            if len(self._reasons) < MOST_REASONS:
                self._reasons.add(reason)
            elif reason not in BY_RULE:
                reason = "other"
        self._window.append(_Ended(reason or "", str(difficulty), _bucket(steps, STEPS), _bucket(age_s, AGES_S)))

    def row(self) -> dict[str, float]:
        """For the metrics of a train step, see docs/metrics.md."""
        row = {"drops/rate": self._rate}
        row |= {f"drops/reason/{reason}": share for reason, share in self._by_reason().items()}
        for what in ("difficulty", "steps", "age"):
            row |= {f"drops/{what}/{bucket}": rate for bucket, (rate, _) in self._by(what).items()}
        return row

    def warning(self, now: float) -> str | None:
        """A line if more than WARN_ABOVE were lost, at most one in WARN_EVERY_S.  now: seconds of any steady clock."""
        if now < self._quiet_until or len(self._window) < LEAST or self._rate <= WARN_ABOVE:
            return None
        self._quiet_until = now + WARN_EVERY_S
        shares = sorted(
            ((share, reason) for reason, share in self._by_reason().items() if reason not in BY_RULE), reverse=True
        )
        reasons = ", ".join(f"{reason} {share:.1%}" for share, reason in shares[:3] if share)
        skewed = [worst for what in ("difficulty", "steps", "age") if (worst := self._worst(what))]
        lean = (
            f"above that at {', '.join(skewed)}, so what is trained leans towards the rest"
            if skewed
            else "evenly over difficulty, steps and age"
        )
        return f"{self._rate:.1%} of the newest {len(self._window)} train attempts were lost: {reasons}; {lean}"

    @property
    def _rate(self) -> float:
        return sum(attempt.lost for attempt in self._window) / max(1, len(self._window))

    def _by_reason(self) -> dict[str, float]:
        """Share of the window, by reason."""
        counts = Counter(attempt.reason for attempt in self._window)
        names = self._reasons | counts.keys() - {""}
        return {reason: counts[reason] / max(1, len(self._window)) for reason in sorted(names)}

    def _by(self, what: str) -> dict[str, tuple[float, int]]:
        """(share lost, attempts) of each bucket that has any."""
        ended = Counter(getattr(attempt, what) for attempt in self._window)
        lost = Counter(getattr(attempt, what) for attempt in self._window if attempt.lost)
        return {bucket: (lost[bucket] / n, n) for bucket, n in ended.items()}

    def _worst(self, what: str) -> str:
        """The bucket that stands out most, if its rate is more than two standard errors above that of all."""
        rate = self._rate
        rates = self._by(what)
        if what == "steps":
            rates.pop("0", None)  # an attempt without a result is lost by definition
        errors = {bucket: (own - rate) * math.sqrt(n) for bucket, (own, n) in rates.items()}
        bucket = max(errors, key=errors.__getitem__, default="")
        if not bucket or errors[bucket] <= 2 * math.sqrt(rate * (1 - rate)):
            return ""
        return f"{what} {bucket}{' s' * (what == 'age')} ({rates[bucket][0]:.0%})"


def _bucket(value: float, buckets: tuple[tuple[int, str], ...]) -> str:
    """Name of the bucket of a value ≥ 0."""
    return buckets[bisect_right(buckets, value, key=lambda bucket: bucket[0]) - 1][1]
