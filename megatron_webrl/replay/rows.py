"""Numbers of the rollouts for the rows of metrics.jsonl, from envelopes alone; docs/metrics.md says what each means."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_webrl.replay.rules import has_signal
from megatron_webrl.trajectory import Group, Trajectory
from megatron_webrl.wire.messages import Status


def run_row(status: Status) -> dict[str, float]:
    """Where the run stands, for a row of any step."""
    minutes = max(status.minutes, 1e-9)
    return {
        "run/version": status.version,
        "run/minutes": minutes,
        "rollout/success": status.success,
        "rollout/mixed_share": status.mixed_share,
        "rollout/trajectories": status.trajectories,
        "rollout/trajectories_per_hour": status.trajectories / minutes * 60,
        "replay/running_groups": status.running_groups,
        "replay/queued_groups": status.queued_groups,
        "account/issued": status.account.issued,
        "account/trained": status.account.trained,
        "account/in_flight": status.account.in_flight,
        **{f"account/dropped/{reason}": n for reason, n in status.account.dropped.items()},
    }


def batch_row(groups: Sequence[Group]) -> dict[str, float]:
    """A batch that no trainer sees (rollout_only): what a train step says of it, and its own share of mixed groups."""
    members = [t for group in groups for t in group.trajectories]
    solved, failed = [t for t in members if t.reward > 0], [t for t in members if not t.reward > 0]
    tokens = sum(t.response_tokens for t in members)
    return {
        "rollout/reward": sum(t.reward for t in members) / len(members),
        "rollout/batch_success": len(solved) / len(members),
        "rollout/batch_mixed_share": sum(has_signal([t.reward for t in g.trajectories]) for g in groups) / len(groups),
        "rollout/response_tokens": tokens,
        "rollout/response_tokens_per_step": tokens / max(1, sum(t.num_steps for t in members)),
        "rollout/steps_success": _mean_steps(solved),
        "rollout/steps_failure": _mean_steps(failed),
    }


def _mean_steps(trajectories: Sequence[Trajectory]) -> float:
    return sum(t.num_steps for t in trajectories) / max(1, len(trajectories))
