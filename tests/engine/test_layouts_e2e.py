"""Engine = trainer, over trainer layouts and refreshes: a real trainer publishes its shards to a real SGLang and updates them,
and the logprobs of what the engine samples are its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_ranks import free_port, on_ranks
from policies import IMAGE_PROMPT, TEXT_PROMPT, TOLERANCE, TWO_IMAGES_PROMPT, named, screenshot
from rig import Rig, run_config

from megatron_webrl.processes import marked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

REFRESHES = 3
ASKED = {"text": (TEXT_PROMPT, 0), "one image": (IMAGE_PROMPT, 1), "two images": (TWO_IMAGES_PROMPT, 2)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2, "first_stage_layers": 2},
}


async def asked(trainer: Any, address: str, run_id: str) -> dict[str, Any]:
    """A reply to each prompt; the images are the same each time."""
    from megatron_webrl.engine import GenerationClient
    from megatron_webrl.wire import Client

    processor, coordinator = trainer.processor, Client(address, run_id, "layouts")
    sampling = trainer.config.sampling
    client = GenerationClient(coordinator, sampling, processor.banned_ids(), processor.stop_ids(), 120.0)
    try:
        return {
            name: await client.generate(
                processor.encode(prompt),
                named(*(screenshot(seed) for seed in range(images))),
                seed=seed,
                temperature=1.0,
                timeout_s=100.0,
            )
            for seed, (name, (prompt, images)) in enumerate(ASKED.items())
        }
    finally:
        await client.close()
        coordinator.close()


def rows_of_replies(processor: Any, replies: dict[str, Any]) -> list[Any]:
    from megatron_webrl.screenshots import image_size
    from megatron_webrl.trainer.batch import Row
    from megatron_webrl.trajectory import FLOAT32, INT32, ImageRef, unpack

    rows = []
    for name, reply in replies.items():
        prompt, images = ASKED[name]
        shown = named(*(screenshot(seed) for seed in range(images)))
        refs = [ImageRef(d, *image_size(data), processor.grid(*image_size(data))) for d, data in shown.items()]
        rows.append(
            Row(
                prompt_ids=np.array(processor.encode(prompt), np.int32),
                images=refs,
                response_ids=unpack(reply.response_ids, INT32),
                behave_logprobs=unpack(reply.logprobs, FLOAT32),
                versions=unpack(reply.versions, INT32),
                advantage=0.0,
                name=name,
            )
        )
    return rows


def publish_and_compare(
    rank: int, ranks: int, model: Path, parallel: dict[str, Any], port: int, address: str, run_id: str, directory: Path
) -> list[dict[str, Any]]:
    """On each rank: publish, ask, compare; an update; again."""
    from ranks import Recorded
    from ranks import run_config as trainer_config

    from megatron_webrl.trainer import PolicyTrainer
    from megatron_webrl.trainer.publishing import Publishing

    config = trainer_config(
        model,
        run_dir=str(directory),
        trainer={"parallel": parallel},
        sampling={"max_new_tokens": 24},
        refresh={"bucket_bytes": 1 << 20, "timeout_s": 60.0, "verify_every": 1},
    )
    place: dict[str, Any] = {"rank": rank, "world_size": ranks, "master_address": "127.0.0.1", "master_port": port}
    trainer = PolicyTrainer(config, **place, total_steps=10)
    publishing = Publishing(trainer, run_id=run_id, coordinator_address=address, master_address="127.0.0.1", keys=None)
    recorded = Recorded(trainer.processor, groups=2, size=2)
    shown = named(*(screenshot(seed) for seed in range(2)))
    found = []
    try:
        for refresh in range(1 + REFRESHES):
            if refresh:
                trainer.train_step([10, 11], recorded.fetch_groups, recorded.fetch_images, version=3)
            version = 100 * ranks + refresh
            publishing.reserve()
            trainer.layout.barrier()
            publishing.publish(version)
            report = publishing.wait()
            replies = trainer.layout.gather(asyncio.run(asked(trainer, address, run_id)) if rank == 0 else None)[0]
            rows = rows_of_replies(trainer.processor, replies)
            ours = trainer.logprobs(rows, lambda digests: {d: shown[d] for d in digests})
            found.append(
                {
                    "version": version,
                    "report": report,
                    "versions": {int(v) for row in rows for v in row.versions},
                    "difference": {
                        row.name: float(np.abs(mine - row.behave_logprobs).max())
                        for row, mine in zip(rows, ours, strict=True)
                    },
                    "logprobs": np.concatenate(ours),
                }
            )
    finally:
        publishing.close()
        trainer.close()
    return found


def check(found: list[dict[str, Any]]) -> None:
    """Of rank 0: every refresh by broadcast, verified, and of one mind with the engine."""
    for step in found:
        report = step["report"]
        assert (report.hosts, report.failed, report.from_disk, report.verified) == (["engine-0"], [], [], 1)
        assert step["versions"] == {step["version"]}
        print(step["version"], {name: f"{value:.1e}" for name, value in step["difference"].items()})
        assert max(step["difference"].values()) <= TOLERANCE, step["difference"]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_logprobs_are_the_trainers(layout: str, engine: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    """|engine − trainer| ≤ 1e-4 for text, one image and two, before and after three refreshes between which the weights
    were updated, the images being the same; each refresh is verified by checksum (tied embeddings)."""
    engine.until(
        lambda: engine.statuses and engine.status.state in ("waiting_weights", "serving"), 600, "an engine that is up"
    )
    parallel = LAYOUTS[layout]
    ranks = parallel.get("tp", 1) * parallel.get("pp", 1)
    arguments = (tiny_model_dir, parallel, free_port(), engine.address, engine.run_id, tmp_path)
    found = on_ranks(publish_and_compare, ranks, *arguments, preload="megatron_webrl.trainer")[0]
    check(found)
    assert len({step["logprobs"][0] for step in found}) == 1 + REFRESHES, "each update changes them"


@pytest.fixture
def untied(tmp_path: Path) -> Iterator[tuple[Rig, Path]]:
    """An SGLang of tensor-parallel size 2 with a model whose output layer is its own."""
    from megatron_webrl.tiny_model import make_tiny_model

    model = make_tiny_model(tmp_path / "model", ["Click the button.", "user\nassistant\n"], tie=False)
    run_id = f"test-untied-{os.getpid()}"
    rig = Rig(run_id, tmp_path)
    rig.add_host(run_config(model, tp=2), "engine-0")
    yield rig, model
    rig.close()
    assert not marked(run_id)


def test_an_untied_model_in_a_tensor_parallel_engine(untied: tuple[Rig, Path], tmp_path: Path) -> None:
    """The same with an output layer of its own, from two pipeline stages into two tensor-parallel schedulers."""
    rig, model = untied
    rig.until(lambda: rig.statuses and rig.statuses["engine-0"].state == "waiting_weights", 400, "an engine that is up")
    arguments = (model, LAYOUTS["tp2 pp2"], free_port(), rig.address, rig.run_id, tmp_path / "run")
    check(on_ranks(publish_and_compare, 4, *arguments, preload="megatron_webrl.trainer")[0])
