"""This trainer against plain transformers with AdamW: the same model, the same ragged rows, the same update.

    python -m benchmarks.trainer [--rows 16] [--steps 3] [--rounds 1] [--threads 1] [--cases …] [--json FILE]

A Qwen3-VL of 9 M parameters; every row has an image of 64 tokens and 23 to 287 tokens of text, a quarter of which is the
response; an update is AdamW on the mean cross entropy of the response tokens.  Each case runs in a process of its own, the
rounds take turns, and the best round counts.  `samples_per_cpu_second`: rows per second of processor time of all threads;
`peak_bytes`: most memory above what the imports took: weights, gradients, optimizer, activations.

  transformers_padded   Qwen3VLForConditionalGeneration on all rows at once, padded to the longest
  transformers_single   the same, row by row, gradients accumulated
  ours_padded           trainer.packing=false
  ours_packed           trainer.packing=true
  ours_packed_full      and trainer.recompute=full

The losses of the first two updates are compared as well: all cases must do the same work.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._table import report, row
from benchmarks.loss import resident_peak

ROOT = Path(__file__).parent.parent
CASES = ["transformers_padded", "transformers_single", "ours_padded", "ours_packed", "ours_packed_full"]
LR = 1e-4
TEXT_TOKENS = (23, 287)
IMAGE_PIXELS = 256


def make_model(directory: Path) -> Path:
    """The tiny model's tokenizer and processor, around 9 M parameters."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    from megatron_webrl.tiny_model import make_tiny_model

    texts = [f"Click the button {i}." for i in range(400)]
    make_tiny_model(directory, texts, image_tokens=(64, 64))
    config = Qwen3VLConfig.from_pretrained(directory)
    text, vision = config.text_config, config.vision_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = 256, 768, 8
    text.num_attention_heads, text.num_key_value_heads, text.head_dim = 8, 4, 32
    vision.depth, vision.hidden_size, vision.intermediate_size, vision.num_heads = 4, 128, 512, 4
    vision.out_hidden_size = 256
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(directory)
    return directory


