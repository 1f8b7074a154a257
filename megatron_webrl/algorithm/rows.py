"""What happens within rows of logits: softmax statistics, and the gradient in place.  In torch here, in Triton beside.

One row is one response token; its columns are this rank's slice of the vocabulary.  Logits stay float32: in bfloat16
the ratio to the proximal policy would be off by some per cent.
"""

from __future__ import annotations

import importlib.util
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Backend = Literal["auto", "torch", "triton"]

BANNED = -1e6
"""Logit of tokens that are never sampled.  Finite: exp of it is 0, and 0 · BANNED is 0, where −inf would give NaN; and not
so large that its rounding matters in a slice where nothing else is."""
_BLOCK = 1 << 18
"""Numbers of a block that stays in the processor's cache."""


class Wanted(NamedTuple):
    """What the gradient is made of, float32 [C] each, contiguous: of grad_logp · log p[target] + grad_entropy · H."""

    log_total: Tensor
    """log Σ e^z over the whole vocabulary."""
    entropy: Tensor
    """H, over the whole vocabulary."""
    grad_logp: Tensor
    grad_entropy: Tensor | None
    spent: Tensor | None = None
    """max z of this slice, if the logits were replaced by e^(z − max); None while they are still there."""


class Rows(Protocol):
    """A back end.  logits float32 [C, V], contiguous, not yet divided by the temperature; target int64 [C]: a column,
    or outside [0, V) where another rank holds it."""

    spends: bool
    """Whether `statistics` can leave the exponentials, which a gradient without an entropy term can use again: worth it
    where exp is dear (a processor), not where writing is."""

    def statistics(self, logits: Tensor, target: Tensor, inverse_temperature: float, *, spend: bool = False) -> Tensor:
        """With z = logits / temperature -> float32 [4, C]: max z, Σ e^(z−max), Σ (z−max)·e^(z−max), z[target] or 0.

        spend: leave e^(z − max) in place of the logits."""
        ...

    def gradient_(
        self, logits: Tensor, target: Tensor, inverse_temperature: float, wanted: Wanted, dtype: torch.dtype
    ) -> Tensor:
        """In place of the logits -> dtype [C, V].  With log p = z − log_total:

        (grad_logp · (1[target] − p) − grad_entropy · p · (log p + H)) / temperature
        """
        ...


class TorchRows:
    """Plain torch, on any device."""

    spends = True

    def statistics(self, logits: Tensor, target: Tensor, inverse_temperature: float, *, spend: bool = False) -> Tensor:
        """See `Rows`."""
        top = logits.amax(1) * inverse_temperature
        total, weighted = torch.zeros_like(top), torch.zeros_like(top)
        here, column = _own(target, logits)
        chosen = torch.where(here, logits.gather(1, column).squeeze(1) * inverse_temperature, 0.0)
        for block in _blocks(logits):
            shifted = torch.add(-top[:, None], block, alpha=inverse_temperature)
            weights = torch.exp(shifted, out=block) if spend else shifted.exp()
            total += weights.sum(1)
            weighted += shifted.mul_(weights).sum(1)
        return torch.stack([top, total, weighted, chosen])

    def gradient_(
        self, logits: Tensor, target: Tensor, inverse_temperature: float, wanted: Wanted, dtype: torch.dtype
    ) -> Tensor:
        """See `Rows`."""
        log_total, entropy, grad_logp, grad_entropy, spent = wanted
        onto_p = -grad_logp[:, None] * inverse_temperature
        if spent is not None:
            assert grad_entropy is None
            logits.mul_(onto_p * (spent - log_total).exp()[:, None])
        else:
            for block in _blocks(logits):
                logp = torch.add(-log_total[:, None], block, alpha=inverse_temperature)
                if grad_entropy is None:
                    torch.mul(logp.exp_(), onto_p, out=block)
                else:
                    torch.mul(logp + entropy[:, None], -grad_entropy[:, None] * inverse_temperature, out=block)
                    block.add_(onto_p).mul_(logp.exp_())
        here, column = _own(target, logits)
        logits.scatter_add_(1, column, torch.where(here, grad_logp * inverse_temperature, 0.0)[:, None])
        return logits.to(dtype)


def _blocks(logits: Tensor) -> tuple[Tensor, ...]:
    """Columns in blocks, views [C, ≤ n]."""
    return logits.split(max(64, _BLOCK // max(1, logits.shape[0])), dim=1)


def _own(target: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Whether this rank holds the target, bool [C]; and a column that exists, int64 [C, 1]."""
    here = (target >= 0) & (target < logits.shape[1])
    return here, target.clamp(0, logits.shape[1] - 1)[:, None]


def rows(backend: Backend, device: torch.device) -> Rows:
    """The back end to use on `device`.  auto: Triton on CUDA where it is installed, else torch.

    Raises ValueError if Triton is asked for and cannot run there.
    """
    if backend == "torch" or (backend == "auto" and (device.type != "cuda" or not _has_triton())):
        return TorchRows()
    if not _has_triton():
        raise ValueError("backend='triton' needs triton, which is not installed: use 'auto' or 'torch'")
    from megatron_webrl.algorithm.triton_rows import INTERPRETED, TritonRows

    if device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"backend='triton' cannot run on {device.type}: use 'auto' or 'torch' (or set TRITON_INTERPRET=1 before the "
            "start, for tests)"
        )
    return TritonRows()


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
