"""The fused loss against autograd in float64: values, gradients, edges, chunks, tensor parallelism."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from naive_loss import naive_grpo_loss, naive_logprob_entropy
from on_ranks import free_port, on_ranks
from torch import Tensor

from megatron_webrl.algorithm import fused_linear_grpo_loss, linear_logprob_entropy, surrogate

COLUMNS = ("targets", "prox", "behave", "advantages")


def problem(seed: int, *, n: int = 37, d: int = 24, vocab: int = 101, scale: float = 2.0) -> dict[str, Tensor]:
    """Random rows near their proximal and behaviour policies, in float64."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g, dtype=torch.float64)
    weight = torch.randn(vocab, d, generator=g, dtype=torch.float64) * scale / d**0.5
    targets = torch.randint(0, vocab, (n,), generator=g)
    logp, _ = naive_logprob_entropy(hidden.float().double(), weight.float().double(), targets)
    prox = logp + 0.3 * torch.randn(n, generator=g, dtype=torch.float64)
    behave = prox + 0.8 * torch.randn(n, generator=g, dtype=torch.float64)
    advantages = torch.randn(n, generator=g, dtype=torch.float64)
    return {
        "hidden": hidden.float(), "weight": weight.float(), "targets": targets, "prox": prox.float(),
        "behave": behave.float(), "advantages": advantages.float(),
    }  # fmt: skip


def close(got: Tensor, want: Tensor, relative: float = 1e-5, floor: float = 1e-7) -> None:
    """‖got − want‖ ≤ relative · ‖want‖ + floor, and everything finite."""
    assert got.shape == want.shape and bool(got.isfinite().all())
    assert (got.double() - want.double()).norm() <= relative * want.double().norm() + floor


def fused(p: dict[str, Tensor], grad: float = 1.0, **options: Any) -> dict[str, Any]:
    hidden, weight = (p[name].clone().requires_grad_() for name in ("hidden", "weight"))
    options.setdefault("denominator", len(p["targets"]))
    loss, terms = fused_linear_grpo_loss(hidden, weight, *(p[name] for name in COLUMNS), **options)
    (loss * grad).backward()
    return {"loss": loss.detach(), "terms": terms, "dH": hidden.grad, "dW": weight.grad}


def naive(p: dict[str, Tensor], grad: float = 1.0, **options: Any) -> dict[str, Any]:
    hidden, weight = (p[name].double().requires_grad_() for name in ("hidden", "weight"))
    options.setdefault("denominator", len(p["targets"]))
    loss, logp, entropy = naive_grpo_loss(hidden, weight, *(p[name] for name in COLUMNS), **options)
    (loss * grad).backward()
    return {
        "loss": loss.detach(),
        "logp": logp.detach(),
        "entropy": entropy.detach(),
        "dH": hidden.grad,
        "dW": weight.grad,
    }


def agree(p: dict[str, Tensor], grad: float = 1.0, chunk_rows: int | None = None, **options: Any) -> dict[str, Any]:
    got, want = fused(p, grad, chunk_rows=chunk_rows, **options), naive(p, grad, **options)
    close(got["loss"], want["loss"])
    close(got["terms"].logp, want["logp"])
    close(got["terms"].entropy, want["entropy"])
    close(got["dH"], want["dH"])
    close(got["dW"], want["dW"])
    return got


