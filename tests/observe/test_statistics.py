"""Wilson's interval: known values, its bounds and its coverage."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from megatron_webrl.observe import clustered, wilson


@settings(deadline=None)
@given(st.integers(0, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_equals_scipy(case: tuple[int, int]):
    """The same as SciPy's Wilson interval (z to 16 digits), and it holds the rate."""
    k, n = case
    low, high = wilson(k, n, z=1.959963984540054)
    if n == 0:
        assert (low, high) == (0, 1)
        return
    expected = binomtest(k, n).proportion_ci(0.95, method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert 0 <= low <= k / n <= high <= 1


def test_published_value():
    """Agresti and Coull (1998): 0 of 10 has the upper bound z²/(n+z²)."""
    assert wilson(0, 10)[1] == pytest.approx(1.96**2 / (10 + 1.96**2))


@pytest.mark.parametrize(("k", "n"), [(-1, 5), (6, 5), (1, 0)])
def test_refuses_what_is_no_proportion(k: int, n: int):
    """More successes than trials, or fewer than none, is a mistake of the caller."""
    with pytest.raises(ValueError, match="successes of"):
        wilson(k, n)


def over_tasks(tasks: list[tuple[int, int]]) -> tuple[float, float]:
    """`clustered` of (successes, episodes) by task."""
    return clustered(
        sum(s for s, _ in tasks),
        sum(e for _, e in tasks),
        tasks=len(tasks),
        ss=sum(s * s for s, _ in tasks),
        se=sum(s * e for s, e in tasks),
        ee=sum(e * e for _, e in tasks),
    )


def test_episodes_of_one_task_count_less_than_as_many_of_different_tasks() -> None:
    """All alike within a task: the interval of the tasks alone.  Independent: about that of the episodes."""
    assert over_tasks([(4, 4)] * 30 + [(0, 4)] * 70) == pytest.approx(wilson(30, 100), abs=2e-3)
    dice = random.Random(0)
    tasks = [(sum(dice.random() < 0.3 for _ in range(4)), 4) for _ in range(4000)]
    assert over_tasks(tasks) == pytest.approx(wilson(sum(s for s, _ in tasks), 16000), abs=2e-3)
    assert over_tasks([(4, 4)] * 5) == wilson(5, 5)
    assert over_tasks([(2, 4)]) == (0.0, 1.0)


def test_tasks_may_have_different_numbers_of_episodes() -> None:
    """The variance is that of a ratio: for means of equal weight s²/n, and what a bootstrap over tasks finds for others."""
    dice = random.Random(1)
    tasks = []
    for _ in range(300):
        p, e = dice.betavariate(0.5, 1), dice.randint(1, 8)
        tasks.append((sum(dice.random() < p for _ in range(e)), e))
    drawn = [dice.choices(tasks, k=len(tasks)) for _ in range(2000)]
    rates = sorted(sum(s for s, _ in draw) / sum(e for _, e in draw) for draw in drawn)
    assert over_tasks(tasks) == pytest.approx((rates[50], rates[1949]), abs=0.006)


def test_95_of_100_intervals_hold_the_rate() -> None:
    """Tasks between easy and impossible, 4 seeds each, a sixth without result: Wilson's over episodes holds it less often."""
    dice = random.Random(2)
    held = alone = 0
    for _ in range(1000):
        tasks = []
        for _ in range(60):
            p, e = dice.betavariate(0.4, 0.8), sum(dice.random() < 5 / 6 for _ in range(4))
            if e:
                tasks.append((sum(dice.random() < p for _ in range(e)), e))
        low, high = over_tasks(tasks)
        held += low <= 1 / 3 <= high
        low, high = wilson(sum(s for s, _ in tasks), sum(e for _, e in tasks))
        alone += low <= 1 / 3 <= high
    assert 930 <= held <= 970
    assert alone < 850
