"""The decoupled, clipped and dual-clipped surrogate of AsyncWebRL (arXiv:2606.05597), its gradient in closed form.

Autograd through exp, max and where gives NaN at dropped tokens, infinite behaviour logprobs and large log-ratios;
the closed form does not.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""log π_θ − log π_prox is clamped to ± this, with zero gradient outside."""


OverCap = Literal["drop", "truncate"]


class Surrogate(NamedTuple):
    """Terms of one token each, all [N] and without autograd history."""

    token_loss: Tensor
    """w · pg; the loss is token_loss.sum() / N, N counting dropped tokens too."""
    grad_logp: Tensor
    """d token_loss / d log π_θ, not divided by N."""
    clipped: Tensor
    """bool: −A·ρ < −A·clip(ρ, 1−ε, 1+ε), before the dual clip and before dropping."""
    dual_clipped: Tensor
    """bool: the bound c·|A| is the smaller; independent of dropping."""
    dropped: Tensor
    """bool: behaviour weight over the cap, infinite, or not a number; token_loss and grad_logp are 0."""


@torch.no_grad()
def surrogate(
    logp: Tensor,
    prox_logp: Tensor,
    behave_logp: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    c_clip: float | None = 3.0,
    behave_weight_cap: float = 5.0,
    over_cap: OverCap = "drop",
) -> Surrogate:
    """Token losses of the three policies.

    logp, prox_logp, behave_logp, advantages: floating [N]: log π_θ, log π_prox, log π_behave and A of the sampled
    tokens; computed in their common dtype, float32 at least.

    eps_clip_high: ε above 1 (clip-higher of DAPO, arXiv:2503.14476); None: eps_clip.
    c_clip: c of the dual clip (arXiv:1912.09729); None leaves it out.
    over_cap: what becomes of w > cap: `drop` (AsyncWebRL) gives the token weight 0, `truncate` gives it the cap (truncated
        importance sampling).

    With ρ = π_θ/π_prox and w = π_prox/π_behave:
        pg = min(max(−A·ρ, −A·clip(ρ, 1−ε, 1+ε_high)), c·|A|),  token_loss = w · pg
        grad_logp = −w · A · ρ where ρ is in its active range (A>0: ρ ≤ 1+ε_high; A<0: ρ ≥ 1−ε and c·|A| does not bind)
    The cap is tested in log space, so no weight overflows; a behaviour logprob of −inf or NaN drops its token in either way.
    """
    dtype = torch.promote_types(torch.promote_types(logp.dtype, advantages.dtype), torch.float32)
    logp, prox_logp, behave_logp, advantages = (t.to(dtype) for t in (logp, prox_logp, behave_logp, advantages))

    log_weight, log_cap = prox_logp - behave_logp, math.log(behave_weight_cap)
    # NaN compares false, so it is dropped
    dropped = ~(log_weight <= log_cap) if over_cap == "drop" else ~(log_weight < math.inf)
    weight = torch.where(dropped, 0.0, log_weight).clamp(max=log_cap).exp()

    log_ratio = logp - prox_logp
    inside = log_ratio.abs() <= MAX_LOG_RATIO
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    plain = -advantages * ratio
    limited = -advantages * ratio.clamp(1.0 - eps_clip, 1.0 + (eps_clip if eps_clip_high is None else eps_clip_high))
    clipped = plain < limited
    pg = torch.maximum(plain, limited)
    bound = torch.full_like(pg, math.inf) if c_clip is None else c_clip * advantages.abs()
    dual_clipped = bound < pg
    pg = torch.minimum(pg, bound)

    active = ~clipped & ~dual_clipped & inside
    return Surrogate(
        token_loss=torch.where(dropped, 0.0, weight * pg),
        grad_logp=torch.where(dropped, 0.0, weight * torch.where(active, plain, 0.0)),
        clipped=clipped,
        dual_clipped=dual_clipped,
        dropped=dropped,
    )
