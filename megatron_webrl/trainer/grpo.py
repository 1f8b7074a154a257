"""A train step of GRPO as in AsyncWebRL (arXiv:2606.05597): proximal logprobs, then epochs × minibatches updates."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatron_webrl.algorithm import normalize_group_rewards, raft_advantage, step_advantage
from megatron_webrl.config import AlgorithmConfig
from megatron_webrl.replay import Lineage
from megatron_webrl.trainer.batch import MicroBatch, Row, Sample, rows_of
from megatron_webrl.trainer.schedule import minibatch_order, share_out
from megatron_webrl.trajectory import Group

if TYPE_CHECKING:
    from megatron_webrl.trainer.model import OutputLayer
    from megatron_webrl.trainer.policy import FetchGroups, FetchImages, PolicyTrainer, Update

_UPDATE_SUMS = ("tokens", "loss", "kl", "behave_kl", "clipped", "dual_clipped", "dropped")
_STEP_SUMS = (
    "trajectories", "reward", "successes", "success_steps", "failure_steps", "rows", "tokens", "row_advantage",
    "token_advantage", "entropy", "bad_behave", "current", "current_diff",
)  # fmt: skip


@dataclass(frozen=True)
class StepReport:
    """What a train step did."""

    applied_updates: int
    """Optimizer updates that changed the weights; 0 yields no new version."""
    metrics: dict[str, float]
    """The same on every rank."""


def train_step(
    trainer: PolicyTrainer,
    group_ids: list[int],
    fetch_groups: FetchGroups,
    fetch_images: FetchImages,
    *,
    version: int,
    costs: Sequence[int] | None = None,
    lineage: Lineage | None = None,
) -> StepReport:
    """Train on whole groups; `group_ids`, `version` (that of the trainer's weights), `costs` (tokens of each group;
    None: all alike) and `lineage` (None: version = position) are the same on every rank.

    Only the lead of each data-parallel shard fetches: the groups that its shard meets, and their images.  Minibatches
    are cut anew each epoch; each is shared out over the shards by cost.  Raises what the fetchers raise, KeyError for a
    group that was not delivered, ValueError for a malformed row.
    """
    settings, layout = trainer.config.algorithm, trainer.layout
    started = time.perf_counter()
    lr = trainer.advance_lr()
    updates = minibatch_order(
        len(group_ids), epochs=settings.epochs, minibatches=settings.minibatches, generator=trainer.generator
    )
    weights = [1] * len(group_ids) if costs is None else costs
    first = share_out(range(len(group_ids)), weights, layout.dp)
    homes = {position: shard for shard, share in enumerate(first) for position in share}
    own_first = first[layout.dp_rank]
    own_updates = [share_out(update, weights, layout.dp, homes)[layout.dp_rank] for update in updates]
    needed = sorted({position for share in (own_first, *own_updates) for position in share})
    fetched = fetch_groups([group_ids[p] for p in needed]) if layout.leads and needed else []
    groups = dict(zip(needed, _in_order(layout.to_shard(fetched), [group_ids[p] for p in needed]), strict=True))
    samples = {p: [trainer.prepare(row) for row in group_rows(group, settings)] for p, group in groups.items()}
    trainer.load_images([s for part in samples.values() for s in part], fetch_images)
    fetched_at = time.perf_counter()

    mine = [s for p in own_first for s in samples[p]]
    forward = trainer.forward(mine)
    lineage = lineage or Lineage()
    sums, largest, lags = _step_sums(
        [groups[p] for p in own_first], mine, forward, version, lineage, reports=layout.reports
    )
    keys = [(p, i) for p in own_first for i in range(len(samples[p]))]
    known = {key: logp for key, (logp, _) in zip(keys, forward, strict=True)} if layout.reports else {}
    proximal: dict[tuple[int, int], np.ndarray] = {}
    gathered = layout.gather((known, largest, lags))
    for part, _, _ in gathered:
        proximal.update(part)
    largest = max(value for _, value, _ in gathered)
    lags = sum((part for _, _, part in gathered), Counter())
    prox_at = time.perf_counter()

    count = NORMALIZERS[settings.normalizer]
    done: list[Update] = []
    for share in own_updates:
        batch = [s for p in share for s in samples[p]]
        prox = [proximal[p, i] for p in share for i in range(len(samples[p]))]
        loss = _loss(trainer, batch, prox)
        done.append(trainer.update(batch, loss, reported=len(_UPDATE_SUMS), count=count))
    finished = time.perf_counter()

    metrics = _step_metrics(dict(zip(_STEP_SUMS, layout.sum(sums).tolist(), strict=True)), largest, lags)
    metrics |= _update_metrics(done)
    metrics |= {
        "ppo_actor/lr": lr,
        "time/data_s": fetched_at - started,
        "time/prox_s": prox_at - fetched_at,
        "time/update_s": finished - prox_at,
    }
    return StepReport(applied_updates=sum(update.applied for update in done), metrics=metrics)


NORMALIZERS: dict[str, Callable[[Sample], int]] = {
    "token_mean": lambda sample: sample.tokens,
    "group_constant": lambda sample: int(sample.row.begins),
}
"""What a sample counts in the loss's denominator.  token_mean: Σ w·pg / response tokens, dropped ones included, as
AsyncWebRL's code; group_constant: Σ w·pg / episodes, as its paper's 1/(G·k) ΣΣΣ (1/k is in the advantage)."""


def group_rows(group: Group, settings: AlgorithmConfig) -> list[Row]:
    """The rows of a group's trajectories with their advantages, in order; under RAFT++ those of successes only."""
    if settings.objective == "raft++":
        raft = [(t, raft_advantage(t.reward, t.num_steps)) for t in group.trajectories]
        return [
            row for trajectory, advantage in raft if advantage is not None for row in rows_of(trajectory, advantage)
        ]
    normalized = normalize_group_rewards([t.reward for t in group.trajectories], unbiased_std=settings.unbiased_std)
    return [
        row
        for trajectory, value in zip(group.trajectories, normalized, strict=True)
        for row in rows_of(trajectory, step_advantage(value, trajectory.num_steps, settings.constant_horizon))
    ]