def make_rows(directory: Path, count: int) -> tuple[list[Any], dict[str, bytes]]:
    """Rows of ragged length with a screenshot each, and the screenshots by digest."""
    import io

    from PIL import Image

    from megatron_webrl.processor import Processor
    from megatron_webrl.trainer import Row
    from megatron_webrl.trajectory import ImageRef, image_digest

    rng = np.random.default_rng(0)
    processor = Processor.load(directory)
    allowed = np.setdiff1d(np.arange(processor.vocab_size), processor.banned_ids()).astype(np.int32)
    image = processor.encode("<|vision_start|><|image_pad|><|vision_end|>")
    rows, images = [], {}
    for i, length in enumerate(np.linspace(*TEXT_TOKENS, count).astype(int)):
        buffer = io.BytesIO()
        pixels = rng.integers(0, 255, (IMAGE_PIXELS, IMAGE_PIXELS, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(buffer, "PNG")
        digest = image_digest(buffer.getvalue())
        images[digest] = buffer.getvalue()
        ref = ImageRef(digest, IMAGE_PIXELS, IMAGE_PIXELS, processor.grid(IMAGE_PIXELS, IMAGE_PIXELS))
        text = rng.choice(allowed, length)
        response = text[length - length // 4 :]
        prompt = np.concatenate([image, text[: length - len(response)]]).astype(np.int32)
        zeros = np.zeros(len(response), np.float32)
        rows.append(Row(prompt, [ref], response, zeros, zeros.astype(np.int32), 0.0, f"row {i}"))
    return rows, images


def by_transformers(directory: Path, count: int, *, single: bool) -> Callable[[], float]:
    """One update, which returns its loss."""
    import io

    import torch
    from PIL import Image
    from transformers import AutoImageProcessor, Qwen3VLForConditionalGeneration

    from megatron_webrl.processor import Processor

    model = Qwen3VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    processor = Processor.load(directory)
    rows, images = make_rows(directory, count)
    patches = AutoImageProcessor.from_pretrained(str(directory))
    decoded = {d: Image.open(io.BytesIO(data)).convert("RGB") for d, data in images.items()}
    banned = torch.from_numpy(processor.banned_ids().astype(np.int64))
    plain = [p for p in model.parameters() if p.ndim < 2]
    others = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": others, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=LR
    )
    tokens = sum(len(r.response_ids) for r in rows)
    batches = []
    for part in [[r] for r in rows] if single else [rows]:
        whole = [np.concatenate([processor.expand(r.prompt_ids, [r.images[0].grid]), r.response_ids]) for r in part]
        longest = max(map(len, whole))
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        mask, wanted = torch.zeros_like(ids), torch.zeros_like(ids)
        for b, (full, r) in enumerate(zip(whole, part, strict=True)):
            ids[b, : len(full)] = torch.from_numpy(full.astype(np.int64))
            mask[b, : len(full)] = 1
            wanted[b, len(full) - len(r.response_ids) : len(full)] = 1
        seen = patches(images=[decoded[r.images[0].digest] for r in part], return_tensors="pt")
        kind = (ids == processor.image_token_id).int()
        batches.append(({"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": kind, **seen}, wanted.bool()))

    def update() -> float:
        optimizer.zero_grad()
        total = 0.0
        for inputs, wanted in batches:
            logits = model(**inputs).logits[:, :-1][wanted[:, 1:]]
            logits = logits.index_fill(1, banned, float("-inf"))
            loss = torch.nn.functional.cross_entropy(logits, inputs["input_ids"][wanted], reduction="sum") / tokens
            loss.backward()
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return update


def by_ours(directory: Path, count: int, *, packing: bool, recompute: str) -> Callable[[], float]:
    """The same through `PolicyTrainer.sft_step`."""
    from megatron_webrl.config import validate
    from megatron_webrl.trainer import PolicyTrainer

    config = validate(
        {
            "device": "cpu",
            "model": {"path": str(directory)},
            "tasks": {"names": ["click-test"]},
            "trainer": {
                "dtype": "float32",
                "packing": packing,
                "recompute": recompute,
                "max_tokens_per_microbatch": 16_384,
                "optimizer": {"lr": LR},
            },
        },
        "benchmark",
    )
    place = {"rank": 0, "world_size": 1, "master_address": "127.0.0.1", "master_port": 0}
    trainer = PolicyTrainer(config, **place, total_steps=1000)
    rows, images = make_rows(directory, count)
    return lambda: trainer.sft_step(rows, lambda digests: {d: images[d] for d in digests})["sft/loss"]


def measure(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """In this process: losses of the first updates, then processor seconds and memory of the following ones."""
    import torch
    import transformers  # noqa: F401

    import megatron_webrl.trainer  # noqa: F401  (its imports are part of the base line of either)

    torch.set_num_threads(arguments.threads)
    torch.randn(64, 64) @ torch.randn(64, 64)
    before = resident_peak()
    if case.startswith("transformers"):
        update = by_transformers(arguments.model, arguments.rows, single=case.endswith("single"))
    else:
        recompute = "full" if case.endswith("full") else "none"
        update = by_ours(arguments.model, arguments.rows, packing="packed" in case, recompute=recompute)
    torch.set_num_threads(arguments.threads)
    losses = [update() for _ in range(2)]
    began = time.process_time()
    for _ in range(arguments.steps):
        update()
    seconds = (time.process_time() - began) / arguments.steps
    return {"losses": losses, "cpu_seconds": seconds, "peak_bytes": float(resident_peak() - before)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3, help="measured updates a round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments)))
        return
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        for _ in range(arguments.rounds):
            for case in arguments.cases:
                line = [sys.executable, "-m", "benchmarks.trainer", "--only", case, "--model", str(model)]
                for name in ("rows", "steps", "threads"):
                    line += [f"--{name}", str(getattr(arguments, name))]
                done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=1800)
                if done.returncode:
                    raise SystemExit(f"{case} failed: {done.stderr.strip().splitlines()[-1]}")
                measured = json.loads(done.stdout.splitlines()[-1])
                earlier = found.setdefault(case, measured)
                for metric in ("cpu_seconds", "peak_bytes"):
                    earlier[metric] = min(earlier[metric], measured[metric])
    first = next(iter(found.values()))["losses"]
    for case, metrics in found.items():
        if not np.allclose(metrics["losses"], first, rtol=1e-4):
            raise SystemExit(f"{case} does other work: losses {metrics['losses']} instead of {first}")
    rows = []
    for case, metrics in found.items():
        rows.append(row(case, "samples_per_cpu_second", arguments.rows / metrics["cpu_seconds"], "1/s"))
        rows.append(row(case, "peak_bytes", metrics["peak_bytes"], "B"))
    base = found.get("transformers_padded")
    for case, metrics in found.items():
        if base is not None and metrics is not base:
            name = f"{case} / transformers_padded"
            rows.append(row(name, "samples_per_cpu_second", base["cpu_seconds"] / metrics["cpu_seconds"], "ratio"))
            rows.append(row(name, "peak_bytes", metrics["peak_bytes"] / base["peak_bytes"], "ratio"))
    report(rows, arguments.json)


if __name__ == "__main__":
    main()
