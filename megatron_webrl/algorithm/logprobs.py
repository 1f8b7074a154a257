"""Logprobs of sampled tokens from logits that may be split over the vocabulary between tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def logprobs_from_logits(
    logits: Tensor,
    targets: Tensor,
    banned: Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log π(target) and, if asked, the entropy of π = softmax(logits / temperature) without the banned tokens.

    logits [N, V / ranks]: this rank's slice of the vocabulary, in the group's rank order; targets int64 [N]: ids in the
    whole vocabulary; banned bool [V / ranks]: tokens never sampled and padding of the vocabulary, at −inf before the
    maximum.  group: the tensor-parallel ranks; None where logits are whole.
    Returns float32 [N] (differentiable in logits) and entropy in nats, float32 [N] (not differentiable), or None.
    Every rank of the group must call it, with N = 0 too, and gets the same values.
    """
    return _Logprobs.apply(logits, targets, banned, temperature, group, entropy)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        banned: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ranks = group.size() if group is not None else 1
        first = logits.shape[1] * (group.rank() if group is not None else 0)
        z = (logits.float() / temperature).masked_fill(banned, float("-inf"))  # [N, V / ranks]
        top = z.amax(dim=1)
        if ranks > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        z -= top[:, None]
        local = targets - first
        here = (local >= 0) & (local < z.shape[1])
        local = local.clamp(0, z.shape[1] - 1)
        chosen = torch.where(here, z.gather(1, local[:, None]).squeeze(1), 0.0)
        weights = z.exp()
        parts = [chosen, weights.sum(dim=1)]
        if with_entropy:
            parts.append((weights * z.masked_fill(banned, 0.0)).sum(dim=1))
        sums = torch.stack(parts)
        if ranks > 1:
            dist.all_reduce(sums, group=group)
        log_total = sums[1].log()
        ctx.save_for_backward(weights.div_(sums[1][:, None]), here, local)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        entropy = log_total - sums[2] / sums[1] if with_entropy else None
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return sums[0] - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        softmax, here, local = ctx.saved_tensors
        out = softmax * -grad[:, None]
        out.scatter_add_(1, local[:, None], torch.where(here, grad, 0.0)[:, None])
        return (out / ctx.temperature).to(ctx.dtype), None, None, None, None, None
