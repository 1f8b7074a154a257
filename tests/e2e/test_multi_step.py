"""A multi-step episode (type, then submit) through the real coordinator, store, worker, Chromium and trainer.

Only the policy's words are scripted: a fake engine host answers Generate with the replies that solve the page, or with
one that types something else, so that groups are mixed.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import REPOSITORY
from exported import exported

from megatron_webrl.agent import BrowserWorker, collect_samples, format_call, tokenizer_texts
from megatron_webrl.config import RunConfig, load_config
from megatron_webrl.launch.cluster import free_port
from megatron_webrl.processor import Processor
from megatron_webrl.replay import Coordinator
from megatron_webrl.screenshots import serve_store
from megatron_webrl.tiny_model import make_tiny_model
from megatron_webrl.trajectory import FLOAT32, INT32, Group, decode_steps, pack, unpack
from megatron_webrl.wire import Client, Server
from megatron_webrl.wire.messages import (
    BeginTraining,
    Done,
    EndRun,
    EngineStatus,
    FetchGroups,
    Generate,
    Generated,
    GetImages,
    Groups,
    Images,
    Manifest,
    NeedImages,
    Status,
    StepTrained,
    Take,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
SEEDS = (0, 6)


class FakeScriptedEngine:
    """Answers with the script of the page in the prompt; every other sampler seed types the wrong text."""

    def __init__(self, processor: Processor, scripts: dict[str, list[dict[str, Any]]]) -> None:
        self.processor = processor
        self.scripts = scripts

    async def generate(self, sender: str, request: Generate) -> Generated | NeedImages:
        if set(request.digests) - set(request.images):
            return NeedImages(request.digests)
        prompt = self.processor.decode(unpack(request.prompt_ids, INT32))
        utterance = next(u for u in self.scripts if u in prompt)
        step = prompt.count("\nStep ") + prompt.count(">Step ") if "Earlier steps:" in prompt else 0
        action = dict(self.scripts[utterance][min(step, len(self.scripts[utterance]) - 1)])
        if step == 0 and request.seed % 2:
            action["text"] = "wrong"
        ids = [*self.processor.encode(format_call(action)), self.processor.end_token_id]
        return Generated(
            response_ids=pack(ids, INT32),
            logprobs=pack([-0.5] * len(ids), FLOAT32),
            versions=pack([7] * len(ids), INT32),
            finish_reason="stop",
            waited_s=0.0,
            running=1,
        )


def configuration(directory: Path) -> RunConfig:
    return load_config(
        REPOSITORY / "examples" / "demo.yaml",
        [
            f"run_dir={directory}/run",
            f"model.path={directory}/model",
            "tasks.names=[enter-text]",
            f"tasks.train_seeds=[{SEEDS[0]}, {SEEDS[1]}]",
            f"tasks.demonstration_seeds=[{SEEDS[0]}, {SEEDS[1]}]",
            "tasks.horizons={1: 4}",
            "agent.coordinate_step=1",
            "browser.slots=2",
            "replay.group_size=4",
            "replay.groups_per_step=2",
            "algorithm.epochs=1",
        ],
    )


async def collect(config: RunConfig, directory: Path) -> tuple[list[Group], dict[str, bytes], Status]:
    """Groups of one batch as the trainer fetches them, their screenshots, and the account after they were trained."""
    samples = await collect_samples(config, _pages(config))
    make_tiny_model(directory / "model", tokenizer_texts(config, samples))
    processor = Processor.load(directory / "model")
    fake = FakeScriptedEngine(processor, {s.utterance: s.actions for s in samples})
    Path(config.run_dir).mkdir()
    at = {name: f"ipc://{directory}/{name}" for name in ("coordinator", "store", "engine")}
    engine = Server(at["engine"], "run", {Generate: fake.generate})
    await engine.start()
    roles = [
        asyncio.create_task(serve_store(at["store"], "run", directory / "screenshots", 1 << 28)),
        asyncio.create_task(
            Coordinator(
                config,
                run_id="run",
                address=at["coordinator"],
                store_address=at["store"],
                log_metrics=lambda step, values: None,
            ).run()
        ),
    ]
    coordinator, store = Client(at["coordinator"], "run", "test"), Client(at["store"], "run", "test")
    status = EngineStatus("engine-0", at["engine"], "serving", 7, 1, 1, 0)
    worker = BrowserWorker(
        config, run_id="run", name="worker-0", coordinator_address=at["coordinator"], store_address=at["store"]
    )
    try:
        await coordinator.request(status, timeout=20, expect=Done)
        await coordinator.request(BeginTraining(), timeout=20, expect=Done)
        roles.append(asyncio.create_task(worker.run()))
        manifest = Manifest(0, False)
        async with asyncio.timeout(120):
            while not manifest.ready:
                await coordinator.request(status, timeout=5, expect=Done)
                manifest = await coordinator.request(Take(0, 7, 1.0), timeout=10, expect=Manifest)
        groups = (await coordinator.request(FetchGroups(manifest.group_ids), timeout=10, expect=Groups)).groups
        digests = sorted({d for g in groups for t in g.trajectories for d in t.digests})
        images = await store.request(GetImages(digests), timeout=10, expect=Images)
        assert not images.missing, "screenshots are in the store before their trajectory is acknowledged"
        await coordinator.request(StepTrained(0, 8, 1, {}), timeout=10, expect=Done)
        return groups, images.images, await coordinator.request(EndRun(), timeout=10, expect=Status)
    finally:
        for role in reversed(roles):
            role.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await role
        coordinator.close()
        store.close()
        await engine.close()


def _pages(config: RunConfig) -> list[Any]:
    from megatron_webrl.tasks import demonstration_tasks

    return demonstration_tasks(config.tasks)


def test_type_then_submit_is_rolled_out_and_trained(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    groups, images, status = asyncio.run(collect(config, tmp_path))
    solved = [t for g in groups for t in g.trajectories if t.reward > 0]
    failed = [t for g in groups for t in g.trajectories if t.reward == 0]
    assert solved and failed
    for trajectory in solved:
        steps = decode_steps(trajectory.payload)
        assert [s.action and s.action["action"] for s in steps] == ["type", "left_click"]
        assert steps[0].changed, "typing shows"
        assert trajectory.reason == "solved" and trajectory.min_version == trajectory.max_version == 7
        assert len({s.images[-1].digest for s in steps}) == 2
    assert {t.reason for t in failed} <= {"wrong", "horizon"}
    account = status.account
    assert account.trained == 8
    assert account.issued == account.trained + sum(account.dropped.values()) and account.in_flight == 0

    from megatron_webrl.trainer import PolicyTrainer

    trainer = PolicyTrainer(
        config, rank=0, world_size=1, master_address="127.0.0.1", master_port=free_port(), total_steps=1
    )
    try:
        before = exported(trainer)
        report = trainer.train_step(
            [g.group_id for g in groups],
            lambda ids: [g for g in groups if g.group_id in ids],
            lambda digests: {d: images[d] for d in digests},
            version=7,
        )
        after = exported(trainer)
    finally:
        trainer.close()
    assert report.applied_updates == config.algorithm.minibatches
    assert any(not np.array_equal(before[n].numpy(), after[n].numpy()) for n in after), "the weights moved"
    assert report.metrics["rollout/steps_success"] == 2
