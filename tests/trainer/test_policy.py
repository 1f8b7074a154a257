"""One rank: the model against transformers, and what a trainer promises."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import exported
from ranks import Recorded, run_config

from megatron_webrl.errors import UserError
from megatron_webrl.trainer import PolicyTrainer, rows_of

Make = Callable[..., PolicyTrainer]


def rows(recorded: Recorded) -> list:
    return [row for g in recorded.groups.values() for t in g.trajectories for row in rows_of(t, 1.0)]


def test_micro_batches_do_not_matter(deep_model_dir: Path, make: Make) -> None:
    """Two train steps, four updates each: one row a micro-batch or all in one, packed or padded, groups in another order
    of rows: the same losses to 1e-6, everything else to 1e-5."""
    results = []
    for budget, packing, backwards in (
        (300, True, False),
        (1, True, False),
        (100_000, False, False),
        (300, True, True),
    ):
        trainer = make(deep_model_dir, trainer={"max_tokens_per_microbatch": budget, "packing": packing})
        recorded = Recorded(trainer.processor, groups=3, size=2)
        if backwards:
            for group in recorded.groups.values():
                group.trajectories.reverse()
        steps = [
            trainer.train_step([10, 11, 12], recorded.fetch_groups, recorded.fetch_images, version=3) for _ in "ab"
        ]
        results.append([step.metrics for step in steps])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            for name, value in want.items():
                if not name.startswith("time/"):
                    near = 1e-6 if "loss" in name else 1e-5
                    assert got[name] == pytest.approx(value, rel=near, abs=1e-6), name


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_activations_does_not_matter(
    deep_model_dir: Path, make: Make, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same losses and gradient norms, deepstack features included, and it does recompute."""
    from megatron.core.tensor_parallel.random import CheckpointFunction

    forward, calls = CheckpointFunction.forward, [0]

    def counting(*arguments: Any) -> Any:
        calls[-1] += 1
        return forward(*arguments)

    monkeypatch.setattr(CheckpointFunction, "forward", staticmethod(counting))
    results = []
    for mode in ("none", recompute):
        trainer = make(deep_model_dir, trainer={"recompute": mode})
        recorded = Recorded(trainer.processor, groups=2, size=2)
        results.append(trainer.train_step([10, 11], recorded.fetch_groups, recorded.fetch_images, version=3).metrics)
        calls.append(0)
    assert calls[0] == 0 and calls[1] > 0
    for name, value in results[0].items():
        if not name.startswith("time/"):
            assert results[1][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_bfloat16_is_near_float32(deep_model_dir: Path, make: Make) -> None:
    """Logprobs differ by 0.02 on average at most (invariant 7), losses and gradient norms by some per cent; gradients are
    accumulated in float32, and the weights move."""
    logprobs, metrics = [], []
    for dtype in ("float32", "bfloat16"):
        trainer = make(deep_model_dir, trainer={"dtype": dtype}, algorithm={"epochs": 1, "minibatches": 1})
        recorded = Recorded(trainer.processor, groups=2)
        logprobs.append(np.concatenate(trainer.logprobs(rows(recorded), recorded.fetch_images)))
        report = trainer.train_step([10, 11], recorded.fetch_groups, recorded.fetch_images, version=3)
        assert report.applied_updates == 1
        metrics.append(report.metrics)
        assert all(p.main_grad.dtype is torch.float32 for p in trainer.parameters())
    assert np.abs(logprobs[0] - logprobs[1]).mean() <= 0.02
    for name in ("ppo_actor/grad_norm", "ppo_actor/entropy"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=0.05), name


def test_step_zero_identity_and_metrics(deep_model_dir: Path, make: Make) -> None:
    """Behaviour logprobs taken from the trainer itself: no difference, ratio 1, KL 0 in the first update."""
    from megatron_webrl.trajectory import FLOAT32, decode_steps, encode_steps, pack

    trainer = make(deep_model_dir, algorithm={"epochs": 1, "minibatches": 1})
    recorded = Recorded(trainer.processor, groups=2)
    logprobs = iter(trainer.logprobs(rows(recorded), recorded.fetch_images))
    for trajectory in (t for group in recorded.groups.values() for t in group.trajectories):
        steps = decode_steps(trajectory.payload)
        for step in steps:
            step.logprobs = pack(next(logprobs), FLOAT32)
        trajectory.payload = encode_steps(steps)
    report = trainer.train_step([10, 11], recorded.fetch_groups, recorded.fetch_images, version=3)
    metrics = report.metrics
    assert report.applied_updates == 1
    assert metrics["engine/logprob_diff_max"] < 1e-5
    assert metrics["engine/logprob_tokens"] == sum(
        t.response_tokens for g in recorded.groups.values() for t in g.trajectories
    )
    for name in ("approx_kl_abs/avg", "behave_approx_kl_abs/avg", "clip_ratio", "dual_clip_ratio"):
        assert metrics[f"ppo_actor/update/{name}"] < 1e-5
    assert metrics["ppo_actor/update/actor_loss/avg"] == pytest.approx(-metrics["ppo_actor/advantages/avg"], abs=1e-6)
    rewards = [t.reward for g in recorded.groups.values() for t in g.trajectories]
    assert metrics["rollout/reward"] == pytest.approx(np.mean(rewards))
    other = trainer.train_step([10, 11], recorded.fetch_groups, recorded.fetch_images, version=4).metrics
    assert other["engine/logprob_tokens"] == 0  # none of them was sampled by version 4


def test_group_constant_divides_by_episodes(deep_model_dir: Path, make: Make) -> None:
    """The same summed loss, divided by the minibatch's episodes instead of its response tokens; gradient norms likewise."""
    one_update = {"epochs": 1, "minibatches": 1}
    found = {}
    for normalizer in ("token_mean", "group_constant"):
        trainer = make(deep_model_dir, algorithm={**one_update, "normalizer": normalizer})
        recorded = Recorded(trainer.processor, groups=2)
        found[normalizer] = trainer.train_step(
            [10, 11], recorded.fetch_groups, recorded.fetch_images, version=3
        ).metrics
    tokens = sum(t.response_tokens for g in recorded.groups.values() for t in g.trajectories)
    episodes = sum(len(g.trajectories) for g in recorded.groups.values())
    for name in ("update/actor_loss/avg", "grad_norm"):
        mean, constant = (found[n][f"ppo_actor/{name}"] for n in ("token_mean", "group_constant"))
        assert constant == pytest.approx(mean * tokens / episodes, rel=1e-4), name
    assert found["token_mean"]["ppo_actor/update/clip_ratio"] == found["group_constant"]["ppo_actor/update/clip_ratio"]


def test_raft_trains_on_successes_only(deep_model_dir: Path, make: Make) -> None:
    """The same step as from the successes alone; a minibatch without any changes nothing and is no update."""
    raft = {"objective": "raft++", "constant_horizon": None, "epochs": 1, "minibatches": 1}
    found = []
    for only_successes in (False, True):
        trainer = make(deep_model_dir, algorithm=raft, replay={"dynamic_sampling": False})
        recorded = Recorded(trainer.processor, groups=2)
        if only_successes:
            for group in recorded.groups.values():
                group.trajectories = [t for t in group.trajectories if t.reward > 0]
        found.append(trainer.train_step([10, 11], recorded.fetch_groups, recorded.fetch_images, version=3).metrics)
    mixed, successes = found
    for name in ("ppo_actor/update/actor_loss/avg", "ppo_actor/grad_norm", "rollout/response_tokens"):
        assert mixed[name] == pytest.approx(successes[name], rel=1e-5), name
    assert mixed["rollout/reward"] < successes["rollout/reward"] == 1
    weights = exported(trainer)
    for group in recorded.groups.values():
        for trajectory in group.trajectories:
            trajectory.reward = 0.0
    report = trainer.train_step([10, 11], recorded.fetch_groups, recorded.fetch_images, version=3)
    assert report.applied_updates == 0
    assert all(torch.equal(weights[name], tensor) for name, tensor in exported(trainer).items())


def test_a_gradient_that_is_not_finite_changes_nothing(deep_model_dir: Path, make: Make) -> None:
    """The update is skipped and counted; the weights stay as they are, and training goes on."""
    trainer = make(deep_model_dir)
    recorded = Recorded(trainer.processor, groups=2)
    before = exported(trainer)
    samples = [trainer.prepare(row) for row in rows(recorded)]
    trainer.load_images(samples, recorded.fetch_images)

    def broken(output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logp, _ = trainer.logprob_entropy(output, batch.targets)
        return logp.sum() * float("nan"), torch.zeros(1, dtype=torch.float64)

    assert not trainer.update(samples, broken, reported=1).applied
    assert all(torch.equal(before[name], tensor) for name, tensor in exported(trainer).items())
    assert trainer.sft_step(rows(recorded), recorded.fetch_images)["sft/skipped_updates"] == 0
    with torch.no_grad():
        trainer.chunks[0].language_model.decoder.final_layernorm.weight[0] = float("nan")
    report = trainer.train_step([10, 11], recorded.fetch_groups, recorded.fetch_images, version=3)
    assert report.applied_updates == 0
    assert report.metrics["ppo_actor/skipped_updates"] == 4
    assert report.metrics["engine/logprob_diff_max"] == float("inf")


def test_saved_directory_is_complete(deep_model_dir: Path, make: Make, tmp_path: Path) -> None:
    """transformers and our own processor load it, and it holds the trained weights."""
    from transformers import Qwen3VLForConditionalGeneration

    from megatron_webrl.config import check_files

    trainer = make(deep_model_dir)
    recorded = Recorded(trainer.processor, groups=2)
    trainer.sft_step(rows(recorded), recorded.fetch_images)
    trainer.save_hf(tmp_path / "out" / "model")
    trainer.save_hf(tmp_path / "out" / "model")  # in place of the first
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model"]
    state = Qwen3VLForConditionalGeneration.from_pretrained(
        tmp_path / "out" / "model", dtype=torch.float32
    ).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in exported(trainer).items())
    check_files(run_config(tmp_path / "out" / "model"))


def test_supervised_steps_learn(deep_model_dir: Path, make: Make) -> None:
    """The cross entropy of a few demonstrations falls."""
    trainer = make(deep_model_dir, trainer={"optimizer": {"lr": 3e-3}})
    recorded = Recorded(trainer.processor, groups=1, size=3, steps=1)
    losses = [trainer.sft_step(rows(recorded), recorded.fetch_images)["sft/loss"] for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]


def test_wrong_input_is_told(deep_model_dir: Path, tmp_path: Path, make: Make) -> None:
    """Ranks that do not fit the layout, a truncated weight file, a weight that is missing."""
    with pytest.raises(UserError, match=r"trainer\.parallel"):
        make(deep_model_dir, trainer={"parallel": {"tp": 2}})
    with pytest.raises(UserError, match=r"first_stage_layers=1 leaves|leaves 1 decoder layers on|deepstack features"):
        make(deep_model_dir, trainer={"parallel": {"pp": 2, "first_stage_layers": 1}})
    broken = shutil.copytree(deep_model_dir, tmp_path / "broken")
    file = next(broken.glob("*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        make(broken)
    from safetensors.torch import load_file, save_file

    weights = load_file(deep_model_dir / file.name)
    weights.pop("model.language_model.norm.weight")
    save_file(weights, file)
    with pytest.raises(UserError, match=r"lack model\.language_model\.norm\.weight"):
        make(broken)
