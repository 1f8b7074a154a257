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
_COLUMNS = 8192
"""Of a block that stays in the processor's cache."""


class Wanted(NamedTuple):
    """What the gradient is made of, float32 [C] each, contiguous: of grad_logp · log p[target] + grad_entropy · H."""

    log_total: Tensor
    """log Σ e^z over the whole vocabulary."""
    entropy: Tensor
    """H, over the whole vocabulary."""
    grad_logp: Tensor
    grad_entropy: Tensor | None


class Rows(Protocol):
    """A back end.  logits float32 [C, V], contiguous, not yet divided by the temperature; target int64 [C]: a column,
    or outside [0, V) where another rank holds it."""

    def statistics(self, logits: Tensor, target: Tensor, inverse_temperature: float) -> Tensor:
        """With z = logits / temperature -> float32 [4, C]: max z, Σ e^(z−max), Σ (z−max)·e^(z−max), z[target] or 0."""
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

    def statistics(self, logits: Tensor, target: Tensor, inverse_temperature: float) -> Tensor:
        """See `Rows`."""
        top = logits.amax(1) * inverse_temperature
        total, weighted = torch.zeros_like(top), torch.zeros_like(top)
        for block in logits.split(_COLUMNS, dim=1):
            shifted = torch.add(-top[:, None], block, alpha=inverse_temperature)
            weights = shifted.exp()
            total += weights.sum(1)
            weighted += shifted.mul_(weights).sum(1)
        here, column = _own(target, logits)
        chosen = torch.where(here, logits.gather(1, column).squeeze(1) * inverse_temperature, 0.0)
        return torch.stack([top, total, weighted, chosen])

    def gradient_(
        self, logits: Tensor, target: Tensor, inverse_temperature: float, wanted: Wanted, dtype: torch.dtype
    ) -> Tensor:
        """See `Rows`."""
        log_total, entropy, grad_logp, grad_entropy = wanted
        onto_p = -grad_logp[:, None] * inverse_temperature
        for block in logits.split(_COLUMNS, dim=1):
            logp = torch.add(-log_total[:, None], block, alpha=inverse_temperature)
            if grad_entropy is None:
                torch.mul(logp.exp_(), onto_p, out=block)
            else:
                torch.mul(logp + entropy[:, None], -grad_entropy[:, None] * inverse_temperature, out=block)
                block.add_(onto_p).mul_(logp.exp_())
        here, column = _own(target, logits)
        logits.scatter_add_(1, column, torch.where(here, grad_logp * inverse_temperature, 0.0)[:, None])
        return logits.to(dtype)


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
