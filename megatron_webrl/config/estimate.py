"""What a trainer rank holds and computes, from the configuration alone: to choose a layout before any GPU is asked for.

Formulas count what the local layers of `trainer/model.py` keep for the backward pass; transformer-engine's fused layers
keep less, so there it is an upper bound.  Not counted: the CUDA context, allocator waste, NCCL's buffers, and what one layer
needs while it is computed.  Imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from megatron_webrl.config.checks import check_layout, model_shape
from megatron_webrl.config.models import RunConfig, TrainerConfig
from megatron_webrl.errors import UserError

RESPONSE_TOKENS = 256
TEXT_TOKENS = 1024
"""Of a row, where the caller does not say: about what web agents write and read besides screenshots."""
LOGIT_COPIES = 2
"""float32 logits of a chunk of the fused loss, and what is made of them."""


class Workload(NamedTuple):
    """A typical row."""

    text: int
    """Prompt tokens besides images."""
    response: int
    images: int
    patches: int
    """Of one image, before merging."""


class RankEstimate(NamedTuple):
    """Of one rank of a pipeline stage; bytes."""

    parameters: int
    """Number of parameters that this rank holds."""
    weights: int
    gradients: int
    """float32, as they are accumulated."""
    optimizer: int
    """Moments, and float32 copies of bfloat16 weights."""
    activations: int
    """Kept for the backward pass of the micro-batches in flight."""
    logits: int
    """The last stage's chunk of logits; 0 elsewhere."""
    flops: float
    """Floating point operations of this rank for one full micro-batch, forward and backward."""

    @property
    def total(self) -> int:
        """Bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


class Dimensions(NamedTuple):
    """Sizes of a Qwen3-VL."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    tied: bool
    deepstack: int
    depth: int
    """Of the vision tower, as all below."""
    width: int
    inner: int
    patch_values: int
    """Values of a patch of one frame, C·P·P."""
    positions: int
    merge: int
    """Patches that become a token."""

    @classmethod
    def read(cls, path: Path) -> Dimensions:
        """From config.json.  Raises UserError if it is missing, of another architecture, or lacks a size."""
        shape = model_shape(path)
        data = json.loads((path / "config.json").read_text())
        text, vision = data["text_config"], data["vision_config"]
        try:
            return cls(
                hidden=text["hidden_size"],
                intermediate=text["intermediate_size"],
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=text["head_dim"],
                layers=shape.layers,
                vocab=shape.vocab,
                tied=bool(data.get("tie_word_embeddings", False)),
                deepstack=shape.deepstack,
                depth=vision["depth"],
                width=vision["hidden_size"],
                inner=vision["intermediate_size"],
                patch_values=vision["in_channels"] * vision["patch_size"] ** 2,
                positions=vision["num_position_embeddings"],
                merge=vision["spatial_merge_size"] ** 2,
            )
        except KeyError as error:
            raise UserError(f"model.path={path}: config.json has no {error}: fetch the model again") from None


