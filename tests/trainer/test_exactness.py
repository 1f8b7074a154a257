"""Exactness: logits and the gradient of every parameter are those of transformers, whatever the layout.

The reference is Qwen3VLForConditionalGeneration on each row by itself, with the mean cross entropy of all response tokens;
rows have no image, one, or two of different sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from exported import exported
from megatron.core import tensor_parallel
from on_ranks import free_ports, on_ranks
from ranks import picture, run_config
from reference_pixels import reference_pixels

from megatron_webrl.processor import Processor
from megatron_webrl.trainer import PolicyTrainer
from megatron_webrl.trainer.batch import Row
from megatron_webrl.trainer.model import OutputLayer
from megatron_webrl.trajectory import ImageRef, image_digest

LOGITS = 5e-6
"""Largest difference of a logit."""
GRADIENT = 1e-5
"""Relative L2 difference of a tensor's gradient …"""
FLOOR = 1e-8
"""… or its root mean square difference, where the gradient itself is next to nothing."""

Case = dict[str, Any]
"""Sections of trainer: parallel, packing, recompute."""


def cases(world_size: int) -> list[Case]:
    """Packed and padded in every layout, and each mode of recomputation in one."""
    layouts: dict[int, list[dict[str, Any]]] = {
        1: [{}],
        2: [
            {"tp": 2},
            {"tp": 2, "sequence_parallel": True},
            {"pp": 2},
            {"pp": 2, "first_stage_layers": 3},
            {"dp": 2},
            {"dp": 2, "overlap_grad_reduce": True},
        ],
        4: [
            {"tp": 2, "pp": 2, "sequence_parallel": True},
            {"tp": 2, "dp": 2},
            {"pp": 2, "dp": 2},
        ],
    }
    out = [{"parallel": p, "packing": packed} for p, packed in product(layouts[world_size], (True, False))]
    recomputed = {1: {}, 2: {"tp": 2, "sequence_parallel": True}, 4: layouts[4][0]}[world_size]
    return out + [{"parallel": recomputed, "packing": True, "recompute": mode} for mode in ("selective", "full")]


QUICK: dict[int, list[tuple[int, Case]]] = {
    1: [(0, {}), (1, {"packing": False}), (0, {"recompute": "full"})],
    4: [
        (0, {"parallel": {"tp": 2, "pp": 2, "sequence_parallel": True}}),
        (1, {"parallel": {"tp": 2, "dp": 2}}),
        (2, {"parallel": {"pp": 2, "vp": 2, "dp": 2}}),
    ],
}
"""Model (0: tied, 1: untied, 2: eight layers) and case, by world size."""


class Material(NamedTuple):
    rows: list[Row]
    images: dict[str, bytes]

    def fetch(self, digests: list[str]) -> dict[str, bytes]:
        return {digest: self.images[digest] for digest in digests}


def material(processor: Processor) -> Material:
    """Rows with 0, 1 and 2 images of different lengths; the odd ones, which are one shard's with two, have none."""
    rng = np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(processor.vocab_size), processor.banned_ids())
    shots = {size: picture(rng, *size) for size in ((96, 128), (160, 128), (128, 96))}
    images = {image_digest(data): data for data in shots.values()}
    refs = [ImageRef(image_digest(data), *size, processor.grid(*size)) for size, data in shots.items()]
    rows = []
    for i, seen in enumerate(([refs[0]], [], [refs[1], refs[2]], [], [refs[0], refs[1]], [], [refs[0]])):
        text = "<|im_start|>user\n" + "<|vision_start|><|image_pad|><|vision_end|>" * len(seen)
        prompt = processor.encode(text + "Click the button." * (1 + i % 3) + "<|im_end|>\n<|im_start|>assistant\n")
        response = rng.choice(allowed, 3 + 5 * i).astype(np.int32)
        none = np.zeros(len(response), np.float32)
        rows.append(Row(np.array(prompt, np.int32), seen, response, none, none.astype(np.int32), 0.0, f"row {i}"))
    return Material(rows, images)


class Found(NamedTuple):
    logits: dict[int, torch.Tensor]
    """[R, V] of each row's response tokens."""
    loss: float
    gradients: dict[str, torch.Tensor]


def by_transformers(directory: Path) -> Found:
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    processor = Processor.load(directory)
    rows, images = material(processor)
    logits, total, tokens = {}, torch.zeros(()), 0
    banned = torch.from_numpy(processor.banned_ids().astype(np.int64))
    for i, row in enumerate(rows):
        seen: dict[str, Any] = {}
        response = torch.from_numpy(row.response_ids.astype(np.int64))
        prompt = processor.expand(row.prompt_ids, [r.grid for r in row.images]).astype(np.int64)
        ids = torch.cat([torch.from_numpy(prompt), response])[None]
        if row.images:
            pixels, grids = reference_pixels(directory, [images[r.digest] for r in row.images])
            kind = (ids == processor.image_token_id).int()
            seen = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kind}
        found = model(input_ids=ids, **seen).logits[0, -len(response) - 1 : -1]
        logits[i] = found.detach()
        logp = found.index_fill(1, banned, float("-inf")).log_softmax(-1).gather(1, response[:, None])
        total, tokens = total - logp.sum(), tokens + len(response)
    (total / tokens).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Found(logits, float(total.detach()) / tokens, gradients)