def tame(p: dict[str, Tensor], **options: Any) -> bool:
    """No token so near a kink of the objective that rounding decides on which side it lies, and none so certain that
    1 − p is a difference of almost equal numbers."""
    logp, _ = naive_logprob_entropy(p["hidden"].double(), p["weight"].double(), p["targets"], **options)
    ratio = (logp - p["prox"].double()).exp()
    weight = p["prox"].double() - p["behave"].double()
    kinks = torch.cat([ratio - 0.8, ratio - 1.2, ratio - 3.0, weight - math.log(5.0)])
    return bool(kinks.abs().min() > 1e-5) and bool(logp.max() < -0.1)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 40),
    d=st.integers(1, 30),
    vocab=st.integers(3, 90),
    chunk=st.one_of(st.none(), st.integers(1, 45)),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    entropy_coef=st.sampled_from([0.0, 0.05]),
    bans=st.integers(0, 5),
    data=st.data(),
)
def test_loss_terms_and_gradients_are_those_of_float64(
    seed: int, n: int, d: int, vocab: int, chunk: int | None, temperature: float, entropy_coef: float, bans: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    """Relative error ≤ 1e-5 (floor 1e-7) of loss, logprobs, entropies, dH and dW, for every chunk size (odd ones too),
    temperature, entropy bonus and set of banned columns."""
    p = problem(seed, n=n, d=d, vocab=vocab)
    allowed = sorted(set(p["targets"].tolist()))
    free = [c for c in range(vocab) if c not in allowed]
    banned = torch.tensor(data.draw(st.permutations(free))[:bans], dtype=torch.long) if free and bans else None
    assume(tame(p, banned=banned, temperature=temperature))
    agree(
        p,
        grad=1.7,
        chunk_rows=chunk,
        temperature=temperature,
        entropy_coef=entropy_coef,
        banned=banned,
        denominator=7 + n,
    )


EDGES: dict[str, Any] = {
    "one row": lambda p: {k: v[:1] if k != "weight" else v for k, v in p.items()},
    "no advantage": lambda p: p | {"advantages": torch.zeros(37)},
    "every token dropped": lambda p: p | {"behave": p["prox"] - 2.0},
    "behaviour −inf": lambda p: p | {"behave": p["behave"].index_fill(0, torch.tensor([3, 5]), -math.inf)},
    "behaviour NaN": lambda p: p | {"behave": p["behave"].index_fill(0, torch.tensor([3, 5]), math.nan)},
    "log-ratio +100": lambda p: p | {"prox": p["prox"] - 100.0, "behave": p["behave"] - 100.0},
    "log-ratio −100": lambda p: p | {"prox": p["prox"] + 100.0, "behave": p["behave"] + 100.0},
    "large logits": lambda p: p | {"hidden": p["hidden"] * 8.0},
}


@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge: str) -> None:
    """Each as in float64, finite, and with an entropy bonus."""
    p = EDGES[edge](problem(1))
    got = agree(p, entropy_coef=0.1, chunk_rows=8)
    bad = got["terms"].bad
    assert bad.tolist() == p["behave"].isnan().tolist()
    if edge == "every token dropped":
        assert got["terms"].terms.dropped.all()


def test_no_rows_give_zeros_of_the_right_shape() -> None:
    """No row at all, and no row selected out of many (all masked): loss 0, gradients 0, N = 0 does not divide."""
    p = problem(2, n=0)
    got = fused(p, denominator=0)
    assert got["loss"] == 0 and got["dH"].shape == (0, 24) and (got["dW"] == 0).all()
    p = problem(2) | {name: problem(2, n=0)[name] for name in COLUMNS}
    got = fused(p, denominator=0, at=torch.zeros(0, dtype=torch.long))
    assert got["loss"] == 0 and got["dH"].shape == (37, 24) and (got["dH"] == 0).all() and (got["dW"] == 0).all()


def test_rows_that_are_not_selected_do_not_matter() -> None:
    """`at` picks the rows that predict: NaN in all others leaves loss and gradients as they are."""
    p = problem(3)
    at = torch.tensor([0, 4, 5, 30, 36])
    chosen = {k: v[at] if k != "weight" else v for k, v in p.items()}
    poisoned = torch.full_like(p["hidden"], math.nan)
    poisoned[at] = p["hidden"][at]
    got, want = fused(chosen | {"hidden": poisoned}, at=at), naive(chosen)
    close(got["loss"], want["loss"])
    close(got["dW"], want["dW"])
    close(got["dH"][at], want["dH"])
    others = torch.ones(37, dtype=torch.bool).index_fill(0, at, False)
    assert (got["dH"][others] == 0).all()


def test_nan_in_a_selected_row_shows() -> None:
    """A model that computes NaN is not hidden: the loss or the gradient is not finite, so the update is skipped."""
    p = problem(4)
    p["hidden"][7] = math.nan
    got = fused(p)
    assert not got["dW"].isfinite().all() and got["terms"].bad[7]


