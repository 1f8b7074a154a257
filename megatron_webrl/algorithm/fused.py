"""The output layer and the loss in one: logits exist for one chunk of response tokens at a time.

At a vocabulary of 151,936 the logits are the largest tensor of a run.  Here value and gradient of a chunk are computed
together, in the forward pass: three matrix products (logits, dH, dW), as in a plain backward pass, but one chunk of
logits instead of all.  Under tensor parallelism a chunk costs one all-gather of four floats a row.  docs/loss.md derives
the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_webrl.algorithm.rows import BANNED, Backend, Rows, Wanted, rows
from megatron_webrl.algorithm.surrogate import Surrogate, surrogate

Objective = Callable[[Tensor, Tensor, Tensor, Tensor], Surrogate]
"""`surrogate`, its options bound: (logp, prox_logp, behave_logp, advantages), each [C]."""
ReduceHiddenGrad = Literal["all_reduce", "reduce_scatter"]


class LossTerms(NamedTuple):
    """What the loss was made of, token by token, without autograd history."""

    logp: Tensor
    """log π_θ, float32 [N]."""
    entropy: Tensor
    """Of π_θ, nats, float32 [N]."""
    terms: Surrogate
    bad: Tensor
    """bool [N]: a logprob or advantage is NaN.  Such tokens are dropped if it is the behaviour's."""


def fused_linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    prox_logp: Tensor,
    behave_logp: Tensor,
    advantages: Tensor,
    *,
    denominator: float,
    objective: Objective = surrogate,
    entropy_coef: float = 0.0,
    at: Tensor | None = None,
    banned: Tensor | None = None,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    reduce_hidden_grad: ReduceHiddenGrad = "all_reduce",
    weight_grad: Tensor | None = None,
    chunk_rows: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, LossTerms]:
    """(Σ token_loss − entropy_coef · Σ H) / max(denominator, 1) and its gradient, without the logits.

    hidden [T, d], weight [V / ranks, d]: float32, or bfloat16 (products accumulate in float32); targets int64 [N]: ids in
    the whole vocabulary; prox_logp, behave_logp, advantages: floating [N], see `surrogate`.
    denominator: response tokens (or episodes) of the minibatch over all ranks, dropped ones included.
    objective: `surrogate` with its options bound; entropy_coef: weight of the entropy bonus.
    at: int64 [N], the rows of hidden that predict the targets, so that work is proportional to N; None: all T of them.
    banned: int64, columns of this rank's weight that are never sampled, padding of the vocabulary among them.
    group: the tensor-parallel ranks, in order of their slices; all must call, with equal arguments but weight and banned.
    reduce_hidden_grad: `all_reduce` where hidden is the same on all ranks of the group; `reduce_scatter` where it is
        sharded over them, T / ranks each (sequence parallelism): gathered here, `at` counts in the whole.
    weight_grad: float32 [V / ranks, d] to which the weight's gradient is added at once (Megatron's main_grad); autograd
        then sees zeros for it, and the loss must be differentiated with gradient 1.
    chunk_rows: of logits held at a time; None: 4,096 on CUDA, elsewhere what fits into 64 MB, 224 at least.

    Returns the loss, float32 and the same bits on every rank of the group, which can be differentiated once; and its
    terms.  Raises ValueError for shapes that do not fit, and for a back end that cannot run here.
    """
    hidden, reduce = _select(
        hidden, weight, at, group, reduce_hidden_grad, (targets, prox_logp, behave_logp, advantages)
    )
    if weight_grad is not None and (weight_grad.shape != weight.shape or weight_grad.dtype != torch.float32):
        raise ValueError(
            f"weight_grad is {weight_grad.dtype} {list(weight_grad.shape)}: give float32, shaped as weight"
        )
    if not torch.is_grad_enabled():  # a parameter still says that it requires a gradient
        hidden, weight = hidden.detach(), weight.detach()
    head = _Head(weight.shape[0], banned, 1.0 / temperature, group, rows(backend, weight.device), chunk_rows)
    loss, *parts = _FusedLoss.apply(
        hidden, weight, targets, prox_logp, behave_logp, advantages, objective, entropy_coef, 1.0 / max(denominator, 1),
        head, reduce, weight_grad,
    )  # fmt: skip
    logp, entropy, *terms = parts
    bad = logp.isnan() | prox_logp.isnan() | behave_logp.isnan() | advantages.isnan()
    return loss, LossTerms(logp, entropy, Surrogate(*terms), bad)


