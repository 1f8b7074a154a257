"""Do engines and trainer agree?  Logprobs of both on the same tokens, which the same weights sampled, against two budgets."""

from __future__ import annotations

import logging

from megatron_webrl.config import TrainerConfig

log = logging.getLogger(__name__)

DEFAULTS: dict[str, tuple[float | None, float]] = {"float32": (1e-3, 1e-4), "bfloat16": (None, 0.02)}
"""Budgets of the largest difference and of the mean, by trainer.dtype."""


class LogprobMismatch(Exception):
    """An engine does not sample from the weights that the trainer published."""


class Agreement:
    """Budgets of |engine − trainer| logprobs, from `max_logprob_diff`, `mean_logprob_diff` and `logprob_mismatch`."""

    def __init__(self, config: TrainerConfig) -> None:
        largest, mean = DEFAULTS[config.dtype]
        self._budgets = {
            "max_logprob_diff": largest if config.max_logprob_diff is None else config.max_logprob_diff,
            "mean_logprob_diff": mean if config.mean_logprob_diff is None else config.mean_logprob_diff,
        }
        self._stop = config.logprob_mismatch == "stop"

    def check(self, largest: float, mean: float, where: str) -> bool:
        """Whether a difference [nats] exceeds its budget, as one that is not a number does; then the log says so.

        where: which tokens they are of.  Raises LogprobMismatch instead with `logprob_mismatch: stop`.
        """
        found = zip(("largest", "mean"), (largest, mean), self._budgets.items(), strict=True)
        over = [
            f"{what} |engine − trainer| logprob {diff:.2e} exceeds trainer.{key}={budget:g}"
            for what, diff, (key, budget) in found
            if budget is not None and not diff <= budget
        ]
        if not over:
            return False
        message = (
            f"{' and '.join(over)} ({where}): the engine does not hold the published weights, or its numerics differ"
        )
        if self._stop:
            raise LogprobMismatch(message)
        log.warning("%s; trainer.logprob_mismatch=warn, so the run goes on", message)
        return True