def workload(config: RunConfig, dimensions: Dimensions) -> Workload:
    """What the configuration says of rows: screenshots of `browser.view`, as many as `agent.history_window`."""
    side = int((dimensions.patch_values // 3) ** 0.5)
    width, height = config.browser.view
    merge = side * int(dimensions.merge**0.5)
    patches = max(1, round(width / merge)) * max(1, round(height / merge)) * dimensions.merge
    response = min(RESPONSE_TOKENS, config.sampling.max_new_tokens)
    return Workload(TEXT_TOKENS, response, config.agent.history_window, patches)


def estimate(config: RunConfig, row: Workload | None = None) -> list[RankEstimate]:
    """One estimate a pipeline stage (its tensor- and data-parallel ranks are alike), for full micro-batches of `row`s.

    Raises UserError for a layout that does not fit the model.
    """
    check_layout(config, model_shape(config.model.path))
    sizes = Dimensions.read(config.model.path)
    row = row or workload(config, sizes)
    trainer = config.trainer
    parallel = trainer.parallel
    chunks = parallel.stage_layers(sizes.layers)
    length = row.text + row.response + row.images * row.patches // sizes.merge
    rows = max(1, trainer.max_tokens_per_microbatch // length)
    out = []
    for stage in range(parallel.pp):
        layers = sum(chunks[stage :: parallel.pp])
        first, last = stage == 0, stage == parallel.pp - 1
        parameters = _parameters(sizes, layers, first, last, parallel.tp)
        state = parameters * (12 if trainer.dtype == "bfloat16" else 8)
        ahead = parallel.pp - stage - 1
        if parallel.vp == 1:
            whole = embedded = ahead + 1.0
        else:  # of its chunks, and of the first one, which holds the vision tower
            whole, embedded = (2 * ahead + (parallel.vp - 1) * parallel.pp + 1) / parallel.vp, 2.0 * parallel.pp
        kept = whole * _decoder_activations(sizes, trainer, layers, rows * length)
        kept += embedded * _vision_activations(sizes, trainer, rows * row.images * row.patches) if first else 0
        kept += _head_activations(sizes, trainer, rows * length, rows * row.response) if last else 0
        columns = -(-sizes.vocab // parallel.tp)
        chunk = min(rows * row.response, 4096 if config.device != "cpu" else max(224, (16 << 20) // columns))
        out.append(
            RankEstimate(
                parameters=parameters,
                weights=parameters * _width(trainer),
                gradients=parameters * 4,
                optimizer=state // parallel.dp if parallel.distributed_optimizer else state,
                activations=int(kept),
                logits=LOGIT_COPIES * 4 * chunk * columns if last else 0,
                flops=_flops(sizes, trainer, layers, first, last, rows, length, row),
            )
        )
    return out


def _parameters(d: Dimensions, layers: int, first: bool, last: bool, tp: int) -> int:
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    layer = (d.hidden * (2 * q + 2 * kv) + 3 * d.hidden * d.intermediate) // tp + 2 * d.hidden + 2 * d.head_dim
    total = layers * layer
    embedding = -(-d.vocab // tp) * d.hidden
    if first:
        total += embedding + _vision_parameters(d)
    if last:
        total += d.hidden
        if not d.tied or not first:  # tied embeddings have a copy on the last stage
            total += embedding
    return total


def _vision_parameters(d: Dimensions) -> int:
    """Replicated over tensor parallelism."""
    block = 4 * d.width + d.width * (3 * d.width + 3) + d.width * (d.width + 1)
    block += d.inner * (d.width + 1) + d.width * (d.inner + 1)
    merged = d.width * d.merge
    merger = merged * (merged + 1) + d.hidden * (merged + 1)
    mergers = (merger + 2 * d.width) + d.deepstack * (merger + 2 * merged)  # deepstack's norm comes after the merge
    return d.width * (2 * d.patch_values + 1) + d.positions * d.width + d.depth * block + mergers


def _decoder_activations(d: Dimensions, trainer: TrainerConfig, layers: int, tokens: int) -> int:
    """Bytes kept by one micro-batch in so many layers."""
    parallel = trainer.parallel
    b, shards = _width(trainer), parallel.tp if parallel.sequence_parallel else 1
    q, kv, inner = (n // parallel.tp for n in (d.heads * d.head_dim, d.kv_heads * d.head_dim, d.intermediate))
    norm = (4 + b) * d.hidden // shards  # its input in float32, and the normalised
    head_norm = (4 + b) * (q + kv)
    # input of the projection; q, k, v; norms; cosines and sines; rotated q and k; attended, and that joined
    attention = norm + b * (d.hidden // shards + q + 2 * kv + 4 * d.head_dim + q + kv + 2 * q) + head_norm
    mlp = b * 5 * inner  # gate and up together, gate activated, up again, their product
    layer = attention + norm + b * d.hidden // shards + mlp
    if trainer.recompute == "selective":
        layer -= mlp
    elif trainer.recompute == "full":
        layer = b * d.hidden // shards
    return tokens * layers * layer


def _vision_activations(d: Dimensions, trainer: TrainerConfig, patches: int) -> int:
    """Bytes kept by the vision tower for one micro-batch."""
    b = _width(trainer)
    block = b * (11 * d.width + 2 * d.inner)
    if trainer.recompute == "selective":
        block -= b * 2 * d.inner
    elif trainer.recompute == "full":
        block = b * d.width
    return patches * (4 * d.patch_values + d.depth * block + (1 + d.deepstack) * b * 6 * d.width)


def _head_activations(d: Dimensions, trainer: TrainerConfig, tokens: int, response: int) -> int:
    """Bytes kept by the last norm, and of the rows that predict; of one micro-batch, whatever is in flight."""
    b, parallel = _width(trainer), trainer.parallel
    return tokens * (4 + b) * d.hidden // (parallel.tp if parallel.sequence_parallel else 1) + b * response * d.hidden


def _width(trainer: TrainerConfig) -> int:
    """Bytes of a weight or an activation."""
    return 2 if trainer.dtype == "bfloat16" else 4


def _flops(
    d: Dimensions, trainer: TrainerConfig, layers: int, first: bool, last: bool, rows: int, length: int, row: Workload
) -> float:
    """Matrix products count 2 operations a multiplication; causal attention half of all pairs; backward twice forward."""
    tp, tokens = trainer.parallel.tp, rows * length
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    mlp = 2.0 * 3 * d.hidden * d.intermediate
    layer = 2.0 * d.hidden * (2 * q + 2 * kv) + mlp + 2.0 * length * q
    again = {"none": 0.0, "selective": mlp, "full": layer}[trainer.recompute]
    total = tokens * layers * (3 * layer + again) / tp
    if last:
        total += 3 * 2.0 * rows * row.response * d.hidden * d.vocab / tp
    if first:
        block = 2.0 * (4 * d.width**2 + 2 * d.width * d.inner) + 4.0 * row.patches * d.width
        merged = d.width * d.merge
        merger = 2.0 * (merged**2 + merged * d.hidden) / d.merge
        vision = d.depth * block + (1 + d.deepstack) * merger + 2.0 * d.patch_values * d.width
        again = {"none": 0.0, "selective": 4.0 * d.width * d.inner, "full": block}[trainer.recompute]
        total += rows * row.images * row.patches * (3 * vision + d.depth * again)
    return total
