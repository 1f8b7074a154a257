"""The loss in plain autograd, in whatever dtype it is given: what the fused one is held to."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_logprob_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, banned: Tensor | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log π(target) and entropy [N], from all logits at once.  banned: int64, columns that are never sampled."""
    logits = hidden @ weight.t() / temperature
    if banned is not None:
        logits = logits.index_fill(1, banned, float("-inf"))
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(logp == float("-inf"), 0.0)).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy


def naive_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    prox: Tensor,
    behave: Tensor,
    advantages: Tensor,
    *,
    denominator: float,
    eps_clip: float = 0.2,
    c_clip: float = 3.0,
    cap: float = 5.0,
    entropy_coef: float = 0.0,
    banned: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, logprobs and entropy.  Log-ratios are clamped to ±20 with no gradient outside; tokens over the cap, and those
    whose behaviour logprob is −inf or NaN, weigh nothing."""
    logp, entropy = naive_logprob_entropy(hidden, weight, targets, banned=banned, temperature=temperature)
    prox, behave, advantages = (t.to(logp.dtype) for t in (prox, behave, advantages))
    ratio = (logp - prox).clamp(-20.0, 20.0).exp()
    pg = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - eps_clip, 1 + eps_clip))
    pg = torch.minimum(pg, c_clip * advantages.abs())
    log_weight = (prox - behave).nan_to_num(nan=float("inf"))
    kept = log_weight <= torch.tensor(cap, dtype=logp.dtype).log()
    loss = torch.where(kept, torch.where(kept, log_weight, 0.0).exp() * pg, 0.0)
    return (loss.sum() - entropy_coef * entropy.sum()) / max(denominator, 1), logp, entropy
