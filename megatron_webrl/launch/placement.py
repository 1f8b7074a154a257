"""Which role runs where: names, addresses and GPUs of one machine's roles."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_webrl.config import RankEstimate, RunConfig, estimate
from megatron_webrl.errors import UserError
from megatron_webrl.launch.cluster import free_port


class RolePlace(NamedTuple):
    """One role process."""

    name: str
    """`coordinator`, `store`, `engine-0`, `trainer-0`, `worker-0`, …"""
    address: str
    """Socket that it answers on; empty if it answers none."""
    gpus: tuple[str, ...]
    """GPUs that it sees, as CUDA_VISIBLE_DEVICES names them; empty on a CPU."""


def visible_gpus(device: str) -> list[str]:
    """GPUs to use for `device` of the configuration, those of CUDA_VISIBLE_DEVICES where it is set, without importing
    torch.  Raises UserError if it asks for CUDA and there is none."""
    if device == "cpu":
        return []
    try:
        out = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
        count = sum(line.startswith("GPU ") for line in out.stdout.splitlines()) if out.returncode == 0 else 0
    except (OSError, subprocess.TimeoutExpired):
        count = 0
    found = [str(n) for n in range(count)]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        found = [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")][:count]
    if device == "cuda" and not found:
        raise UserError("device=cuda, but nvidia-smi shows no GPU here: use device=cpu or a machine with a GPU")
    return found


def place(config: RunConfig, sockets: Path, gpus: Sequence[str], *, with_trainer: bool = True) -> list[RolePlace]:
    """Roles of one machine.  Trainer ranks take the first GPUs, engines the next; with too few GPUs they share."""
    trainer = place_trainer(config, gpus) if with_trainer else []

    ports: set[int] = set()

    def address(name: str) -> str:
        if config.wire.transport == "ipc":
            return f"ipc://{sockets}/{name}"
        while (port := free_port()) in ports:
            pass
        ports.add(port)
        return f"tcp://127.0.0.1:{port}"

    tp = config.engine.tp
    roles = [RolePlace("store", address("store"), ()), RolePlace("coordinator", address("coordinator"), ())]
    for i in range(config.engine.hosts if config.evaluation.endpoint is None else 0):
        name = f"engine-{i}"
        mine = tuple(gpus[(len(trainer) + i * tp + k) % len(gpus)] for k in range(tp)) if gpus else ()
        if len(set(mine)) < len(mine):
            raise UserError(f"engine.tp={tp} needs {tp} GPUs, here are {len(gpus)}: lower engine.tp")
        roles.append(RolePlace(name, address(name), mine))
    return roles + trainer + [RolePlace(f"worker-{i}", "", ()) for i in range(config.browser.workers)]


def place_trainer(config: RunConfig, gpus: Sequence[str]) -> list[RolePlace]:
    """The trainer's ranks alone.  Raises UserError if there are too few GPUs."""
    ranks = config.trainer.parallel.world_size
    if config.trainer.loss_backend == "triton" and not gpus:
        raise UserError("trainer.loss_backend=triton needs a GPU, and there is none here: use auto or torch")
    if gpus and ranks > len(gpus):
        raise UserError(
            f"trainer.parallel (tp·pp·dp = {ranks}) needs {ranks} GPUs, here are {len(gpus)}: use a smaller layout or device=cpu"
        )
    return [RolePlace(f"trainer-{r}", "", (gpus[r],) if gpus else ()) for r in range(ranks)]


def describe(roles: list[RolePlace], config: RunConfig) -> str:
    """The placement as lines for people."""
    lines = ["placement (one machine):"]
    training = {gpu for role in roles if role.name.startswith("trainer") for gpu in role.gpus}
    for role in roles:
        where = f"GPU {', '.join(role.gpus)}" if role.gpus else "CPU"
        more = ""
        if role.name.startswith("worker"):
            more = f"{config.browser.slots} slots in one Chromium"
        elif role.name.startswith("engine"):
            more = f"SGLang, tp {config.engine.tp}"
            if training & set(role.gpus):
                more += "; shares a GPU with the trainer: set engine.args.mem-fraction-static to what SGLang may take"
        lines.append(f"  {role.name:<12} {where:<8} {more or role.address}".rstrip())
    return "\n".join(lines)


def describe_trainer(config: RunConfig) -> str:
    """What a rank of each pipeline stage needs, as lines for people."""
    stages = (_needs(stage, rank) for stage, rank in enumerate(estimate(config)))
    return "\n".join(["a trainer rank, estimated (docs/trainer.md):", *stages])


def _needs(stage: int, rank: RankEstimate) -> str:
    parts = ("weights", "gradients", "optimizer", "activations", "logits")
    sizes = ", ".join(f"{part} {getattr(rank, part) / 1e9:.2f}" for part in parts)
    return (
        f"  stage {stage}: {rank.parameters / 1e6:,.1f} M parameters; GB: {sizes}; in all {rank.total / 1e9:.2f}; "
        f"{rank.flops / 1e12:.3g} TFLOP a full micro-batch"
    )
