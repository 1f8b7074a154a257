"""A trainer by itself, without the other roles: supervised warm start, and training on recorded batches."""

from __future__ import annotations

import contextlib
import json
import math
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_webrl.config import RunConfig, dump
from megatron_webrl.errors import UserError
from megatron_webrl.launch import roles
from megatron_webrl.launch.cluster import Cluster, free_port
from megatron_webrl.launch.display import Display
from megatron_webrl.launch.placement import RolePlace, place_trainer, visible_gpus
from megatron_webrl.launch.resume import Resume, check_run_dir
from megatron_webrl.launch.run import check_model, check_recorded, identify
from megatron_webrl.run_directory import check_writable, checkpoint_step, locked, newest_checkpoint, remove_partial

TAIL_BYTES = 1 << 16


def sft(config: RunConfig, display: Display, demonstrations: Path, output: Path) -> None:
    """`megatron-webrl sft`: supervised training of config.model.path on demonstrations -> Hugging Face directory."""
    check_model(config)
    if not (demonstrations / "demonstrations.msgpack").exists():
        raise UserError(
            f"demonstrations={demonstrations} holds no demonstrations.msgpack: give the folder that `demo` wrote"
        )
    if output.exists():
        raise UserError(f"output={output} exists: give another folder")
    check_writable("output", output)
    placed = [
        role._replace(name=f"trainer-sft-{rank}")
        for rank, role in enumerate(place_trainer(config, visible_gpus(config.device)))
    ]
    run_dir = Path(config.run_dir)
    with locked(run_dir), Cluster(f"sft-{uuid.uuid4().hex[:8]}", run_dir / "logs") as cluster:
        _start_trainer(
            cluster, placed, roles.sft, {"config": config, "demonstrations": demonstrations, "output": output}
        )
        while not cluster.join("trainer-sft", 1.0):
            if newest := _newest(run_dir / "sft.jsonl"):
                display.progress("warm start", newest["step"], config.sft.steps, f"loss {newest['loss']:.3f}")


def train_recorded(config: RunConfig, display: Display, *, resume: Resume = None) -> int:
    """`megatron-webrl train` with train_only: neither browsers nor engines.  Returns how many train steps are done."""
    run_dir = Path(config.run_dir)
    if not run_dir.exists():
        check_recorded(config, check_run_dir(config, resume))  # refused before it is made
    with locked(run_dir):
        remove_partial(run_dir / "checkpoints")
        checkpoint = check_run_dir(config, resume)
        batches, placed = check_recorded(config, checkpoint)
        arguments = {"config": config, "resume": checkpoint}
        arguments["wandb_id"] = identify(run_dir, "train", again=checkpoint is not None)["run_id"]
        (run_dir / "config.yaml").write_text(dump(config))
        with Cluster(f"recorded-{uuid.uuid4().hex[:8]}", run_dir / "logs") as cluster:
            _start_trainer(cluster, placed, roles.recorded, arguments)
            while not cluster.join("trainer", 1.0):
                row = _newest(run_dir / "metrics.jsonl")
                done = sum(batch.step <= row.get("step", 0) for batch in batches)
                loss = row.get("ppo_actor/update/actor_loss/avg", math.nan)
                display.progress("training on recorded batches", done, len(batches), f"loss {loss:.5f}")
    last = newest_checkpoint(run_dir)
    assert last is not None  # the trainer leaves one
    return checkpoint_step(last)


def _start_trainer(
    cluster: Cluster, placed: list[RolePlace], function: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    """All ranks of a trainer that works without the other roles."""
    meeting = {"master_address": "127.0.0.1", "master_port": free_port()}
    for rank, role in enumerate(placed):
        cluster.start(role.name, function, {**arguments, **meeting, "rank": rank}, gpus=role.gpus)


def _newest(file: Path) -> dict[str, Any]:
    """The last whole line of a file of JSON lines; empty if there is none."""
    if not file.exists():
        return {}
    with file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = opened.read().splitlines(keepends=True)
    for line in reversed(lines):
        if line.endswith(b"\n"):
            with contextlib.suppress(ValueError):  # the beginning was cut off, or its writer was killed
                return json.loads(line)
    return {}