def linear_logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    at: Tensor | None = None,
    banned: Tensor | None = None,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    reduce_hidden_grad: ReduceHiddenGrad = "all_reduce",
    chunk_rows: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """log π(target) and the entropy of π, float32 [N] each, without the logits; arguments as `fused_linear_grpo_loss`.

    Differentiable in hidden and weight: the backward pass computes the logits of each chunk again (four matrix products).
    Under torch.no_grad only the forward pass is paid.  For proximal logprobs, supervised training, and losses over whole
    sequences.
    """
    hidden, reduce = _select(hidden, weight, at, group, reduce_hidden_grad, (targets,))
    head = _Head(weight.shape[0], banned, 1.0 / temperature, group, rows(backend, weight.device), chunk_rows)
    return _LogprobEntropy.apply(hidden, weight, targets, head, reduce)


def _select(
    hidden: Tensor,
    weight: Tensor,
    at: Tensor | None,
    group: dist.ProcessGroup | None,
    reduce: ReduceHiddenGrad,
    columns: tuple[Tensor, ...],
) -> tuple[Tensor, bool]:
    """The rows that predict targets, [N, d], and whether their gradient is still to be summed over the group."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} {list(hidden.shape)} and weight {weight.dtype} {list(weight.shape)}: give [T, d] "
            "and [V, d] of one dtype"
        )
    if hidden.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"hidden is {hidden.dtype}: give float32 or bfloat16")
    scattered = reduce == "reduce_scatter" and _size(group) > 1
    if scattered:
        hidden = _GatherRows.apply(hidden, group)
    if at is not None:
        hidden = hidden.index_select(0, at)
    for column in columns:
        if column.shape != hidden.shape[:1]:
            raise ValueError(
                f"{len(hidden)} rows of hidden predict targets, but a column of them is {list(column.shape)}"
            )
    return hidden, not scattered


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def _multipliable(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Products of bfloat16 that come out as float32 exist on CUDA only."""
    if hidden.is_cuda or hidden.dtype is torch.float32:
        return hidden, weight
    return hidden.float(), weight.float()


