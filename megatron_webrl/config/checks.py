"""Checks of a configuration against what is on disk: done before anything expensive starts, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from megatron_webrl.config.models import ParallelConfig, RunConfig
from megatron_webrl.errors import UserError


class ModelShape(NamedTuple):
    """What the layout checks need of a Hugging Face config.json."""

    heads: int
    kv_heads: int
    layers: int
    vocab: int
    deepstack: int
    """Decoder layers that take deepstack features, from the first."""


def model_shape(path: Path) -> ModelShape:
    """Read config.json of a Qwen3-VL.  Raises UserError if it is missing, unreadable or of another architecture."""
    file = path / "config.json"
    if not path.is_dir():
        what = "is no directory" if path.exists() else "does not exist"
        raise UserError(f"model.path={path} {what}: give a Hugging Face directory of a Qwen3-VL")
    try:
        data = json.loads(file.read_text())
        if data.get("model_type") != "qwen3_vl":
            raise UserError(
                f"model.path={path} holds a {data.get('model_type')!r}: only dense Qwen3-VL (qwen3_vl) is supported"
            )
        text, vision = data["text_config"], data["vision_config"]
        return ModelShape(
            heads=text["num_attention_heads"],
            kv_heads=text["num_key_value_heads"],
            layers=text["num_hidden_layers"],
            vocab=text["vocab_size"],
            deepstack=len(vision["deepstack_visual_indexes"]),
        )
    except OSError:
        raise UserError(f"model.path={path} has no config.json: give a Hugging Face directory of a Qwen3-VL") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"model.path={path}: config.json is malformed ({error!r}): fetch the model again") from None


def check_files(config: RunConfig) -> ModelShape:
    """Model directory, layout against the model's shape.  Raises UserError."""
    path = config.model.path
    shape = model_shape(path)
    for name in ("tokenizer.json", "preprocessor_config.json"):
        if not (path / name).exists() and not (
            name == "preprocessor_config.json" and (path / "processor_config.json").exists()
        ):
            raise UserError(
                f"model.path={path} has no {name}: copy the tokenizer and processor files next to the weights"
            )
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(f"model.path={path} has no *.safetensors: give a complete Hugging Face directory")
    for file in files:
        _check_whole(file, path)
    check_layout(config, shape)
    return shape


def _check_whole(file: Path, model: Path) -> None:
    """Raises UserError if a safetensors file is not as long as its own header says."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        found = file.stat().st_size
        if found == 8 + length + end:
            return
        problem = f"it has {found} bytes, its header says {8 + length + end}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        problem = f"its header is malformed ({type(error).__name__})"
    raise UserError(f"model.path={model}: {file.name} is not whole: {problem}: fetch it again")


def check_layout(config: RunConfig, shape: ModelShape) -> None:
    """Whether the layouts of trainer and engines fit a model of that shape.  Raises UserError."""
    check_parallel(config.trainer.parallel, shape)
    _check_heads("engine.tp", config.engine.tp, shape, shape.heads)


def check_parallel(parallel: ParallelConfig, shape: ModelShape) -> None:
    """Whether the trainer's layout fits a model of that shape.  Raises UserError."""
    _check_heads("trainer.parallel.tp", parallel.tp, shape, shape.heads, shape.kv_heads)
    try:
        first = parallel.stage_layers(shape.layers)[0]
    except ValueError as error:
        raise UserError(str(error)) from None
    if shape.deepstack > first:
        keys = {"vp": "chunk", "first_stage_layers": "stage", "pp": "stage"}
        uneven = parallel.first_stage_layers is not None
        key = "vp" if parallel.vp > 1 else "first_stage_layers" if uneven else "pp"
        remedy = f"give at least {shape.deepstack}" if uneven else f"use a smaller {key}"
        raise UserError(
            f"trainer.parallel.{key}={getattr(parallel, key)} leaves {first} decoder layers in the first {keys[key]}, but "
            f"{shape.deepstack} take deepstack features: {remedy}"
        )


def _check_heads(key: str, tp: int, shape: ModelShape, *divided: int) -> None:
    if any(count % tp for count in divided):
        raise UserError(
            f"{key}={tp} does not divide the model's {shape.heads} attention heads and {shape.kv_heads} key-value heads: "
            f"use one of {[n for n in range(1, shape.kv_heads + 1) if shape.heads % n == 0 and shape.kv_heads % n == 0]}"
        )
