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


def test_episodes_of_one_task_count_less_than_as_many_of_different_tasks() -> None:
    """All alike within a task: the interval of the tasks alone.  Independent: about that of the episodes.  In between always."""
    alike = [1.0] * 30 + [0.0] * 70
    assert clustered(100, sum(alike), sum(m * m for m in alike), episodes=400) == pytest.approx(
        wilson(30, 100), abs=2e-3
    )
    dice = random.Random(0)
    means = [sum(dice.random() < 0.3 for _ in range(4)) / 4 for _ in range(4000)]
    low, high = clustered(4000, sum(means), sum(m * m for m in means), episodes=16000)
    expected = wilson(sum(means) / 4000 * 16000, 16000)
    assert (low, high) == pytest.approx(expected, abs=2e-3)
    assert clustered(5, 5.0, 5.0, episodes=20) == wilson(5, 5)
    assert clustered(1, 1.0, 1.0, episodes=4) == (0.0, 1.0)
