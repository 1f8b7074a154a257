"""The trainer's policy on one rank: model, optimizer and what all ranks do together with them."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from transformers import Qwen3VLConfig

from megatron_webrl.algorithm import LossTerms, fused_linear_grpo_loss, linear_logprob_entropy, surrogate
from megatron_webrl.config import OptimizerConfig, RunConfig, check_layout, model_shape
from megatron_webrl.processor import Processor
from megatron_webrl.replay import Lineage
from megatron_webrl.run_directory import partial_path
from megatron_webrl.trainer import checkpoint, grpo, sft
from megatron_webrl.trainer.batch import MicroBatch, Row, Sample, collate, prepare, split
from megatron_webrl.trainer.export import Snapshot, begin_directory, complete_directory, plan_buckets, write_stage
from megatron_webrl.trainer.layout import Layout
from megatron_webrl.trainer.model import OutputLayer, Qwen3VL, layer_spec, transformer_config
from megatron_webrl.trainer.pixels import PixelStore
from megatron_webrl.trainer.schedule import learning_rate
from megatron_webrl.trainer.weights import HuggingFaceWeights
from megatron_webrl.trajectory import Group

log = logging.getLogger(__name__)

FetchGroups = Callable[[list[int]], list[Group]]
FetchImages = Callable[[list[str]], dict[str, bytes]]
Loss = Callable[[OutputLayer, MicroBatch], tuple[Tensor, Tensor]]
"""-> (summed token losses of the micro-batch, differentiable, float32 []; sums to report, float64 [K])."""


@dataclass(frozen=True)
class Update:
    """One optimizer update."""

    denominator: int
    """What the summed loss was divided by: the count over all samples, ranks and micro-batches."""
    sums: np.ndarray
    """float64 [K]: what the loss reported, summed likewise."""
    grad_norm: float
    """Before clipping."""
    applied: bool
    """False if the gradient was not finite, or there was nothing to count: nothing changed."""


class PolicyTrainer:
    """A Qwen3-VL under training; one instance a rank, and all ranks call each method together.

    Raises UserError for wrong input: a layout that does not fit, a device that is not there, unreadable weights.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        rank: int,
        world_size: int,
        master_address: str,
        master_port: int,
        total_steps: int,
        optimizer: OptimizerConfig | None = None,
    ) -> None:
        check_layout(config, model_shape(config.model.path))
        self.config = config
        self.optimizer_config = optimizer or config.trainer.optimizer
        self.total_steps = total_steps
        self.lr_step = 0
        """Steps of the learning-rate schedule so far."""
        self.generator = np.random.default_rng(config.seed)
        """Order of groups in minibatches: the only randomness of training."""
        self.processor = Processor.load(config.model.path, config.sampling.stop)
        self.layout = Layout(
            config, rank=rank, world_size=world_size, master_address=master_address, master_port=master_port
        )
        self.pixels = self._pixel_store() if self.layout.leads else None
        """Screenshots of what this shard trains on, on its lead."""
        try:
            self._build()
        except BaseException:
            self.layout.close()
            raise

    def _pixel_store(self) -> PixelStore:
        threads = self.config.trainer.image_threads or max(1, (os.cpu_count() or 1) // self.layout.leads_here)
        return PixelStore(self.processor, threads=threads, limit_bytes=self.config.trainer.pixel_bytes)

    def _build(self) -> None:
        config, layout, parallel = self.config, self.layout, self.config.trainer.parallel
        hf = Qwen3VLConfig.from_pretrained(config.model.path)
        dtype = torch.bfloat16 if config.trainer.dtype == "bfloat16" else torch.float32
        spec, why = layer_spec()
        log.info("decoder layers: %s (%s)", spec, why)
        self.weights = HuggingFaceWeights(config.model.path, hf, layout, fused_norms=spec == "transformer_engine")
        megatron_config = transformer_config(hf, parallel, dtype, recompute=config.trainer.recompute)
        self.chunks = [
            Qwen3VL(
                megatron_config,
                hf,
                first=layout.first_stage and i == 0,
                last=layout.last_stage and i == parallel.vp - 1,
                chunk=i if parallel.vp > 1 else None,
                overlap_grad_reduce=parallel.overlap_grad_reduce,
            )
            for i in range(parallel.vp)
        ]
        """This rank's part of the model: one chunk, or those of a virtual pipeline."""
        self.weights.load(self.chunks, layout)
        self.plan = plan_buckets(
            self.weights.entries, self.weights.lengths, dtype, limit=config.refresh.bucket_bytes, pp=layout.pp
        )
        """In what order the weights leave, and in what buckets."""
        self._ddp = [
            DistributedDataParallel(
                megatron_config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    use_distributed_optimizer=parallel.distributed_optimizer,
                    overlap_grad_reduce=parallel.overlap_grad_reduce,
                ),
                chunk.to(layout.device),
            )
            for chunk in self.chunks
        ]
        settings = self.optimizer_config
        self.optimizer = megatron_optimizer.get_megatron_optimizer(
            megatron_optimizer.OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                adam_eps=settings.eps,
                weight_decay=settings.weight_decay,
                clip_grad=settings.clip_grad,
                use_distributed_optimizer=parallel.distributed_optimizer,
                params_dtype=dtype,
                bf16=dtype is torch.bfloat16,
            ),
            self._ddp,
        )
        megatron_config.finalize_model_grads_func = finalize_model_grads
        if parallel.overlap_grad_reduce:
            waiting = [chunk.no_sync for chunk in self._ddp]
            megatron_config.no_sync_func = waiting if parallel.vp > 1 else waiting[0]
        megatron_config.grad_scale_func = self.optimizer.scale_loss
        slots = self.chunks[0].language_model.vocab_size
        self.banned = np.ones(slots, dtype=bool)
        self.banned[: self.processor.vocab_size] = False
        self.banned[self.processor.banned_ids()] = True
        per_rank = slots // layout.tp
        own = self.banned[layout.tp_rank * per_rank : (layout.tp_rank + 1) * per_rank]
        self._own_banned = torch.from_numpy(np.flatnonzero(own)).to(layout.device)

    # What others call

    def train_step(
        self,
        group_ids: list[int],
        fetch_groups: FetchGroups,
        fetch_images: FetchImages,
        *,
        version: int,
        costs: Sequence[int] | None = None,
        lineage: Lineage | None = None,
    ) -> grpo.StepReport:
        """epochs × minibatches GRPO updates on whole groups; see `grpo.train_step`."""
        return grpo.train_step(
            self, group_ids, fetch_groups, fetch_images, version=version, costs=costs, lineage=lineage
        )

    def sft_step(self, rows: list[Row], fetch_images: FetchImages) -> dict[str, float]:
        """One update on the token mean of the cross entropy; see `sft.sft_step`."""
        return sft.sft_step(self, rows, fetch_images)

    def logprobs(self, rows: list[Row], fetch_images: FetchImages) -> list[np.ndarray]:
        """log π of each row's response tokens, float32 [R].  `rows` and the result are the same on every rank."""
        mine = range(self.layout.dp_rank, len(rows), self.layout.dp)
        samples = [self.prepare(rows[i]) for i in mine]
        self.load_images(samples, fetch_images)
        found = self.forward(samples)
        known = {i: logp for i, (logp, _) in zip(mine, found, strict=False)} if self.layout.reports else {}
        merged = {i: logp for part in self.layout.gather(known) for i, logp in part.items()}
        return [merged[i] for i in range(len(rows))]

    def export(self, snapshot: Snapshot | None, version: int) -> None:
        """Copy the weights into `snapshot`, of this stage, on the ranks that hold one (`layout.exports`); None elsewhere."""
        if snapshot is not None:
            snapshot.begin(version)
        for index, tensors in self.weights.export(self.chunks, self.layout, self.plan):
            if snapshot is not None:
                for (_, place), tensor in zip(self.plan[index].views(snapshot.memory(index)), tensors, strict=True):
                    place.copy_(tensor, non_blocking=True)
                if self.layout.device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
                snapshot.whole(index)

    def snapshot(self) -> Snapshot | None:
        """Memory for `export`, on the ranks that take part in it."""
        if not self.layout.exports:
            return None
        return Snapshot(self.plan, self.layout.pp_rank, pinned=self.layout.device.type == "cuda")

    def save_hf(self, directory: Path, *, exported: tuple[Snapshot | None, int] | None = None) -> None:
        """Write a complete Hugging Face directory, whole or not at all, each stage its own files.

        exported: this stage's snapshot and its version, where the weights are exported already.
        """
        if self.layout.rank == 0:
            begin_directory(directory)
        self.layout.barrier()
        if exported is None:
            exported = self.snapshot(), 0
            self.export(*exported)
        snapshot, version = exported
        if snapshot is not None:
            write_stage(partial_path(directory), snapshot, version)
        self.layout.barrier()
        if self.layout.rank == 0:
            complete_directory(directory, self.plan, self.config.model.path)
        self.layout.barrier()

    def save(self, directory: Path, state: dict[str, Any]) -> None:
        """Write a checkpoint, whole or not at all; see `checkpoint.save`."""
        checkpoint.save(self, directory, state)

    def load(self, directory: Path) -> dict[str, Any]:
        """Go on from a checkpoint and return what was saved with it; see `checkpoint.load`."""
        return checkpoint.load(self, directory)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Those of this rank."""
        return chain.from_iterable(chunk.parameters() for chunk in self.chunks)

    def close(self) -> None:
        """Leave the process groups."""
        if self.pixels is not None:
            self.pixels.close()
        self.layout.close()

    # What the steps are made of

    def prepare(self, row: Row) -> Sample:
        """See `batch.prepare`."""
        return prepare(row, self.processor, self.banned)

    def load_images(self, samples: Sequence[Sample], fetch_images: FetchImages) -> None:
        """Fetch, on the lead, those images of this shard's samples that are not here yet, and begin to decode them."""
        if self.pixels is None:
            return
        if lacking := self.pixels.begin_step(digest for sample in samples for digest in sample.digests):
            self.pixels.add(fetch_images(lacking))

    @torch.no_grad()
    def forward(self, samples: Sequence[Sample]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Logprobs and entropies, float32 [R] each, of this shard's samples: on the last stage; empty elsewhere.  Their
        images must have been loaded."""

        def step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(batches)

            def head(output: OutputLayer) -> Tensor:
                return torch.stack(self.logprob_entropy(output, batch.targets))

            def collect(found: Tensor, non_loss_data: bool = True) -> tuple[list[int], Tensor]:
                return batch.index, found.cpu()

            return model(batch, head), collect

        parts = self._run(step, samples, forward_only=True)
        out: list[Any] = [None] * len(samples) if self.layout.last_stage else []
        for index, found in parts:
            for i, part in zip(index, found.split([samples[i].tokens for i in index], dim=1), strict=True):
                out[i] = (part[0].numpy(), part[1].numpy())
        return out

    def update(
        self,
        samples: Sequence[Sample],
        loss: Loss,
        *,
        reported: int,
        count: Callable[[Sample], int] = lambda sample: sample.tokens,
    ) -> Update:
        """One optimizer update on this shard's `samples`, whose images must have been loaded, and those of the other shards.

        The gradient is that of the summed losses divided by the sum of `count` over all samples of all shards (the response
        tokens), whatever the layout and the micro-batches.  reported: K, how many sums `loss` reports.
        """
        for chunk in self._ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(batches)
            sums: list[Tensor] = []

            def head(output: OutputLayer) -> Tensor:
                value, found = loss(output, batch)
                sums.append(found)
                return value

            def reduce(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                counted = sum(count(samples[i]) for i in batch.index)
                return value, torch.tensor(counted, dtype=torch.int, device=value.device), sums[0]

            return model(batch, head), reduce

        parts = self._run(step, samples, forward_only=False)
        totals = torch.zeros(reported + 1, dtype=torch.float64)
        if self.layout.reports:
            totals[0] = sum(count(s) for s in samples)
            totals[1:] = torch.stack(parts).sum(0).cpu()
        sums = self.layout.sum(totals).numpy()
        found_inf = self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        applied = not found_inf and math.isfinite(grad_norm) and sums[0] > 0
        if applied:
            applied = bool(self.optimizer.step()[0])
        return Update(denominator=int(sums[0]), sums=sums[1:], grad_norm=grad_norm, applied=applied)

    def grpo_loss(
        self, output: OutputLayer, targets: Tensor, prox: Tensor, behave: Tensor, advantages: Tensor
    ) -> tuple[Tensor, LossTerms]:
        """`fused_linear_grpo_loss`, summed, of the run's objective; the output weight's gradient goes to main_grad."""
        settings, weight = self.config.algorithm, output.weight
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return fused_linear_grpo_loss(
            output.hidden,
            weight,
            targets,
            prox,
            behave,
            advantages,
            denominator=1,
            objective=partial(
                surrogate,
                eps_clip=settings.eps_clip,
                eps_clip_high=settings.eps_clip_high,
                c_clip=settings.c_clip,
                behave_weight_cap=settings.behave_weight_cap,
                over_cap=settings.over_cap,
            ),
            entropy_coef=settings.entropy_coef,
            weight_grad=weight.main_grad,  # type: ignore[attr-defined]
            **self._head_options(output),
        )

    def logprob_entropy(self, output: OutputLayer, targets: Tensor) -> tuple[Tensor, Tensor]:
        """`linear_logprob_entropy` of the policy as it is sampled."""
        return linear_logprob_entropy(output.hidden, output.weight, targets, **self._head_options(output))

    def _head_options(self, output: OutputLayer) -> dict[str, Any]:
        return {
            "at": output.at,
            "banned": self._own_banned,
            "temperature": self.config.sampling.temperature,
            "group": self.layout.tp_group,
            "reduce_hidden_grad": output.reduce_hidden_grad,
            "backend": self.config.trainer.loss_backend,
        }

    def advance_lr(self) -> float:
        """Take the next learning rate of the schedule and return it."""
        self.lr_step += 1
        lr = learning_rate(self.optimizer_config, self.lr_step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _run(self, step: Callable[..., Any], samples: Sequence[Sample], *, forward_only: bool) -> list[Any]:
        """Megatron's schedule over micro-batches, each made when its turn comes."""
        settings, parallel = self.config.trainer, self.config.trainer.parallel
        parts = split(samples, settings.max_tokens_per_microbatch, packed=settings.packing) or [[]]
        length = 1  # shapes are exchanged, since they vary
        if parallel.vp > 1:  # the interleaved schedule takes whole rounds of micro-batches of one length
            parts += [[]] * (-len(parts) % parallel.pp)
            length = max(sum(len(samples[i].ids) for i in part) for part in parts)
            length = -(-max(1, length) // self._multiple) * self._multiple
        batches = [self._micro_batches(samples, parts, chunk, length) for chunk in range(parallel.vp)]
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=batches if parallel.vp > 1 else batches[0],
            model=self._ddp,
            num_microbatches=len(parts),
            seq_length=length,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _micro_batches(
        self, samples: Sequence[Sample], parts: Sequence[Sequence[int]], chunk: int, length: int
    ) -> Iterator[MicroBatch]:
        """For a chunk of the model, each made when its turn comes, with at least `length` tokens."""
        for part in parts:
            yield self._micro_batch(samples, part, chunk, length)

    @property
    def _multiple(self) -> int:
        """Of which every micro-batch's length is."""
        return self.layout.tp if self.config.trainer.parallel.sequence_parallel else 1

    def _micro_batch(self, samples: Sequence[Sample], part: Sequence[int], chunk: int, length: int) -> MicroBatch:
        layout, settings = self.layout, self.config.trainer
        batch = collate(
            samples,
            part,
            packed=settings.packing,
            multiple=self._multiple,
            least=length,
            merge_size=self.processor.merge_size if layout.first_stage and chunk == 0 else None,
            device=layout.device,
        )
        if batch.images:  # decoded by the lead alone, and sent on as bytes
            patches = torch.empty(0)
            if self.pixels is not None:
                patches = torch.cat(self.pixels.get(batch.images))
            rows = sum(h * w for _, h, w in batch.images.values())
            patches = layout.to_stage(patches, (rows, 3 * self.processor.patch_size**2))
            batch.patches = self.processor.normalise(patches)
        return batch