def _in_order(groups: list[Group], ids: list[int]) -> list[Group]:
    found = {group.group_id: group for group in groups}
    if missing := [i for i in ids if i not in found]:
        raise KeyError(f"groups {missing} of the manifest were not delivered")
    return [found[i] for i in ids]


def _loss(
    trainer: PolicyTrainer, samples: list[Sample], proximal: list[np.ndarray]
) -> Callable[[OutputLayer, MicroBatch], tuple[Tensor, Tensor]]:
    def loss(output: OutputLayer, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        none = np.zeros(0, np.float32)
        rows = [samples[i].row for i in batch.index]
        columns = (
            [none, *(proximal[i] for i in batch.index)],
            [none, *(row.behave_logprobs for row in rows)],
            [none, *(np.full(len(row.response_ids), row.advantage, np.float32) for row in rows)],
        )
        prox, behave, advantages = (torch.from_numpy(np.concatenate(c)).to(batch.targets.device) for c in columns)
        value, (logp, _, terms, _) = trainer.grpo_loss(output, batch.targets, prox, behave, advantages)
        parts = (
            torch.ones_like(logp),
            terms.token_loss,
            (logp - prox).abs(),
            torch.where(behave.isfinite(), (logp - behave).abs(), 0.0),
            terms.clipped,
            terms.dual_clipped,
            terms.dropped,
        )
        return value, torch.stack([part.double().sum() for part in parts])

    return loss


def _step_sums(
    groups: list[Group],
    samples: list[Sample],
    forward: list[tuple[np.ndarray, np.ndarray]],
    version: int,
    lineage: Lineage,
    *,
    reports: bool,
) -> tuple[Tensor, float, Counter[int]]:
    """Sums over this shard in order of _STEP_SUMS, float64, zeros on ranks that do not report; the largest
    |engine − proximal| logprob among tokens sampled at `version`; and tokens by their lag."""
    sums = dict.fromkeys(_STEP_SUMS, 0.0)
    largest, lags = 0.0, Counter[int]()
    if not reports:
        return torch.zeros(len(sums), dtype=torch.float64), largest, lags
    for trajectory in (t for group in groups for t in group.trajectories):
        success = trajectory.reward > 0
        sums["trajectories"] += 1
        sums["reward"] += trajectory.reward
        sums["successes"] += success
        sums["success_steps" if success else "failure_steps"] += trajectory.num_steps
    for sample, (logp, entropy) in zip(samples, forward, strict=True):
        row = sample.row
        sums["rows"] += 1
        sums["tokens"] += sample.tokens
        sums["row_advantage"] += row.advantage
        sums["token_advantage"] += row.advantage * sample.tokens
        sums["entropy"] += float(entropy.sum())
        sums["bad_behave"] += int((~np.isfinite(row.behave_logprobs)).sum())
        gap = np.abs(row.behave_logprobs - logp)[row.versions == version].astype(np.float64)
        lags.update((lineage.position(version) - lineage.positions(row.versions)).tolist())
        sums["current"] += gap.size
        sums["current_diff"] += float(gap.sum())
        largest = max(largest, float(np.nan_to_num(gap, nan=np.inf).max(initial=0.0)))
    return torch.tensor(list(sums.values()), dtype=torch.float64), largest, lags


def _step_metrics(sums: dict[str, float], largest: float, lags: Counter[int]) -> dict[str, float]:
    tokens, episodes = max(1.0, sums["tokens"]), max(1.0, sums["trajectories"])
    failures = sums["trajectories"] - sums["successes"]
    return {
        "rollout/reward": sums["reward"] / episodes,
        "rollout/response_tokens": sums["tokens"],
        "rollout/lag_mean": sum(lag * n for lag, n in lags.items()) / tokens,
        "rollout/lag_max": float(max(lags, default=0)),
        **{f"rollout/lag_share/{lag}": n / tokens for lag, n in sorted(lags.items())},
        "rollout/response_tokens_per_step": sums["tokens"] / max(1.0, sums["rows"]),
        "rollout/steps_success": sums["success_steps"] / max(1.0, sums["successes"]),
        "rollout/steps_failure": sums["failure_steps"] / max(1.0, failures),
        "ppo_actor/final_reward/avg": sums["row_advantage"] / tokens,
        "ppo_actor/advantages/avg": sums["token_advantage"] / tokens,
        "ppo_actor/entropy": sums["entropy"] / tokens,
        "ppo_actor/bad_behave_logprobs": sums["bad_behave"],
        "engine/logprob_diff_max": largest,
        "engine/logprob_diff_mean": sums["current_diff"] / max(1.0, sums["current"]),
        "engine/logprob_tokens": sums["current"],
    }


def _update_metrics(updates: list[Update]) -> dict[str, float]:
    """Means over the updates of a step."""
    if not updates:
        return {"ppo_actor/skipped_updates": 0.0}
    tokens = np.array([max(1.0, update.sums[0]) for update in updates])
    loss = float(np.mean([update.sums[1] / max(1, update.denominator) for update in updates]))
    sums = np.stack([update.sums[2:] for update in updates])
    kl, behave_kl, clipped, dual_clipped, dropped = (sums / tokens[:, None]).mean(0).tolist()
    norms = [update.grad_norm for update in updates if update.applied]
    return {
        "ppo_actor/update/actor_loss/avg": loss,
        "ppo_actor/update/approx_kl_abs/avg": kl,
        "ppo_actor/update/behave_approx_kl_abs/avg": behave_kl,
        "ppo_actor/update/clip_ratio": clipped,
        "ppo_actor/update/dual_clip_ratio": dual_clipped,
        "ppo_actor/behave_cap_ratio": dropped,
        "ppo_actor/grad_norm": float(np.mean(norms)) if norms else 0.0,
        "ppo_actor/skipped_updates": float(sum(not update.applied for update in updates)),
    }
