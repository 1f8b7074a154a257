"""Evaluations: what was asked for and what came of it.  The ledger has the episodes; this counts them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from megatron_webrl.replay.ledger import Attempt, Ledger
from megatron_webrl.replay.rules import Fate, fate
from megatron_webrl.trajectory import AttemptKey, Outcome, Task
from megatron_webrl.wire.messages import EvaluationState, Tally


class Evaluations:
    """Evaluations by name, kept in the ledger's facts: those that run, the phases of this start of the run, and the newest that
    ran beside training.  max_attempts: at an episode."""

    def __init__(self, ledger: Ledger, max_attempts: int) -> None:
        self._ledger = ledger
        self._max_attempts = max_attempts
        self._states: dict[str, EvaluationState] = {}
        self._told: set[str] = set()
        """Whose row was given."""
        self._again: set[AttemptKey] = set()
        """Attempts of an earlier start that gave nothing: their episodes are run again, even if `max_attempts` are spent."""

    def row(self) -> dict[str, float]:
        """Metrics of the newest evaluation beside training that is over, once."""
        row: dict[str, float] = {}
        for state in self._states.values():
            if state.beside and state.over and not state.dropped and state.name not in self._told:
                self._told.add(state.name)
                self._remember()
                row = {
                    "evaluation/success": state.successes / state.total,
                    "evaluation/episodes": float(state.total),
                    "evaluation/without_result": float(state.blocked + state.faults),
                    "evaluation/min_version": float(state.min_version),
                    "evaluation/max_version": float(state.max_version),
                }
        return row

    def restore(self, *, anew: bool) -> None:
        """Count anew what an earlier process had counted.  anew: that was of an earlier start of the run, so what its attempts
        did not end is to be run again, exhausted retries too: their groups are open again."""
        self._again = {(g, i, n) for g, i, n in self._ledger.recall("evaluated_again", [])}
        for name, (total, seeds, beside, dropped, told) in self._ledger.recall("evaluations", {}).items():
            self._states[name] = EvaluationState(name, total, seeds, beside, by_seed=_tallies(seeds), dropped=dropped)
            if told:
                self._told.add(name)
            for task, attempts in self._ledger.evaluated(name):
                newest = {attempt.sample_index: attempt for attempt in attempts}
                if anew:
                    self._run_again([a for a in newest.values() if a.state == "running" or _is_fault(a)])
                ended = {i: attempt for i, attempt in newest.items() if self.ended(attempt)}
                for attempt in ended.values():
                    self.count(name, task, attempt)
                if len(ended) == seeds:
                    self.count_task(name, task, list(ended.values()))

    def begin(self, name: str, tasks: int, seeds: int, *, beside: bool) -> bool:
        """False for a name that is known: a repeat.  beside: the one before, if it is over and told, is forgotten."""
        if name in self._states:
            return False
        for old in self._told.copy() if beside else ():
            del self._states[old]
            self._told.remove(old)
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

    def progress(self, name: str) -> EvaluationState:
        """The state to be told: while it runs, without what is as long as the list of tasks.  Raises KeyError for an unknown
        name."""
        state = self._states[name]
        return state if state.over else msgspec.structs.replace(state, by_task={})

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
        return attempt.state == "dropped" and not again and not self.runs_again(attempt)

    def runs_again(self, attempt: Attempt) -> bool:
        """Whether its episode is run again because the attempt gave nothing in an earlier start."""
        return attempt.key in self._again

    def _run_again(self, attempts: Sequence[Attempt]) -> None:
        if attempts:
            self._again.update(attempt.key for attempt in attempts)
            self._ledger.reopen_group(attempts[0].group_id)
            self._ledger.remember(evaluated_again=sorted(self._again))

    def count(self, name: str, task: Task, attempt: Attempt) -> None:
        """An episode ended with this attempt."""
        state = self._states[name]
        result = attempt.state == "evaluated"
        success = result and (attempt.reward or 0) > 0
        for tally in (
            state.all,
            state.by_level.setdefault(task.difficulty, Tally()),
            state.by_task.setdefault(task.name, Tally()),
            state.by_seed[attempt.sample_index],
        ):
            tally.successes += success
            tally.results += result
            tally.episodes += 1
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

    def count_task(self, name: str, task: Task, attempts: list[Attempt]) -> None:
        """All episodes of a task ended with these."""
        state = self._states[name]
        rewards = [attempt.reward or 0 for attempt in attempts if attempt.state == "evaluated"]
        s, r = sum(reward > 0 for reward in rewards), len(rewards)
        for tally in (state.all, state.by_level[task.difficulty], state.by_task[task.name]):
            tally.tasks += r > 0
            tally.ss += s * s
            tally.sr += s * r
            tally.rr += r * r

    def _remember(self) -> None:
        kept = {s.name: [s.total, s.seeds, s.beside, s.dropped, s.name in self._told] for s in self._states.values()}
        self._ledger.remember(evaluations=kept)


def _is_fault(attempt: Attempt) -> bool:
    return attempt.state == "dropped" and attempt.outcome in ("", Outcome.FAULT)


def _tallies(seeds: int) -> list[Tally]:
    return [Tally() for _ in range(seeds)]
