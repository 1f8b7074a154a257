"""What a run goes on from: decided, and refused, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from megatron_webrl.config import RunConfig
from megatron_webrl.errors import UserError
from megatron_webrl.run_directory import checkpoint_step, checkpoints, newest_checkpoint, replace_file

Resume = Literal["newest", "auto"] | Path | None
"""`newest`: the newest checkpoint of run_dir, which must have one; `auto`: that, or the beginning while there is none; a
folder: that checkpoint; None: nothing, in a run_dir that holds no run."""


_NOT_TRAINED = {"eval": "an evaluation", "rollout_only": "the batches of a rollout_only run"}
"""Kinds of runs without a trainer."""


def check_run_dir(config: RunConfig, resume: Resume) -> Path | None:
    """The checkpoint to go on from; None to begin at the beginning.  Raises UserError if the directory is not fit for
    that."""
    run_dir = Path(config.run_dir)
    kind = earlier_start(run_dir).get("kind")
    if resume is not None and config.rollout_only:
        raise UserError("--resume: rollout_only=true saves no checkpoint to go on from: leave one of them out")
    if config.train_only is not None and (run_dir / "ledger.sqlite").exists():
        raise UserError(
            f"run_dir={run_dir} holds a run with rollouts: give train_only a run_dir of its own (with a copy of its newest "
            "checkpoint in checkpoints/, to go on from that)"
        )
    if isinstance(resume, Path):
        return _chosen(run_dir, resume)
    newest = newest_checkpoint(run_dir)
    if resume is not None and newest is None and kind in _NOT_TRAINED:
        raise UserError(
            f"--resume: run_dir={run_dir} holds {_NOT_TRAINED[kind]}: give the training a run_dir of its own"
        )
    if resume == "newest" and newest is None:
        raise UserError(
            f"--resume: run_dir={run_dir} holds no checkpoint: start without --resume in a run_dir of its own, give the right "
            "run_dir, or say --resume auto, which starts from the beginning"
        )
    if resume is None and any((run_dir / file).exists() for file in ("ledger.sqlite", "metrics.jsonl")):
        if kind in _NOT_TRAINED:
            raise UserError(f"run_dir={run_dir} holds {_NOT_TRAINED[kind]}: move it away, or give another run_dir")
        go_on = "continue it with --resume"
        if newest is None:
            again = "" if config.rollout_only else " or begin it again with --resume auto"
            go_on = f"it saved no checkpoint, so remove it{again}"
        raise UserError(f"run_dir={run_dir} holds a run already: {go_on}, or give another run_dir")
    return newest if resume else None


def _chosen(run_dir: Path, chosen: Path) -> Path:
    """`chosen`, if it is the newest checkpoint of `run_dir`.  With later ones beside it a run that goes on would have two
    pasts, and the next start with `newest` would take the wrong one: moving them away is the user's decision."""
    own = {path.resolve(): path for path in checkpoints(run_dir)}
    found = own.get(chosen.resolve())
    if found is None:
        held = ", ".join(path.name for path in own.values()) or "none"
        raise UserError(
            f"--resume {chosen} is no checkpoint of run_dir={run_dir}, which holds {held}: give the folder of one in "
            f"{run_dir / 'checkpoints'}, or the run_dir that it belongs to"
        )
    later = [path.name for path in own.values() if checkpoint_step(path) > checkpoint_step(found)]
    if later:
        raise UserError(
            f"--resume {chosen} is older than {', '.join(later)}: to go back to it, and lose what was trained since, move the "
            f"later ones out of {run_dir / 'checkpoints'}"
        )
    return found


def earlier_start(run_dir: Path) -> dict[str, Any]:
    """What `run_dir`/run.json says of the run that was started there before; empty if none was.  Raises UserError if it is
    malformed."""
    file = run_dir / "run.json"
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text())
        if isinstance(found["run_id"], str) and isinstance(found["starts"], int):
            return found
        problem = f"it holds {found}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = repr(error)
    raise UserError(
        f"{file} does not say which run this is ({problem}): remove it, and the run goes on under a new name in wandb, or "
        "give another run_dir"
    )


def write_start(run_dir: Path, identity: dict[str, Any]) -> None:
    """Say in `run_dir`/run.json what `earlier_start` reads: whole, or as it was."""
    replace_file(run_dir / "run.json", json.dumps(identity) + "\n")