def full_logits(trainer: PolicyTrainer, output: OutputLayer) -> torch.Tensor:
    """[N, V] on every tensor-parallel rank."""
    hidden, tp = output.hidden.detach(), trainer.layout.tp
    if output.reduce_hidden_grad == "reduce_scatter":
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
    local = hidden[output.at] @ output.weight.detach().T
    parts = [torch.empty_like(local) for _ in range(tp)]
    torch.distributed.all_gather(parts, local, group=trainer.layout.tp_group)
    return torch.cat(parts, 1)[:, : trainer.processor.vocab_size]


def by_trainer(case: Case, directory: Path, place: dict[str, Any], budget: int = 400) -> Found:
    """Of this rank: logits and gradients where it holds them."""
    options = {"optimizer": {"lr": 1e-3, "clip_grad": 0.0}, "max_tokens_per_microbatch": budget, **case}
    trainer = PolicyTrainer(run_config(directory, trainer=options), **place, total_steps=9)
    try:
        given = material(trainer.processor)
        rows = given.rows
        mine = list(range(trainer.layout.dp_rank, len(rows), trainer.layout.dp))
        samples = [trainer.prepare(rows[i]) for i in mine]
        trainer.load_images(samples, given.fetch)
        logits: dict[int, torch.Tensor] = {}

        def loss(output: OutputLayer, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            found = full_logits(trainer, output).split([samples[i].tokens for i in batch.index])
            logits.update({mine[i]: part for i, part in zip(batch.index, found, strict=True)})
            logp, _ = trainer.logprob_entropy(output, batch.targets)
            return -logp.sum(), -logp.detach().double().sum()[None]

        update = trainer.update(samples, loss, reported=1)
        with torch.no_grad():  # gradients are exported by the mapping of the weights: put them in the parameters' place
            for parameter in trainer.parameters():
                parameter.copy_(parameter.main_grad)
        return Found(logits, float(update.sums[0]) / update.denominator, exported(trainer))
    finally:
        trainer.close()


def by_trainers(rank: int, ranks: int, jobs: list[tuple[Path, Case]], ports: list[int]) -> list[Found]:
    place = {"rank": rank, "world_size": ranks, "master_address": "127.0.0.1"}
    return [by_trainer(case, path, {**place, "master_port": p}) for (path, case), p in zip(jobs, ports, strict=True)]


def check(found: list[Found], want: Found, case: Case) -> None:
    """found: of every rank."""
    logits = {i: part for rank in found for i, part in rank.logits.items()}
    assert logits.keys() == want.logits.keys()
    for i, part in logits.items():
        assert (part - want.logits[i]).abs().max() <= LOGITS, (case, i)
    assert all(rank.loss == pytest.approx(want.loss, rel=1e-6) for rank in found), case
    gradients = found[0].gradients
    assert set(want.gradients) == set(gradients), case
    for name, got in gradients.items():
        expected = want.gradients[name]
        off = float((got - expected).norm())
        allowed = max(GRADIENT * float(expected.norm()), FLOOR * expected.numel() ** 0.5)
        assert off <= allowed, (case, name, off, float(expected.norm()))


@pytest.fixture(scope="module")
def models(deep_model_dir: Path, untied_model_dir: Path, long_model_dir: Path) -> list[tuple[Path, Found]]:
    """Tied, untied, and with eight layers; with what transformers finds."""
    directories = (deep_model_dir, untied_model_dir, long_model_dir)
    return [(directory, by_transformers(directory)) for directory in directories]


def compare(models: list[tuple[Path, Found]], chosen: list[tuple[int, Case]], world_size: int) -> None:
    jobs = [(models[model][0], case) for model, case in chosen]
    found = on_ranks(by_trainers, world_size, jobs, free_ports(len(jobs)), preload="megatron_webrl.trainer")
    for i, (model, case) in enumerate(chosen):
        check([rank[i] for rank in found], models[model][1], case)


@pytest.mark.parametrize("world_size", list(QUICK))
def test_a_few_layouts_are_exact(world_size: int, models: list[tuple[Path, Found]]) -> None:
    """In micro-batches of which some have images and some not, on shards of which one has none at all."""
    compare(models, QUICK[world_size], world_size)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_those_of_the_sampling_temperature(
    temperature: float, models: list[tuple[Path, Found]], make: Callable[..., PolicyTrainer]
) -> None:
    """log softmax(z / T) at the given token, tokens that are never sampled at −∞: what the engine samples from."""
    directory, reference = models[1]
    trainer = make(directory, sampling={"temperature": temperature})
    given = material(trainer.processor)
    rows = given.rows
    banned = torch.from_numpy(trainer.processor.banned_ids().astype(np.int64))
    for i, found in enumerate(trainer.logprobs(rows, given.fetch)):
        z = reference.logits[i].double().index_fill(1, banned, float("-inf"))
        response = torch.from_numpy(rows[i].response_ids.astype(np.int64))
        expected = (z / temperature).log_softmax(1).gather(1, response[:, None])[:, 0]
        assert np.abs(found - expected.numpy()).max() <= LOGITS / temperature, i


@pytest.mark.e2e
@pytest.mark.timeout(400)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_layouts_are_exact(world_size: int, models: list[tuple[Path, Found]]) -> None:
    """Tied and untied, each in all cases; and virtual pipelines."""
    chosen = [(model, case) for model in (0, 1) for case in cases(world_size)]
    virtual: dict[int, list[dict[str, Any]]] = {
        1: [],
        2: [{"pp": 2, "vp": 2}, {"pp": 2, "vp": 2, "overlap_grad_reduce": True}],
        4: [{"tp": 2, "pp": 2, "vp": 2, "sequence_parallel": True}, {"pp": 4, "vp": 1}],
    }
    compare(models, chosen + [(2, {"parallel": parallel}) for parallel in virtual[world_size]], world_size)
