"""The estimate of a layout against models that are built and micro-batches that are run: within 15%."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import free_ports, on_ranks
from ranks import picture, run_config

from megatron_webrl.config import Workload, estimate
from megatron_webrl.errors import UserError
from megatron_webrl.trainer import PolicyTrainer
from megatron_webrl.trainer.batch import Row
from megatron_webrl.trajectory import ImageRef, image_digest

ROWS, TEXT, RESPONSE = 4, 120, 40
PIXELS = (160, 128)
PATCHES = 80

Case = dict[str, Any]


def sections(case: Case) -> Case:
    length = TEXT + RESPONSE + PATCHES // 4
    return {"optimizer": {"lr": 1e-3}, "max_tokens_per_microbatch": ROWS * length, **case}


def measure(rank: int, ranks: int, model: Path, cases: list[Case], ports: list[int]) -> list[dict[str, int]]:
    """Of this rank, in each case: its number of parameters, and bytes."""
    place = {"rank": rank, "world_size": ranks, "master_address": "127.0.0.1"}
    return [measured(model, case, {**place, "master_port": p}) for case, p in zip(cases, ports, strict=True)]


def material(trainer: PolicyTrainer) -> tuple[list[Row], dict[str, bytes]]:
    """As many rows as a micro-batch of each shard holds, each with an image of its own."""
    rng = np.random.default_rng(0)
    grid = trainer.processor.grid(*PIXELS)
    assert np.prod(grid) == PATCHES
    pad = trainer.processor.encode("<|image_pad|>")
    ids = trainer.processor.encode("a" * 2000)[: TEXT + RESPONSE]
    zeros = np.zeros(RESPONSE, np.float32)
    rows, images = [], {}
    for _ in range(ROWS * trainer.layout.dp):
        image = picture(rng, *PIXELS)
        ref = ImageRef(image_digest(image), *PIXELS, grid)
        images[ref.digest] = image
        prompt, response = np.array([*pad, *ids[:TEXT]], np.int32), np.array(ids[TEXT:], np.int32)
        rows.append(Row(prompt, [ref], response, zeros, zeros.astype(np.int32), 0.0, "a row"))
    return rows, images


def measured(model: Path, case: Case, place: dict[str, Any]) -> dict[str, int]:
    trainer = PolicyTrainer(run_config(model, trainer=sections(case)), **place, total_steps=3)
    rows, images = material(trainer)
    parameters = list(trainer.parameters())
    weights = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    forward = trainer.chunks[0].forward

    def kept_by_forward(*arguments: Any) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return forward(*arguments)  # without what is kept while the backward pass computes it again

    trainer.chunks[0].forward = kept_by_forward  # type: ignore[method-assign]
    trainer.sft_step(rows, lambda digests: {d: images[d] for d in digests})
    inner = [part.optimizer for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])]
    copies = [p for adam in inner for group in adam.param_groups for p in group["params"]]
    moments = [t for adam in inner for state in adam.state.values() for t in state.values()]
    own = [t for t in copies if t.untyped_storage().data_ptr() not in weights] + moments
    found = {
        "parameters": sum(p.numel() for p in parameters),
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(buffer.grad_data.nbytes for buffer in trainer._ddp[0].buffers),
        "optimizer": sum(t.nbytes for t in own),
        "activations": sum(t.untyped_storage().nbytes() for t in kept.values()),
    }
    trainer.close()
    return found


def check(model: Path, case: Case, found: list[dict[str, int]]) -> None:
    """found: of every rank."""
    stages = estimate(run_config(model, trainer=sections(case)), Workload(TEXT, RESPONSE, 1, PATCHES))
    for rank, got in enumerate(found):
        stage = rank // (len(found) // len(stages))
        want = stages[stage]._asdict()
        want["activations"] //= len(stages) - stage  # one micro-batch was run, not as many as are in flight
        assert got.pop("parameters") == want["parameters"], (case, rank)
        for name, value in got.items():
            assert want[name] == pytest.approx(value, rel=0.15), (case, rank, name)


def test_estimates_are_near_what_is_held(deep_model_dir: Path, untied_model_dir: Path) -> None:
    """Parameters exactly; weights, gradients, optimizer and activations within 15%, tied and untied."""
    alone = {"rank": 0, "world_size": 1, "master_address": "127.0.0.1", "master_port": 0}
    for case in ({}, {"dtype": "bfloat16"}, {"recompute": "selective"}, {"recompute": "full"}):
        check(deep_model_dir, case, [measured(deep_model_dir, case, alone)])
    check(untied_model_dir, {}, [measured(untied_model_dir, {}, alone)])


@pytest.mark.e2e
def test_estimates_of_layouts_are_near_what_their_ranks_hold(deep_model_dir: Path) -> None:
    """The same on every rank of a layout."""
    cases = [
        {"parallel": {"tp": 2, "pp": 2, "sequence_parallel": True}},
        {"parallel": {"tp": 2, "dp": 2, "distributed_optimizer": True}, "dtype": "bfloat16"},
        {"parallel": {"pp": 2, "dp": 2, "first_stage_layers": 3, "distributed_optimizer": True}},
    ]
    found = on_ranks(measure, 4, deep_model_dir, cases, free_ports(len(cases)), preload="megatron_webrl.trainer")
    for i, case in enumerate(cases):
        check(deep_model_dir, case, [rank[i] for rank in found])


def test_it_scales_as_it_should(deep_model_dir: Path) -> None:
    """Against a rank that holds all: tp halves the matrices, dp with the distributed optimizer its state, recomputation
    trades activations for operations; and a layout that does not fit is refused."""
    whole = estimate(run_config(deep_model_dir, trainer=sections({})))[0]
    dp = estimate(run_config(deep_model_dir, trainer={"parallel": {"dp": 4, "distributed_optimizer": True}}))[0]
    assert dp.optimizer * 4 == pytest.approx(whole.optimizer, abs=4)
    assert dp.parameters == whole.parameters
    full = estimate(run_config(deep_model_dir, trainer=sections({"recompute": "full"})))[0]
    assert full.activations < whole.activations and full.flops > whole.flops
    tp = estimate(run_config(deep_model_dir, trainer=sections({"parallel": {"tp": 2}})))[0]
    assert whole.activations / 2 < tp.activations < whole.activations
    assert whole.parameters / 2 < tp.parameters < whole.parameters
    assert whole.total == sum(getattr(whole, n) for n in ("weights", "gradients", "optimizer", "activations", "logits"))
    with pytest.raises(UserError, match=r"trainer\.parallel\.tp=3"):
        estimate(run_config(deep_model_dir, trainer={"parallel": {"tp": 3}}))


SHAPES = {
    "2B": ((2048, 6144, 28, 16), True, (24, 1024, 4096), 2.13),
    "4B": ((2560, 9728, 36, 32), True, (24, 1024, 4096), 4.44),
    "8B": ((4096, 12288, 36, 32), False, (27, 1152, 4304), 8.77),
    "32B": ((5120, 25600, 64, 64), False, (27, 1152, 4304), 33.36),
}
"""Of the published dense models: (hidden, intermediate, layers, heads), tied, vision (depth, hidden, intermediate), and
their parameters in 10⁹."""


@pytest.mark.parametrize("name", list(SHAPES))
def test_published_shapes_have_their_published_parameters(name: str, tmp_path: Path) -> None:
    """Exactly as many as transformers makes of the config, which is what the model is called after; and over the ranks of a
    layout no fewer."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    (hidden, intermediate, layers, heads), tied, (depth, width, inner), billions = SHAPES[name]
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "head_dim": 128}
    text |= {"num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 151_936, "rope_parameters": rope}
    vision = {"depth": depth, "hidden_size": width, "intermediate_size": inner, "num_heads": 16}
    vision |= {"out_hidden_size": hidden, "deepstack_visual_indexes": [5, 11, 17], "num_position_embeddings": 2304}
    hf = Qwen3VLConfig(
        text_config={**text, "tie_word_embeddings": tied}, vision_config=vision, tie_word_embeddings=tied
    )
    with torch.device("meta"):
        expected = sum(p.numel() for p in set(Qwen3VLForConditionalGeneration(hf).parameters()))
    hf.save_pretrained(tmp_path)
    (whole,) = estimate(run_config(tmp_path))
    assert whole.parameters == expected == pytest.approx(billions * 1e9, rel=2e-3)
    stages = estimate(run_config(tmp_path, trainer={"parallel": {"tp": 4, "pp": 4, "distributed_optimizer": True}}))
    assert 4 * sum(stage.parameters for stage in stages) >= whole.parameters
