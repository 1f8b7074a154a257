"""The objective against independent vectors and against autograd."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_webrl.algorithm import normalize_group_rewards, raft_advantage, step_advantage, surrogate

VECTORS = sorted((Path(__file__).parent / "vectors").glob("*.json"))


def read(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.mark.parametrize("path", [p for p in VECTORS if read(p)["case"]["objective"] == "grpo"], ids=lambda p: p.stem)
def test_advantages_are_those_of_the_vectors(path: Path) -> None:
    """r̂ over the G episodes of a group, then divided by the horizon or the episode's length."""
    case, episodes = read(path)["case"], read(path)["episodes"]
    for group, expected in zip(case["groups"], episodes, strict=True):
        normalized = normalize_group_rewards(group["rewards"], unbiased_std=case["unbiased_std"])
        assert normalized.dtype == np.float64
        np.testing.assert_allclose(normalized, [e["normalized_reward"] for e in expected], rtol=1e-12, atol=1e-15)
        for value, episode in zip(normalized, expected, strict=True):
            got = step_advantage(value, episode["steps"], case["constant_horizon"])
            assert got == pytest.approx(episode["step_advantage"], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("path", [p for p in VECTORS if read(p)["case"]["objective"] == "raft++"], ids=lambda p: p.stem)
def test_raft_advantages_are_those_of_the_vectors(path: Path) -> None:
    """Successes get r / number of steps; the others are filtered, and N counts the successes' tokens only."""
    data = read(path)
    tokens = 0
    for group, expected in zip(data["case"]["groups"], data["episodes"], strict=True):
        for reward, lengths, episode in zip(group["rewards"], group["response_lengths"], expected, strict=True):
            advantage = raft_advantage(reward, episode["steps"])
            assert (advantage is not None) == episode["kept"]
            if advantage is not None:
                assert advantage == pytest.approx(episode["step_advantage"], rel=1e-12)
                tokens += sum(lengths)
    assert tokens == data["expected"]["response_tokens"]


@pytest.mark.parametrize("path", VECTORS, ids=lambda p: p.stem)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_surrogate_gives_the_vectors(path: Path, dtype: torch.dtype) -> None:
    """Loss, token losses, gradient and rates of every case; float32 within rounding."""
    data = read(path)
    case, tokens, expected = data["case"], data["tokens"], data["expected"]
    columns = {name: torch.tensor(values, dtype=dtype) for name, values in tokens.items() if isinstance(values, list)}
    theta, prox, behave = (columns[n] for n in _logp_names(columns))
    got = surrogate(
        theta, prox, behave, columns["advantage"],
        eps_clip=case["eps_clip"], c_clip=case["c_clip"], behave_weight_cap=case["behave_weight_cap"],
    )  # fmt: skip
    n = expected["response_tokens"]
    assert n == len(theta)
    tolerance = {"rtol": 1e-10, "atol": 1e-13} if dtype is torch.float64 else {"rtol": 2e-4, "atol": 1e-6}
    np.testing.assert_allclose(got.token_loss, expected["token_loss"], **tolerance)
    np.testing.assert_allclose(got.grad_logp / n, expected["grad_logp_theta"], **tolerance)
    np.testing.assert_allclose(got.token_loss.sum() / n, expected["loss"], **tolerance)
    rate = 1e-12 if dtype is torch.float64 else 2 / n
    assert got.clipped.double().mean().item() == pytest.approx(expected["clip_ratio"], abs=rate)
    assert got.dual_clipped.double().mean().item() == pytest.approx(expected["dual_clip_ratio"], abs=rate)
    assert got.dropped.double().mean().item() == pytest.approx(expected["behave_cap_ratio"], abs=rate)


def _logp_names(columns: dict) -> tuple[str, str, str]:
    theta = next(n for n in columns if "theta" in n)
    return theta, next(n for n in columns if "prox" in n), next(n for n in columns if "behave" in n)


def reference(
    logp: torch.Tensor, prox: torch.Tensor, behave: torch.Tensor, a: torch.Tensor,
    high: float = 0.2, c: float | None = 3.0, over_cap: str = "drop",
) -> torch.Tensor:  # fmt: skip
    """The formula, left to autograd: only for tame numbers."""
    ratio = (logp - prox).exp()
    pg = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1 + high))
    if c is not None:
        pg = torch.minimum(pg, c * a.abs())
    weight = (prox - behave).exp()
    if over_cap == "truncate":
        return weight.clamp(max=5.0) * pg
    return torch.where(weight <= 5.0, weight * pg, 0.0)


tame = st.floats(-3.0, 0.0)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(tame, tame, tame, st.floats(-2.0, 2.0)), min_size=1, max_size=20),
    st.sampled_from([0.1, 0.2, 0.5]),
    st.sampled_from([None, 2.0, 3.0]),
    st.sampled_from(["drop", "truncate"]),
)
def test_gradient_is_that_of_autograd(
    tokens: list[tuple[float, float, float, float]], high: float, c: float | None, over_cap: str
) -> None:
    """In float64, away from the kinks of the formula: with any ε above 1, dual clip or none, dropping or truncating."""
    logp, prox, behave, a = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    ratio = (logp - prox).exp()
    kinks = torch.tensor([0.8, 1 + high, c or 3.0], dtype=torch.float64)
    smooth = (ratio[:, None] - kinks).abs().amin(1) > 1e-9
    smooth &= ((prox - behave) - math.log(5.0)).abs() > 1e-9
    smooth &= a != 0
    logp = logp.clone().requires_grad_()
    expected = reference(logp, prox, behave, a, high, c, over_cap)
    (gradient,) = torch.autograd.grad(expected.sum(), logp)
    got = surrogate(logp, prox, behave, a, eps_clip_high=high, c_clip=c, over_cap=over_cap)
    torch.testing.assert_close(got.token_loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.grad_logp[smooth], gradient[smooth], rtol=1e-12, atol=1e-12)


wild = st.one_of(st.floats(-100.0, 0.0), st.sampled_from([-math.inf, math.nan, math.inf]))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.floats(-100, 0), st.floats(-100, 0), wild, st.floats(-3, 3)), min_size=1, max_size=20),
    st.sampled_from(["drop", "truncate"]),
)
def test_wild_numbers_stay_finite(tokens: list[tuple[float, float, float, float]], over_cap: str) -> None:
    """Log-ratios of ±100 and behaviour logprobs of −inf or NaN give finite losses and gradients; such tokens are dropped."""
    logp, prox, behave, a = torch.tensor(tokens, dtype=torch.float32).unbind(1)
    got = surrogate(logp, prox, behave, a, over_cap=over_cap)
    assert got.token_loss.isfinite().all() and got.grad_logp.isfinite().all()
    assert got.dropped[behave.isnan() | (behave == -math.inf)].all()
    assert (got.token_loss <= 5.0 * 3.0 * a.abs() * (1 + 1e-5) + 1e-30).all()
    outside = (logp - prox).abs() > 20.0
    assert (got.grad_logp[outside] == 0).all()


def test_equal_rewards_and_single_episodes_have_no_advantage() -> None:
    """Zero variance gives zeros, not NaN."""
    assert (normalize_group_rewards([1.0] * 8) == 0).all()
    assert (normalize_group_rewards([1.0], unbiased_std=True) == 0).all()
