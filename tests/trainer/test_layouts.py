"""Layout invariance: loss and gradients do not depend on TP, PP, SP, DP or the distributed optimizer."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import exported, load_weights
from megatron.core.distributed import DistributedDataParallelConfig
from naive_loss import naive_logprob_entropy
from on_ranks import free_port, free_ports, on_ranks
from ranks import Recorded, run_config
from safetensors.torch import load_file

from megatron_webrl.algorithm import LossTerms, surrogate
from megatron_webrl.errors import UserError
from megatron_webrl.trainer import PolicyTrainer, policy, rows_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-pp2-sp": {"tp": 2, "pp": 2, "sequence_parallel": True, "distributed_optimizer": True},
    "tp2-dp2": {"tp": 2, "dp": 2, "overlap_grad_reduce": True},
    "pp2-dp2": {"pp": 2, "dp": 2, "distributed_optimizer": True, "overlap_grad_reduce": True},
    "dp4": {"dp": 4, "distributed_optimizer": True},
}
"""Three groups in minibatches of two and one: with four shards, some have nothing to do in an update."""
GROUPS = [10, 11, 12]


class FullLogits(PolicyTrainer):
    """With the plain output layer: all logits at once, and autograd through them.  For one rank."""

    def logprob_entropy(self, output: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        banned = torch.from_numpy(np.flatnonzero(self.banned))
        return naive_logprob_entropy(output.hidden[output.at], output.weight, targets, banned=banned)

    def grpo_loss(
        self, output: Any, targets: torch.Tensor, prox: torch.Tensor, behave: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, LossTerms]:
        logp, entropy = self.logprob_entropy(output, targets)
        terms = surrogate(logp.detach(), prox, behave, advantages)
        coefficient = self.config.algorithm.entropy_coef
        loss = (logp * terms.grad_logp).sum() - coefficient * entropy.sum()
        return loss, LossTerms(logp.detach(), entropy.detach(), terms, logp.isnan())


def steps_in(
    model: Path, parallel: dict[str, Any], place: dict[str, Any], out: Path, kind: type[PolicyTrainer] = PolicyTrainer
) -> dict[str, Any]:
    """Export, logprobs, two steps, a checkpoint between them."""
    config = run_config(
        model, trainer={"parallel": parallel, "max_tokens_per_microbatch": 500}, algorithm={"entropy_coef": 0.01}
    )
    trainer = kind(config, **place, total_steps=10)
    recorded = Recorded(trainer.processor, groups=3, size=2)
    initial, original = exported(trainer), load_file(model / "model.safetensors")
    same = initial.keys() == original.keys() and all(torch.equal(t, original[name]) for name, t in initial.items())
    rows = [row for g in recorded.groups.values() for t in g.trajectories for row in rows_of(t, 1.0)]
    logprobs = trainer.logprobs(rows, recorded.fetch_images)
    recorded.fetched.clear()
    metrics = [trainer.train_step(GROUPS, recorded.fetch_groups, recorded.fetch_images, version=3).metrics]
    fetched = list(recorded.fetched)
    trainer.save(out / "checkpoint", {"step": 1})
    metrics.append(trainer.train_step(GROUPS, recorded.fetch_groups, recorded.fetch_images, version=3).metrics)
    trainer.save_hf(out / "hf")
    leads = trainer.layout.leads
    trainer.close()
    return {"same": same, "logprobs": logprobs, "metrics": metrics, "fetched": fetched, "leads": leads}


def small_buckets(*args: Any, **options: Any) -> DistributedDataParallelConfig:
    """Several buckets in a tiny model too: with overlap their order must be the same on ranks with and without images."""
    return DistributedDataParallelConfig(*args, **options, bucket_size=20_000)


def all_layouts(rank: int, ranks: int, model: Path, ports: list[int], out: Path) -> list[dict[str, Any]]:
    """Runs in each of four processes, one layout after the other."""
    place = {"rank": rank, "world_size": ranks, "master_address": "127.0.0.1"}
    policy.DistributedDataParallelConfig = small_buckets  # type: ignore[assignment,misc]
    return [
        steps_in(model, parallel, {**place, "master_port": port}, out / name)
        for (name, parallel), port in zip(LAYOUTS.items(), ports, strict=True)
    ]


def compare(got: dict[str, float], want: dict[str, float]) -> None:
    for name, value in want.items():
        if not name.startswith("time/"):
            assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_layouts_agree(deep_model_dir: Path, tmp_path: Path) -> None:
    """Against one rank with the plain output layer, for one rank with the fused one and for every layout: the export is
    the directory's weights bit by bit before training, equal logprobs on every rank, equal metrics (loss and gradient norm
    among them, to 1e-5) of two steps with four updates each, and equal weights after them.  Only leads fetch.  A
    checkpoint of one layout goes on in another."""
    alone = {"rank": 0, "world_size": 1, "master_address": "127.0.0.1"}
    reference = steps_in(deep_model_dir, {}, {**alone, "master_port": free_port()}, tmp_path / "one", FullLogits)
    assert reference["same"]
    fused = steps_in(deep_model_dir, {}, {**alone, "master_port": free_port()}, tmp_path / "fused")
    for got, want in zip(fused["metrics"], reference["metrics"], strict=True):
        compare(got, want)
    weights = load_weights(tmp_path / "one" / "hf")
    results = on_ranks(
        all_layouts, 4, deep_model_dir, free_ports(len(LAYOUTS)), tmp_path, preload="megatron_webrl.trainer"
    )
    for layout, name in enumerate(LAYOUTS):
        assert results[0][layout]["same"], name
        for rank in range(4):
            result = results[rank][layout]
            for got, want in zip(result["metrics"], reference["metrics"], strict=True):
                compare(got, want)
            for got, want in zip(result["logprobs"], reference["logprobs"], strict=True):
                np.testing.assert_allclose(got, want, atol=2e-5)
            assert bool(result["fetched"]) <= result["leads"]
        assert set(chain(*(r[layout]["fetched"] for r in results))) == set(GROUPS)
        trained = load_weights(tmp_path / name / "hf")
        assert trained.keys() == weights.keys()
        for key, tensor in trained.items():
            torch.testing.assert_close(tensor, weights[key], rtol=0, atol=2e-4, msg=lambda text, k=key: f"{k}: {text}")

    for name in ("tp2-pp2-sp", "tp2-dp2"):
        other = {"distributed_optimizer": LAYOUTS[name].get("distributed_optimizer", False)}
        config = run_config(deep_model_dir, trainer={"parallel": other}, algorithm={"entropy_coef": 0.01})
        trainer = PolicyTrainer(config, **alone, master_port=free_port(), total_steps=10)
        try:
            recorded = Recorded(trainer.processor, groups=3, size=2)
            with pytest.raises(UserError, match="distributed_optimizer"):
                trainer.load(tmp_path / {"tp2-pp2-sp": "tp2-dp2", "tp2-dp2": "dp4"}[name] / "checkpoint")
            assert trainer.load(tmp_path / name / "checkpoint") == {"step": 1}
            again = trainer.train_step(GROUPS, recorded.fetch_groups, recorded.fetch_images, version=3)
            compare(again.metrics, reference["metrics"][1])
        finally:
            trainer.close()


def in_a_virtual_pipeline(rank: int, ranks: int, model: Path, port: int, out: Path) -> dict[str, Any]:
    place = {"rank": rank, "world_size": ranks, "master_address": "127.0.0.1", "master_port": port}
    return steps_in(model, {"pp": 2, "vp": 2, "distributed_optimizer": True}, place, out)


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_virtual_pipeline_agrees(long_model_dir: Path, tmp_path: Path) -> None:
    """Two stages of two chunks against one rank: logprobs, metrics of two steps, weights; and its checkpoint goes on in one
    rank."""
    alone = {"rank": 0, "world_size": 1, "master_address": "127.0.0.1"}
    sharded = {"distributed_optimizer": True}
    reference = steps_in(long_model_dir, sharded, {**alone, "master_port": free_port()}, tmp_path / "one")
    results = on_ranks(
        in_a_virtual_pipeline, 2, long_model_dir, free_port(), tmp_path / "vp", preload="megatron_webrl.trainer"
    )
    assert results[0]["same"]
    for result in results:
        for got, want in zip(result["metrics"], reference["metrics"], strict=True):
            compare(got, want)
        for got, want in zip(result["logprobs"], reference["logprobs"], strict=True):
            np.testing.assert_allclose(got, want, atol=2e-5)
    config = run_config(long_model_dir, trainer={"parallel": sharded}, algorithm={"entropy_coef": 0.01})
    trainer = PolicyTrainer(config, **alone, master_port=free_port(), total_steps=10)
    try:
        recorded = Recorded(trainer.processor, groups=3, size=2)
        assert trainer.load(tmp_path / "vp" / "checkpoint") == {"step": 1}
        again = trainer.train_step(GROUPS, recorded.fetch_groups, recorded.fetch_images, version=3)
        compare(again.metrics, reference["metrics"][1])
    finally:
        trainer.close()
