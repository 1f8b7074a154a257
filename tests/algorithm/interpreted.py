"""Run by test_triton.py with TRITON_INTERPRET=1: the Triton row kernels against torch's, in Triton's interpreter."""

from __future__ import annotations

import torch

from megatron_webrl.algorithm import fused_linear_grpo_loss, linear_logprob_entropy
from megatron_webrl.algorithm.rows import BANNED, TorchRows, Wanted
from megatron_webrl.algorithm.triton_rows import BLOCK, TritonRows


def close(got: torch.Tensor, want: torch.Tensor, relative: float = 1e-5) -> None:
    assert got.isfinite().all()
    assert (got.double() - want.double()).norm() <= relative * want.double().norm() + 1e-7


def kernels(columns: int) -> None:
    """Rows of one block, of several and of a part of one; banned columns, far from zero, all equal, target elsewhere."""
    torch.manual_seed(0)
    logits = torch.randn(7, columns) * 8
    logits[2, : columns // 2] = BANNED
    logits[3] -= 300.0
    logits[4] = 0.0
    target = torch.randint(0, columns, (7,))
    target[2], target[5], target[6] = columns - 1, -3, columns
    got, want = (rows.statistics(logits, target, 1 / 1.3) for rows in (TritonRows(), TorchRows()))
    for one, other in zip(got, want, strict=True):
        close(one, other)
    log_total = want[0] + want[1].log()
    entropy = want[1].log() - want[2] / want[1]
    grad_logp, grad_entropy = torch.randn(7), torch.randn(7)
    for with_entropy in (None, grad_entropy):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-3)):
            got, want_grad = (
                rows.gradient_(
                    logits.clone(), target, 1 / 1.3, Wanted(log_total, entropy, grad_logp, with_entropy), dtype
                )
                for rows in (TritonRows(), TorchRows())
            )
            assert got.dtype is dtype and got.shape == logits.shape
            close(got, want_grad, tolerance)


def whole() -> None:
    """The fused loss and the differentiable logprobs with either back end."""
    torch.manual_seed(1)
    n, d, vocab = 9, 8, 40
    columns = [torch.randint(0, vocab, (n,)), -3 + torch.rand(n), -3 + torch.rand(n), torch.randn(n)]
    results = []
    for backend in ("triton", "torch"):
        torch.manual_seed(2)
        hidden, weight = torch.randn(n, d, requires_grad=True), torch.randn(vocab, d, requires_grad=True)
        loss, terms = fused_linear_grpo_loss(
            hidden, weight, *columns, denominator=n, entropy_coef=0.1, chunk_rows=4, backend=backend
        )
        logp, entropy = linear_logprob_entropy(hidden, weight, columns[0], chunk_rows=4, backend=backend)
        (loss + logp.sum() + entropy.sum()).backward()  # expanded gradients
        results.append([loss.detach(), terms.logp, terms.entropy, logp.detach(), hidden.grad, weight.grad])
    for got, want in zip(*results, strict=True):
        close(got, want)


for columns in (5, BLOCK, 2 * BLOCK + 77):
    kernels(columns)
whole()
print("interpreted kernels agree")
