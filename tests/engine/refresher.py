"""A trainer's side of refreshes without a trainer: the real snapshots, sources and publisher, filled from plain tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3VLConfig

from megatron_webrl.config import RefreshConfig
from megatron_webrl.trainer.export import Snapshot, plan_buckets
from megatron_webrl.trainer.mapping import table
from megatron_webrl.trainer.refresh import RefreshReport, WeightPublisher
from megatron_webrl.trainer.source import LoopThread, WeightSource
from megatron_webrl.trainer.weights import SafetensorsDirectory, shapes_of
from megatron_webrl.wire import Client


class Refresher:
    """Publishes weights of `model` to the engines of a rig.  stages: pipeline stages that share the tensors."""

    def __init__(self, rig: Any, model: Path, directory: Path, *, stages: int = 1, **refresh: Any) -> None:
        self.config = RefreshConfig.model_validate(
            {"bucket_bytes": 1 << 20, "timeout_s": 30.0, "verify_every": 0, **refresh}
        )
        shapes = shapes_of(Qwen3VLConfig.from_pretrained(model))
        lengths = SafetensorsDirectory(model).lengths
        vision = [name for name in lengths if name.startswith("model.visual.")]
        first = shapes.layers - stages + 1
        entries = table(shapes, vision, stages=[first] + [1] * (stages - 1), fused_norms=False)
        self.plan = plan_buckets(entries, lengths, torch.float32, limit=self.config.bucket_bytes, pp=stages)
        self.snapshots = [Snapshot(self.plan, stage) for stage in range(stages)]
        self.thread = LoopThread("refresher")
        self.sources = [
            WeightSource(
                snapshot,
                run_id=rig.run_id,
                address=f"ipc://{directory}/source-{snapshot.stage}",
                host="127.0.0.1",
                backend="gloo",
                device=torch.device("cpu"),
            )
            for snapshot in self.snapshots
        ]
        addresses = [self.thread.submit(source.start()).result(10) for source in self.sources]

        async def make() -> WeightPublisher:
            self.coordinator = Client(rig.address, rig.run_id, "publisher")
            return WeightPublisher(
                self.config,
                self.coordinator,
                self.plan,
                addresses,
                backend="gloo",
                export_dir=directory / "export",
                model_path=model,
            )

        self.publisher = self.thread.submit(make()).result(10)

    def begin(self, version: int, tensors: Mapping[str, Tensor]) -> Any:
        """Start to publish; returns a future.  The snapshots are filled while the first bucket is asked for."""
        self.thread.submit(self.publisher.reserve()).result(120)
        for snapshot in self.snapshots:
            snapshot.begin(version)
        job = self.thread.submit(self.publisher.publish(version))
        for snapshot in self.snapshots:
            for index in snapshot.indices:
                for name, place in self.plan[index].views(snapshot.memory(index)):
                    place.copy_(tensors[name])
                snapshot.whole(index)
        return job

    def publish(self, version: int, tensors: Mapping[str, Tensor], timeout: float = 240.0) -> RefreshReport:
        """Publish, to the end."""
        report = self.begin(version, tensors).result(timeout)
        assert isinstance(report, RefreshReport)
        return report

    def load_joiners(self) -> None:
        """As a trainer does, from now on."""
        self.joiners = self.thread.submit(self.publisher.load_joiners())

    def close(self) -> None:
        self.thread.submit(self.publisher.close()).result(60)
        for source in self.sources:
            self.thread.submit(source.close()).result(10)
        self.thread.close()
