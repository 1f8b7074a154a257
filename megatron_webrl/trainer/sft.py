"""Supervised warm start: cross entropy of demonstrated responses under the policy that is sampled later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megatron_webrl.trainer.batch import MicroBatch, Row

if TYPE_CHECKING:
    from megatron_webrl.trainer.model import OutputLayer
    from megatron_webrl.trainer.policy import FetchImages, PolicyTrainer


def sft_step(trainer: PolicyTrainer, rows: list[Row], fetch_images: FetchImages) -> dict[str, float]:
    """One update on the mean over all response tokens of −log π; `rows` are the same on every rank.

    Returns `sft/loss`, `sft/grad_norm` (before clipping), `sft/lr`, `sft/tokens`, `sft/skipped_updates` (1 if the
    gradient was not finite).
    """
    lr = trainer.advance_lr()
    samples = [trainer.prepare(row) for row in rows[trainer.layout.dp_rank :: trainer.layout.dp]]
    trainer.load_images(samples, fetch_images)

    def cross_entropy(output: OutputLayer, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        logp, _ = trainer.logprob_entropy(output, batch.targets)
        return -logp.sum(), -logp.detach().double().sum()[None]

    update = trainer.update(samples, cross_entropy, reported=1)
    return {
        "sft/loss": float(update.sums[0]) / max(1, update.denominator),
        "sft/grad_norm": update.grad_norm,
        "sft/lr": lr,
        "sft/tokens": float(update.denominator),
        "sft/skipped_updates": float(not update.applied),
    }
