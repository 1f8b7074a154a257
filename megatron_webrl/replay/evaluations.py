"""Evaluations: what was asked for and what came of it.  The ledger has the episodes; this counts them."""

from __future__ import annotations

from megatron_webrl.replay.ledger import Attempt, Ledger
from megatron_webrl.replay.rules import Fate, fate
from megatron_webrl.trajectory import Outcome, Task
from megatron_webrl.wire.messages import EvaluationState


class Evaluations:
    """Evaluations by name, kept in the ledger's facts.  max_attempts: at an episode."""

    def __init__(self, ledger: Ledger, max_attempts: int) -> None:
        self._ledger = ledger
        self._max_attempts = max_attempts
        self._states: dict[str, EvaluationState] = {}
        self._told: set[str] = set()
        """Whose row was given."""

    def row(self) -> dict[str, float]:
        """Metrics of the newest evaluation beside training that is over, once."""
        row: dict[str, float] = {}
        for state in self._states.values():
            if state.beside and state.over and not state.dropped and state.name not in self._told:
                self._told.add(state.name)
                row = {
                    "evaluation/success": state.all[0] / state.total,
                    "evaluation/episodes": float(state.total),
                    "evaluation/without_result": float(state.blocked + state.faults),
                    "evaluation/min_version": float(state.min_version),
                    "evaluation/max_version": float(state.max_version),
                }
        return row

    def restore(self) -> None:
        """Count anew what an earlier process had counted."""
        for name, (total, seeds, beside, dropped) in self._ledger.recall("evaluations", {}).items():
            self._states[name] = EvaluationState(name, total, seeds, beside, by_seed=_tallies(seeds), dropped=dropped)
            for task, attempts in self._ledger.evaluated(name):
                newest = {attempt.sample_index: attempt for attempt in attempts}
                ended = {i: attempt for i, attempt in newest.items() if self.ended(attempt)}
                for attempt in ended.values():
                    self.count(name, task, attempt)
                if len(ended) == seeds:
                    self.count_task(name, list(ended.values()))

    def begin(self, name: str, tasks: int, seeds: int, *, beside: bool) -> bool:
        """False for a name that is known: a repeat."""
        if name in self._states:
            return False
        self._states[name] = EvaluationState(name, tasks * seeds, seeds, beside, by_seed=_tallies(seeds))
        self._remember()
        return True

    def end_beside(self) -> list[str]:
        """Those that run beside training are over; their names."""
        ended = [state for state in self._states.values() if state.beside and not state.over]
        for state in ended:
            state.dropped = True
        self._remember()
        return [state.name for state in ended]

    def state(self, name: str) -> EvaluationState:
        """Raises KeyError for an unknown name."""
        return self._states[name]

    def is_beside(self, name: str) -> bool:
        return self._states[name].beside

    @property
    def phase(self) -> bool:
        """Whether one runs that training waits for."""
        return any(not state.beside and not state.over for state in self._states.values())

    def ended(self, attempt: Attempt) -> bool:
        """Whether nothing more comes of the attempt's episode."""
        if attempt.state == "evaluated":
            return True
        outcome = Outcome(attempt.outcome) if attempt.outcome else Outcome.FAULT
        again = fate(outcome, attempt.attempt, max_attempts=self._max_attempts) is Fate.REISSUE
        return attempt.state == "dropped" and not again

    def count(self, name: str, task: Task, attempt: Attempt) -> None:
        """An episode ended with this attempt."""
        state = self._states[name]
        result = attempt.state == "evaluated"
        success = result and (attempt.reward or 0) > 0
        for tally in (
            state.all,
            state.by_level.setdefault(task.difficulty, [0, 0, 0]),
            state.by_task.setdefault(task.name, [0, 0, 0]),
            state.by_seed[attempt.sample_index],
        ):
            tally[0] += success
            tally[1] += result
            tally[2] += 1
        state.reasons[attempt.reason] = state.reasons.get(attempt.reason, 0) + 1
        state.blocked += attempt.outcome == Outcome.ENVIRONMENT
        state.faults += not result and attempt.outcome != Outcome.ENVIRONMENT
        if result:
            lengths = state.steps.setdefault(success, [0, 0, 0])
            lengths[0] += 1
            lengths[1] += attempt.steps
            lengths[2] += attempt.tokens
        if attempt.min_version >= 0:
            known = state.min_version >= 0
            state.min_version = min(state.min_version, attempt.min_version) if known else attempt.min_version
            state.max_version = max(state.max_version, attempt.max_version)

    def count_task(self, name: str, attempts: list[Attempt]) -> None:
        """All episodes of a task ended with these."""
        mean = sum((a.reward or 0) > 0 for a in attempts if a.state == "evaluated") / len(attempts)
        means = self._states[name].means
        means[0] += 1
        means[1] += mean
        means[2] += mean * mean

    def _remember(self) -> None:
        kept = {s.name: [s.total, s.seeds, s.beside, s.dropped] for s in self._states.values()}
        self._ledger.remember(evaluations=kept)


def _tallies(seeds: int) -> list[list[int]]:
    return [[0, 0, 0] for _ in range(seeds)]
