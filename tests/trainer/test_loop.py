"""The trainer's loop, where it needs neither coordinator nor engine."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from on_ranks import free_port, on_ranks
from ranks import Recorded, run_config

from megatron_webrl.trainer import PolicyTrainer, rows_of
from megatron_webrl.trainer.agreement import Agreement
from megatron_webrl.trainer.loop import TrainerLoop, _Prompt


def probes_checked(rank: int, ranks: int, model: Path, port: int) -> list[dict[str, float]]:
    """Two engines' replies to one prompt, as rank 0 alone has got them, checked by two shards; twice, with a step's own
    screenshots between."""
    config = run_config(model, trainer={"parallel": {"dp": 2}})
    place = {"rank": rank, "world_size": ranks, "master_address": "127.0.0.1", "master_port": port}
    trainer = PolicyTrainer(config, **place, total_steps=3)
    recorded = Recorded(trainer.processor, groups=2, steps=1)
    row, other = (rows_of(recorded.groups[g].trajectories[0], 0.0)[0] for g in (10, 11))
    (row.behave_logprobs,) = trainer.logprobs([row], recorded.fetch_images)
    trainer.logprobs([other] * 2, recorded.fetch_images)  # the shards forget the prompt's screenshot
    loop: Any = TrainerLoop.__new__(TrainerLoop)
    loop.config, loop.version, loop._trainer = config, 3, trainer
    loop._agreement = Agreement(config.trainer)
    loop._prompt = None
    found = []
    for _ in range(2):
        loop._probe = None
        if rank == 0:
            loop._prompt = _Prompt(b"", row.images, recorded.fetch_images([i.digest for i in row.images]))
            replies: Future[Any] = Future()
            replies.set_result([("engine-0", row), ("engine-1", row)])
            loop._probe = 3, replies
        found.append(loop._check_probe())
        trainer.logprobs([other] * 2, recorded.fetch_images)
    trainer.close()
    return found


def test_every_shard_checks_its_share_of_the_probes(deep_model_dir: Path) -> None:
    """Replies and their screenshots come from rank 0; the difference is the same on every rank."""
    for found in on_ranks(probes_checked, 2, deep_model_dir, free_port(), preload="megatron_webrl.trainer"):
        for metrics in found:
            assert metrics["engine/refresh_probes"] == 2
            assert metrics["engine/refresh_logprob_diff_max"] < 1e-5
