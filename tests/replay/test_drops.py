"""Drop rates: shares of the newest attempts, and a warning that names reasons and bias."""

import pytest

from megatron_webrl.replay.drops import BY_RULE, LEAST, MOST_REASONS, WARN_EVERY_S, WINDOW, DropRates


def feed(
    drops: DropRates, times: int, reason: str | None = None, difficulty: int = 1, steps: int = 1, age_s: float = 1.0
) -> None:
    for _ in range(times):
        drops.ended(reason, difficulty=difficulty, steps=steps, age_s=age_s)


def test_rows_are_shares_of_the_attempts_that_ended() -> None:
    """reason: of all; difficulty, steps and age: lost of those that ended there; what is dropped by rule is not lost."""
    drops = DropRates()
    assert drops.row() == {"drops/rate": 0.0}
    feed(drops, 4)
    feed(drops, 2, "zero_variance", steps=3, age_s=10.0)
    feed(drops, 1, "group_page_timeout", difficulty=7, steps=2, age_s=9.9)
    feed(drops, 3, "lease_expired", difficulty=7, steps=0, age_s=4000.0)
    assert drops.row() == {
        "drops/rate": 0.4,
        "drops/reason/group_page_timeout": 0.1,
        "drops/reason/lease_expired": 0.3,
        "drops/reason/zero_variance": 0.2,
        "drops/difficulty/1": 0.0,
        "drops/difficulty/7": 1.0,
        "drops/steps/0": 1.0,
        "drops/steps/1-2": 0.2,
        "drops/steps/3-5": 0.0,
        "drops/age/0-10": 0.2,
        "drops/age/10-30": 0.0,
        "drops/age/1000-up": 1.0,
    }


@pytest.mark.parametrize(
    ("steps", "name"), [(1, "1-2"), (5, "3-5"), (6, "6-10"), (10, "6-10"), (20, "11-20"), (21, "21-up"), (99, "21-up")]
)
def test_buckets_of_steps(steps: int, name: str) -> None:
    drops = DropRates()
    feed(drops, 1, steps=steps)
    assert f"drops/steps/{name}" in drops.row()


def test_only_the_newest_attempts_count_and_names_of_reasons_stay() -> None:
    drops = DropRates()
    feed(drops, 10, "lease_expired")
    feed(drops, WINDOW - 10)
    assert drops.row()["drops/rate"] == 10 / WINDOW
    feed(drops, 4)
    assert drops.row()["drops/reason/lease_expired"] == 6 / WINDOW
    feed(drops, 6)
    assert drops.row()["drops/reason/lease_expired"] == 0.0


def test_reasons_do_not_grow_without_bound() -> None:
    drops = DropRates()
    for i in range(3 * MOST_REASONS):
        feed(drops, 1, f"reason-{i}")
    row = drops.row()
    assert sum(name.startswith("drops/reason/") for name in row) == MOST_REASONS + 1
    assert row["drops/reason/other"] == pytest.approx(2 / 3)


def test_a_warning_comes_above_five_percent_of_enough_attempts_and_not_too_often() -> None:
    drops = DropRates()
    feed(drops, LEAST - 1, "lease_expired")
    assert drops.warning(0.0) is None, "too few"
    drops = DropRates()
    feed(drops, WINDOW // 20, "lease_expired")
    feed(drops, WINDOW - WINDOW // 20)
    assert drops.row()["drops/rate"] == 0.05 and drops.warning(0.0) is None, "at the limit"
    feed(drops, WINDOW // 10, "lease_expired")
    assert drops.warning(1.0) is not None
    assert drops.warning(WARN_EVERY_S) is None
    assert drops.warning(WARN_EVERY_S + 1.0) is not None


def test_a_warning_names_the_largest_reasons_and_what_is_lost_more_often_than_the_rest() -> None:
    drops = DropRates()
    feed(drops, 80)
    feed(drops, 5, "worker_lost", steps=0)
    feed(drops, 3, "group_page_timeout", difficulty=5, steps=12, age_s=350.0)
    feed(drops, 2, "group_blocked", difficulty=5, steps=12, age_s=350.0)
    feed(drops, 1, "damaged", steps=0)
    feed(drops, 9, "zero_variance", difficulty=5)
    assert drops.warning(0.0) == (
        "11.0% of the newest 100 train attempts were lost: worker_lost 5.0%, group_page_timeout 3.0%, group_blocked 2.0%; "
        "above that at difficulty 5 (36%), steps 11-20 (100%), age 300-1000 s (100%), so what is trained leans towards the "
        "rest"
    )


def test_losses_that_are_spread_evenly_are_called_so() -> None:
    drops = DropRates()
    for level in (1, 2):
        feed(drops, 45, difficulty=level)
        feed(drops, 5, "worker_lost", difficulty=level)
    assert drops.warning(0.0) == (
        "10.0% of the newest 100 train attempts were lost: worker_lost 10.0%; evenly over difficulty, steps and age"
    )


def test_what_is_dropped_by_rule_is_no_reason_to_warn() -> None:
    drops = DropRates()
    for reason in BY_RULE:
        feed(drops, LEAST, reason)
    assert drops.warning(0.0) is None
    assert drops.row()["drops/rate"] == 0.0 and drops.row()["drops/reason/zero_variance"] == pytest.approx(
        1 / len(BY_RULE)
    )