class _GatherRows(torch.autograd.Function):
    """Shards of rows [T / ranks, d] -> all of them; the gradient is summed and scattered back."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = torch.empty(shard.shape[0] * group.size(), shard.shape[1], dtype=shard.dtype, device=shard.device)
        dist.all_gather_single(whole, shard.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shard = torch.empty(grad.shape[0] // ctx.group.size(), grad.shape[1], dtype=grad.dtype, device=grad.device)
        dist.reduce_scatter_single(shard, grad.contiguous(), group=ctx.group)
        return shard, None


@dataclass(frozen=True)
class _Head:
    """This rank's slice of the output layer: chunks of logits, and what all ranks make of them."""

    columns: int
    banned: Tensor | None
    inverse_temperature: float
    group: dist.ProcessGroup | None
    rows: Rows
    chunk_rows: int | None

    def chunks(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Place, hidden [C, d], logits float32 [C, V] (in a buffer that the next chunk overwrites), targets as columns."""
        size = self.chunk_rows or (4096 if hidden.is_cuda else max(224, (16 << 20) // self.columns))
        first = 0 if self.group is None else self.group.rank() * self.columns
        buffer = torch.empty(min(size, len(hidden)), self.columns, dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), size):
            place = slice(start, start + size)
            h = hidden[place]
            logits = buffer[: len(h)]
            if h.dtype is torch.float32:
                torch.mm(h, weight.t(), out=logits)
            else:
                torch.mm(h, weight.t(), out_dtype=torch.float32, out=logits)
            if self.banned is not None:
                logits.index_fill_(1, self.banned, BANNED)
            yield place, h, logits, targets[place] - first

    def statistics(
        self, logits: Tensor, own: Tensor, *, spend: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """log π(target), entropy and log Σ e^z, each [C], over the whole vocabulary: the same bits on every rank.  And, where
        the logits may be `spend` and were, the maximum of this slice (`Wanted.spent`)."""
        spend = spend and self.rows.spends
        part = self.rows.statistics(logits, own, self.inverse_temperature, spend=spend)
        if _size(self.group) == 1:
            top, total, weighted, chosen = part
        else:
            everyone = torch.empty(_size(self.group), *part.shape, dtype=part.dtype, device=part.device)
            dist.all_gather(list(everyone.unbind(0)), part, group=self.group)
            tops, totals, weighteds, chosens = everyone.unbind(1)  # [ranks, C] each
            top = tops.amax(0)
            shift = tops - top
            share = shift.exp()
            total = (totals * share).sum(0)
            weighted = (share * (weighteds + shift * totals)).sum(0)
            chosen = chosens.sum(0)
        log_sum = total.log()
        return (chosen - top) - log_sum, log_sum - weighted / total, top + log_sum, part[0] if spend else None

    def gradients(
        self, hidden: Tensor, weight: Tensor, dlogits: Tensor, hidden_grad: Tensor | None, weight_grad: Tensor | None
    ) -> None:
        """Write the chunk's dH into `hidden_grad`, add its dW to `weight_grad`."""
        if hidden_grad is not None:
            torch.mm(dlogits, weight, out=hidden_grad)
        if weight_grad is None:
            return
        if hidden.dtype is torch.float32:
            weight_grad.addmm_(dlogits.t(), hidden)
        else:
            torch.addmm(weight_grad, dlogits.t(), hidden, out_dtype=torch.float32, out=weight_grad)

    def reduce(self, hidden_grad: Tensor | None) -> None:
        if hidden_grad is not None and _size(self.group) > 1 and hidden_grad.shape[0]:
            dist.all_reduce(hidden_grad, group=self.group)


class _FusedLoss(torch.autograd.Function):
    """Gradient in the forward pass; the backward pass hands it out."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        prox_logp: Tensor,
        behave_logp: Tensor,
        advantages: Tensor,
        objective: Objective,
        entropy_coef: float,
        scale: float,
        head: _Head,
        reduce: bool,
        main_grad: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.hidden_dtype, ctx.weight = hidden.dtype, weight
        hidden, weight = _multipliable(hidden, weight)
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = torch.zeros_like(weight, dtype=torch.float32) if main_grad is None else main_grad
        none = torch.zeros(0, device=hidden.device)
        parts: list[tuple[Tensor, ...]] = [(none, none, *objective(none, none, none, none))]
        for place, h, logits, own in head.chunks(hidden, weight, targets):
            logp, entropy, log_total, spent = head.statistics(logits, own, spend=not entropy_coef)
            terms = objective(logp, prox_logp[place], behave_logp[place], advantages[place])
            parts.append((logp, entropy, *terms))
            if hidden_grad is None and weight_grad is None:
                continue
            grad_entropy = torch.full_like(entropy, -entropy_coef * scale) if entropy_coef else None
            wanted = Wanted(log_total, entropy, terms.grad_logp.float() * scale, grad_entropy, spent)
            dlogits = head.rows.gradient_(logits, own, head.inverse_temperature, wanted, hidden.dtype)
            head.gradients(h, weight, dlogits, None if hidden_grad is None else hidden_grad[place], weight_grad)
        if reduce:
            head.reduce(hidden_grad)
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        loss = (columns[2].double().sum() - entropy_coef * columns[1].double().sum()) * scale
        ctx.mark_non_differentiable(*columns)
        ctx.added = main_grad is not None and weight_grad is main_grad
        ctx.grads = (hidden_grad, None if ctx.added else weight_grad)
        return (loss.float(), *columns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "the fused loss can be differentiated once: its gradient was computed in the forward pass"
            )
        (hidden_grad, weight_grad), ctx.grads = ctx.grads, None
        if ctx.added:
            torch._assert_async(grad == 1)  # the weight's gradient was added with that
            weight_grad = ctx.weight.new_zeros(()).expand_as(ctx.weight)
        elif weight_grad is not None:
            weight_grad = weight_grad.mul_(grad).to(ctx.weight.dtype)
        if hidden_grad is not None:
            hidden_grad = hidden_grad.mul_(grad).to(ctx.hidden_dtype)
        return (hidden_grad, weight_grad, *[None] * 10)


class _LogprobEntropy(torch.autograd.Function):
    """Gradient by computing the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: _Head, reduce: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.dtypes = hidden.dtype, weight.dtype
        hidden, weight = _multipliable(hidden, weight)
        none = torch.zeros(0, device=hidden.device)
        parts = [(none, none, none)]
        for _, _, logits, own in head.chunks(hidden, weight, targets):
            parts.append(head.statistics(logits, own)[:3])
        logp, entropy, log_total = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, entropy, log_total)
        ctx.head, ctx.reduce = head, reduce
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy, log_total = ctx.saved_tensors
        head: _Head = ctx.head
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        # The gradient of a sum is one number, expanded: kernels want one a row.
        grad_logp = torch.zeros_like(entropy) if grad_logp is None else grad_logp.contiguous()
        grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
        for place, h, logits, own in head.chunks(hidden, weight, targets):
            grad_h = None if grad_entropy is None else grad_entropy[place]
            wanted = Wanted(log_total[place], entropy[place], grad_logp[place], grad_h)
            dlogits = head.rows.gradient_(logits, own, head.inverse_temperature, wanted, hidden.dtype)
            head.gradients(h, weight, dlogits, None if hidden_grad is None else hidden_grad[place], weight_grad)
        if ctx.reduce:
            head.reduce(hidden_grad)
        return (
            None if hidden_grad is None else hidden_grad.to(ctx.dtypes[0]),
            None if weight_grad is None else weight_grad.to(ctx.dtypes[1]),
            None,
            None,
            None,
        )
