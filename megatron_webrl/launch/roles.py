"""What each role's process runs.  Every function is called in a process of its own (a Ray actor, see `cluster`)."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_webrl.config import RunConfig

if TYPE_CHECKING:
    from megatron_webrl.observe import MetricsSink
    from megatron_webrl.wire import Keys

log = logging.getLogger(__name__)


async def store(config: RunConfig, *, run_id: str, address: str, keys: Keys) -> None:
    from megatron_webrl.screenshots import serve_store

    directory = Path(config.replay.screenshot_dir or Path(config.run_dir) / "screenshots")
    await serve_store(address, run_id, directory, config.replay.screenshot_bytes, keys=keys)


async def coordinator(
    config: RunConfig,
    *,
    run_id: str,
    address: str,
    store_address: str,
    keys: Keys,
    wandb_id: str,
    keep_evaluations: bool,
) -> None:
    from megatron_webrl.observe import MetricsLogger
    from megatron_webrl.replay import Coordinator

    metrics = MetricsLogger(_metrics_sinks(config, wandb_id))
    try:
        await Coordinator(
            config,
            run_id=run_id,
            address=address,
            store_address=store_address,
            log_metrics=metrics.log,
            keys=keys,
            keep_evaluations=keep_evaluations,
        ).run()
    finally:
        await asyncio.to_thread(metrics.close)


def _metrics_sinks(config: RunConfig, wandb_id: str) -> list[MetricsSink]:
    from megatron_webrl.observe import JsonlSink, WandbSink

    run_dir = Path(config.run_dir)
    sinks: list[MetricsSink] = [JsonlSink(run_dir / "metrics.jsonl")]
    if config.observe.wandb != "disabled":
        sinks.append(WandbSink(config, run_dir, wandb_id))
    return sinks


async def engine(
    config: RunConfig, *, run_id: str, name: str, index: int, address: str, coordinator_address: str, keys: Keys
) -> None:
    from megatron_webrl.engine import EngineHost
    from megatron_webrl.observe import Tracer

    run_dir = Path(config.run_dir)
    tracer = Tracer(run_dir / "trace" / f"{name}.jsonl", name) if config.observe.trace else None
    host = EngineHost(
        config,
        run_id=run_id,
        name=name,
        index=index,
        address=address,
        coordinator_address=coordinator_address,
        log_dir=run_dir / "logs",
        keys=keys,
        trace=tracer,
    )
    try:
        await host.run()
    finally:
        if tracer is not None:
            tracer.close()


async def worker(
    config: RunConfig, *, run_id: str, name: str, coordinator_address: str, store_address: str, keys: Keys
) -> None:
    from megatron_webrl.agent import BrowserWorker
    from megatron_webrl.observe import Tracer

    tracer = Tracer(Path(config.run_dir) / "trace" / f"{name}.jsonl", name) if config.observe.trace else None
    browser_worker = BrowserWorker(
        config,
        run_id=run_id,
        name=name,
        coordinator_address=coordinator_address,
        store_address=store_address,
        keys=keys,
        trace=tracer,
    )
    try:
        await browser_worker.run()
    finally:
        if tracer is not None:
            tracer.close()


def trainer(
    config: RunConfig,
    *,
    run_id: str,
    rank: int,
    master_address: str,
    master_port: int,
    coordinator_address: str,
    store_address: str,
    keys: Keys,
    resume: Path | None,
) -> None:
    from megatron_webrl.observe import Tracer
    from megatron_webrl.trainer.loop import TrainerLoop

    file = Path(config.run_dir) / "trace" / f"trainer-{rank}.jsonl" if config.observe.trace else None
    tracer = Tracer(file, f"trainer-{rank}")
    loop = TrainerLoop(
        config,
        run_id=run_id,
        rank=rank,
        world_size=config.trainer.parallel.world_size,
        master_address=master_address,
        master_port=master_port,
        coordinator_address=coordinator_address,
        store_address=store_address,
        keys=keys,
        resume=resume,
        tracer=tracer,
    )
    try:
        loop.run()
    finally:
        tracer.close()


def recorded(
    config: RunConfig, *, rank: int, master_address: str, master_port: int, resume: Path | None, wandb_id: str
) -> None:
    from megatron_webrl.trainer.recorded import run_recorded

    run_recorded(
        config,
        rank=rank,
        world_size=config.trainer.parallel.world_size,
        master_address=master_address,
        master_port=master_port,
        resume=resume,
        sinks=_metrics_sinks(config, wandb_id),
    )


def sft(
    config: RunConfig, *, rank: int, master_address: str, master_port: int, demonstrations: Path, output: Path
) -> None:
    from megatron_webrl.trainer.warm_start import run_sft

    run_sft(
        config,
        rank=rank,
        world_size=config.trainer.parallel.world_size,
        master_address=master_address,
        master_port=master_port,
        demonstrations=demonstrations,
        output=output,
    )
