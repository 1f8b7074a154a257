"""Recorded groups: every n-th one with its screenshots, as files that anything opens.

trajectories/group-000150/group.json                    task, and per trajectory its outcome, reward, steps
trajectories/group-000150/images/DIGEST.png
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_webrl.trajectory import FLOAT32, INT32, Group, Step, Trajectory, decode_steps, unpack


def record_group(directory: Path, group: Group, images: dict[str, bytes]) -> Path:
    """Write one group under `directory` (the run's `trajectories/`) and return its folder."""
    folder = directory / f"group-{group.group_id:06d}"
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for digest, data in images.items():
        (folder / "images" / f"{digest}.png").write_bytes(data)
    task = {name: getattr(group.task, name) for name in group.task.__struct_fields__}
    content = {"group_id": group.group_id, "task": task, "trajectories": [_trajectory(t) for t in group.trajectories]}
    (folder / "group.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return folder


def _trajectory(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "sample_index": trajectory.assignment.sample_index,
        "attempt": trajectory.assignment.attempt,
        "outcome": trajectory.outcome,
        "reason": trajectory.reason,
        "reward": trajectory.reward,
        "worker": trajectory.worker,
        "seconds": round(trajectory.finished_at - trajectory.started_at, 3),
        "steps": [_step(step) for step in decode_steps(trajectory.payload)],
    }


def _step(step: Step) -> dict[str, Any]:
    return {
        "images": [ref.digest for ref in step.images],
        "text": step.text,
        "action": step.action,
        "error": step.error,
        "url": step.url,
        "title": step.title,
        "changed": step.changed,
        "finish_reason": step.finish_reason,
        "response_ids": unpack(step.response_ids, INT32).tolist(),
        "logprobs": [round(float(x), 5) for x in unpack(step.logprobs, FLOAT32)],
        "versions": unpack(step.versions, INT32).tolist(),
    }
