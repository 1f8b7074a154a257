"""Engine against trainer: what exceeds a budget is warned of, or ends the run."""

from __future__ import annotations

import logging
import math

import pytest

from megatron_webrl.config import TrainerConfig
from megatron_webrl.trainer.agreement import Agreement, LogprobMismatch


def agreement(dtype: str = "float32", **settings: object) -> Agreement:
    return Agreement(TrainerConfig.model_validate({"dtype": dtype, **settings}))


@pytest.mark.parametrize(
    ("dtype", "largest", "mean", "over"),
    [
        ("float32", 1e-3, 1e-4, False),
        ("float32", 1.1e-3, 0.0, True),
        ("float32", 2e-4, 1.1e-4, True),
        ("bfloat16", 9.0, 0.02, False),
        ("bfloat16", 0.03, 0.021, True),
        ("bfloat16", 0.0, math.nan, True),
        ("float32", math.inf, 0.0, True),
    ],
)
def test_budgets_by_precision(
    dtype: str, largest: float, mean: float, over: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """At most the budget is within it; bfloat16 has none for single tokens; not a number is over. One warning a check."""
    with caplog.at_level(logging.WARNING):
        assert agreement(dtype).check(largest, mean, "here") is over
    assert len(caplog.records) == over


def test_budgets_that_are_given_count(caplog: pytest.LogCaptureFixture) -> None:
    """In either precision; the message has key, value, budget and place of each that is exceeded."""
    own = agreement("bfloat16", max_logprob_diff=0.5, mean_logprob_diff=0.1)
    assert not own.check(0.5, 0.1, "step 7")
    assert own.check(0.6, 0.2, "step 8")
    for words in ("6.00e-01 exceeds trainer.max_logprob_diff=0.5", "2.00e-01 exceeds trainer.mean_logprob_diff=0.1"):
        assert words in caplog.text
    assert "step 8" in caplog.text and "step 7" not in caplog.text
    caplog.clear()
    assert own.check(0.6, 0.0, "step 9") and "mean_logprob_diff" not in caplog.text


def test_stop_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """By an exception with the same words, and without a warning."""
    strict = agreement(logprob_mismatch="stop")
    assert not strict.check(1e-5, 1e-6, "the batch")
    with pytest.raises(
        LogprobMismatch, match=r"2\.00e-03 exceeds trainer\.max_logprob_diff=0\.001 \(reply of engine-0\)"
    ):
        strict.check(2e-3, 1e-5, "reply of engine-0")
    assert not caplog.records
