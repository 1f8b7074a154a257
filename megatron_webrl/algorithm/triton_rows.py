"""The row operations in Triton: one pass for the statistics, one in place for the gradient; cuBLAS does the rest.

One program streams one row from left to right.  The gradient in bfloat16 is written into the storage of the float32
logits that it replaces: block j is read at bytes [4jB, 4(j+1)B) and written at [2jB, 2(j+1)B), never ahead of what is
still to be read, so no second [C, V] buffer exists.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_webrl.algorithm.rows import Wanted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernels run in Triton's interpreter, on a CPU: read when they are defined, which is now."""
BLOCK, WARPS = 4096, 8


@triton.jit
def statistics_kernel(LOGITS, TARGET, OUT, stride, rows, columns, inverse_temperature, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """OUT [4, rows]: max, Σ e^(z−max), Σ (z−max)·e^(z−max), z[target] or 0, by an online softmax."""
    row = tl.program_id(0).to(tl.int64)
    start_of_row = LOGITS + row * stride
    target = tl.load(TARGET + row)
    top = float("-inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(start_of_row + at, mask=at < columns, other=float("-inf")) * inverse_temperature
        new_top = tl.maximum(top, tl.max(z, 0))
        shift = tl.where(top == float("-inf"), 0.0, top - new_top)  # the first block has nothing to rescale
        shrink = tl.exp(shift)
        weights = tl.exp(z - new_top)
        weighted = shrink * (weighted + shift * total) + tl.sum(
            tl.where(weights > 0.0, (z - new_top) * weights, 0.0), 0
        )
        total = shrink * total + tl.sum(weights, 0)
        top = new_top
    here = (target >= 0) & (target < columns)
    chosen = tl.load(start_of_row + tl.where(here, target, 0)) * inverse_temperature
    tl.store(OUT + row, top)
    tl.store(OUT + rows + row, total)
    tl.store(OUT + 2 * rows + row, weighted)
    tl.store(OUT + 3 * rows + row, tl.where(here, chosen, 0.0))


@triton.jit
def gradient_kernel(  # type: ignore[no-untyped-def]
    LOGITS, OUT, TARGET, LOG_TOTAL, ENTROPY, GRAD_LOGP, GRAD_ENTROPY, stride, out_stride, columns, inverse_temperature,
    WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT = (grad_logp · (1[target] − p) − grad_entropy · p · (log p + H)) / temperature; OUT is LOGITS' own storage."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(TARGET + row)
    log_total = tl.load(LOG_TOTAL + row)
    grad_logp = tl.load(GRAD_LOGP + row)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        z = tl.load(LOGITS + row * stride + at, mask=inside, other=float("-inf")) * inverse_temperature
        logp = z - log_total
        p = tl.exp(logp)
        out = tl.where(at == target, grad_logp, 0.0) - grad_logp * p
        if WITH_ENTROPY:
            out -= tl.where(p > 0.0, tl.load(GRAD_ENTROPY + row) * p * (logp + tl.load(ENTROPY + row)), 0.0)
        tl.debug_barrier()  # every lane has read its part of the block before any overwrites it
        tl.store(OUT + row * out_stride + at, (out * inverse_temperature).to(OUT.dtype.element_ty), mask=inside)
        tl.debug_barrier()


class TritonRows:
    """See `rows.Rows`."""

    spends = False

    def statistics(self, logits: Tensor, target: Tensor, inverse_temperature: float, *, spend: bool = False) -> Tensor:
        """See `rows.Rows`."""
        rows, columns = logits.shape
        out = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
        statistics_kernel[(rows,)](
            logits, target, out, logits.stride(0), rows, columns, inverse_temperature, BLOCK=BLOCK, num_warps=WARPS
        )
        return out

    def gradient_(
        self, logits: Tensor, target: Tensor, inverse_temperature: float, wanted: Wanted, dtype: torch.dtype
    ) -> Tensor:
        """See `rows.Rows`."""
        log_total, entropy, grad_logp, grad_entropy, _ = wanted
        rows, columns = logits.shape
        out = logits.view(dtype)[:, :columns]  # a row of bfloat16 lies in the first half of its float32 row
        gradient_kernel[(rows,)](
            logits, out, target, log_total, entropy, grad_logp, grad_logp if grad_entropy is None else grad_entropy,
            logits.stride(0), out.stride(0), columns, inverse_temperature,
            WITH_ENTROPY=grad_entropy is not None, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return out
