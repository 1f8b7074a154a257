"""Wilson's interval: known values, its bounds and its coverage."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from megatron_webrl.observe import wilson


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