def test_terms_and_options_are_those_of_the_surrogate() -> None:
    """Whatever objective is bound, its terms come back token by token, and the loss is their sum / denominator."""
    p = problem(5)
    objective = partial(
        surrogate, eps_clip=0.1, eps_clip_high=0.3, c_clip=None, over_cap="truncate", behave_weight_cap=1.5
    )
    got = fused(p, objective=objective, denominator=11)
    want = objective(got["terms"].logp, p["prox"], p["behave"], p["advantages"])
    for a, b in zip(got["terms"].terms, want, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(got["loss"], want.token_loss.double().sum().float() / 11)
    hidden, weight = p["hidden"].double().requires_grad_(), p["weight"].double().requires_grad_()
    logp, _ = naive_logprob_entropy(hidden, weight, p["targets"])
    ((logp * want.grad_logp.double()).sum() / 11).backward()
    close(got["dH"], hidden.grad)
    close(got["dW"], weight.grad)


def test_weight_grad_is_added_at_once_and_autograd_sees_zeros() -> None:
    """Megatron's main_grad: what was in it stays, the gradient comes on top; upstream gradients other than 1 are refused."""
    p = problem(6)
    main = torch.ones(101, 24)
    got, plain = fused(p, weight_grad=main, entropy_coef=0.1), fused(p, entropy_coef=0.1)
    torch.testing.assert_close(main, 1 + plain["dW"])
    torch.testing.assert_close(got["dH"], plain["dH"])
    assert (got["dW"] == 0).all()
    with pytest.raises(RuntimeError):
        fused(p, grad=2.0, weight_grad=main)


def test_it_is_differentiated_once() -> None:
    """A second backward pass would need what is gone: an error, no wrong gradient."""
    p = problem(7)
    loss, _ = fused_linear_grpo_loss(
        p["hidden"].requires_grad_(), p["weight"], *(p[name] for name in COLUMNS), denominator=1
    )
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


def test_what_needs_no_gradient_gets_none() -> None:
    """A frozen output layer costs no dW; without gradients only the forward pass runs."""
    p = problem(8)
    hidden = p["hidden"].clone().requires_grad_()
    loss, _ = fused_linear_grpo_loss(hidden, p["weight"], *(p[name] for name in COLUMNS), denominator=1)
    loss.backward()
    close(hidden.grad, naive(p, denominator=1)["dH"])
    weight, main = p["weight"].clone().requires_grad_(), torch.zeros(101, 24)
    with torch.no_grad():
        value, _ = fused_linear_grpo_loss(
            hidden, weight, *(p[name] for name in COLUMNS), denominator=1, weight_grad=main
        )
    assert value == loss and not value.requires_grad
    assert (main == 0).all(), "nothing is added without gradients"


def test_bfloat16_keeps_float32_logits() -> None:
    """bfloat16 hidden states and weights: logprobs as float64 gives them for the same numbers, to float32's precision;
    gradients to bfloat16's."""
    p = problem(9)
    p |= {name: p[name].bfloat16() for name in ("hidden", "weight")}
    exact = p | {name: p[name].float() for name in ("hidden", "weight")}
    p["prox"] = exact["prox"] = naive_logprob_entropy(exact["hidden"], exact["weight"], p["targets"])[0] + 0.05
    got, want = fused(p), naive(exact)
    close(got["terms"].logp, want["logp"])
    assert got["dH"].dtype is got["dW"].dtype is torch.bfloat16
    close(got["dH"], want["dH"], relative=5e-3)
    close(got["dW"], want["dW"], relative=5e-3)


@pytest.mark.parametrize("chunk", [None, 8])
def test_logprobs_and_entropies_are_differentiable(chunk: int | None) -> None:
    """Gradients of both outputs, of one alone, and the values under no_grad."""
    p = problem(10)
    banned = torch.tensor([c for c in range(101) if c not in p["targets"].tolist()][:4])
    weights = torch.randn(2, 37, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for factors in (weights, weights * torch.tensor([[1.0], [0.0]]), weights * torch.tensor([[0.0], [1.0]])):
        got, want = [], []
        for function, dtype, found in (
            (partial(linear_logprob_entropy, chunk_rows=chunk), torch.float32, got),
            (naive_logprob_entropy, torch.float64, want),
        ):
            hidden, weight = (p[name].detach().to(dtype, copy=True).requires_grad_() for name in ("hidden", "weight"))
            outputs = function(hidden, weight, p["targets"], banned=banned, temperature=0.7)
            used = [(o * f.to(dtype)).sum() for o, f in zip(outputs, factors, strict=True) if f.any()]
            torch.stack(used).sum().backward()
            found += [*(o.detach() for o in outputs), hidden.grad, weight.grad]
        for a, b in zip(got, want, strict=True):
            close(a, b)
    with torch.no_grad():
        logp, entropy = linear_logprob_entropy(p["hidden"], p["weight"], p["targets"], banned=banned, temperature=0.7)
    close(logp, want[0])
    close(entropy, want[1])


def test_wrong_shapes_and_back_ends_are_told() -> None:
    """Each with the numbers that do not fit."""
    p = problem(11)
    columns = [p[name] for name in COLUMNS]
    with pytest.raises(ValueError, match=r"\[37, 23\].*\[101, 24\]"):
        fused_linear_grpo_loss(p["hidden"][:, 1:], p["weight"], *columns, denominator=1)
    with pytest.raises(ValueError, match=r"36 rows.*\[37\]"):
        fused_linear_grpo_loss(p["hidden"][1:], p["weight"], *columns, denominator=1)
    with pytest.raises(ValueError, match="float64"):
        linear_logprob_entropy(p["hidden"].double(), p["weight"].double(), p["targets"])
    with pytest.raises(ValueError, match="weight_grad"):
        fused_linear_grpo_loss(p["hidden"], p["weight"], *columns, denominator=1, weight_grad=torch.zeros(3, 3))
    with pytest.raises(ValueError, match="cannot run on cpu"):
        linear_logprob_entropy(p["hidden"], p["weight"], p["targets"], backend="triton")


def sharded(rank: int, ranks: int, port: int, vocab: int) -> dict[str, dict[str, Any]]:
    """Loss and gradients of one rank's slice of a vocabulary padded to a multiple of the ranks; with hidden states whole
    and sharded, and the differentiable logprobs."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    p = problem(12, n=36, vocab=vocab)
    per_rank = -(-vocab // ranks)
    weight = torch.nn.functional.pad(p["weight"], (0, 0, 0, per_rank * ranks - vocab), value=3.0)
    own = weight[rank * per_rank : (rank + 1) * per_rank]
    free = [c for c in range(vocab) if c not in p["targets"].tolist()]
    never = torch.tensor([*free[:3], *range(vocab, per_rank * ranks)], dtype=torch.long)
    here = never[(never >= rank * per_rank) & (never < (rank + 1) * per_rank)] - rank * per_rank
    options: dict[str, Any] = {
        "group": group,
        "banned": here,
        "entropy_coef": 0.05,
        "chunk_rows": 7,
        "temperature": 0.9,
    }
    out = {}
    got = fused(p | {"weight": own}, **options)
    out["whole"] = {"loss": got["loss"], "dH": got["dH"], "dW": got["dW"], "logp": got["terms"].logp}
    at = torch.arange(0, 36, 2)
    few = {name: p[name][at] for name in COLUMNS} | {"weight": own}
    shard = p["hidden"].view(ranks, -1, 24)[rank]
    got = fused(few | {"hidden": shard}, at=at, reduce_hidden_grad="reduce_scatter", **options)
    out["sharded"] = {"loss": got["loss"], "dH": got["dH"], "dW": got["dW"], "logp": got["terms"].logp}
    none = fused({name: p[name][:0] for name in (*COLUMNS, "hidden")} | {"weight": own}, **options)
    assert none["loss"] == 0 and none["dW"].shape == own.shape
    hidden, mine = p["hidden"].clone().requires_grad_(), own.clone().requires_grad_()
    options.pop("entropy_coef")
    logp, entropy = linear_logprob_entropy(hidden, mine, p["targets"], **options)
    (logp.sum() + 0.3 * entropy.sum()).backward()
    out["logprobs"] = {"loss": logp.sum().detach(), "dH": hidden.grad, "dW": mine.grad, "logp": logp.detach()}
    dist.destroy_process_group()
    return out


@pytest.mark.parametrize(("vocab", "layouts"), [(101, (2, 4)), (9, (4,))])
def test_tensor_parallel_ranks_agree(vocab: int, layouts: tuple[int, ...]) -> None:
    """1, 2 and 4 slices of a padded vocabulary (of 9 over 4 ranks, the last slice is padding only): loss and logprobs with
    the same bits on all ranks, gradients those of one rank to 1e-6; hidden states whole on every rank, or sharded."""
    (alone,) = on_ranks(sharded, 1, free_port(), vocab)
    for ranks in layouts:
        parts = on_ranks(sharded, ranks, free_port(), vocab)
        for case, want in alone.items():
            for part in parts:
                assert torch.equal(part[case]["loss"], parts[0][case]["loss"])
                assert torch.equal(part[case]["logp"], parts[0][case]["logp"])
            close(parts[0][case]["loss"], want["loss"], relative=1e-6)
            close(torch.cat([part[case]["dW"] for part in parts])[:vocab], want["dW"], relative=1e-6)
            if case == "sharded":
                close(torch.cat([part[case]["dH"] for part in parts]), want["dH"], relative=1e-6)
            else:
                for part in parts:
                    close(part[case]["dH"], want["dH"], relative=1e-6)
