"""A tiny random Qwen3-VL (1.6 M parameters) with tokenizer and processor, complete as a Hugging Face directory.

It is the real architecture at a size that learns to click on two CPU cores in minutes: small patches tables, white
pixels normalised to zero (mean 1.0, std 0.25), 2-D sine position embeddings.  Its byte-level BPE keeps digits apart and
merges across words, so that the constant parts of a tool call are a token or two: a reply is a dozen tokens, not forty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{% if m.content is string %}{{m.content}}{% else %}"
    "{% for c in m.content %}{% if c.type in ['image', 'image_url'] or 'image' in c %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in c %}{{c.text}}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH, MERGE = 16, 2
HEADS, KV_HEADS, LAYERS = 4, 2, 3
DEEPSTACK = [0, 1]
MAX_VOCAB = 512


def make_tiny_model(
    directory: Path,
    texts: Iterable[str],
    *,
    seed: int = 0,
    max_vocab: int = MAX_VOCAB,
    layers: int = LAYERS,
    tie: bool = True,
    image_tokens: tuple[int, int] = (1, 256),
) -> Path:
    """Write config, weights, tokenizer and processor into `directory` and return it.

    texts: what the byte-level BPE is trained on (special tokens in them are taken out); seed: of the weights;
    max_vocab: tokens at most, the model's vocabulary is padded to a multiple of 64; layers: decoder layers;
    image_tokens: fewest and most tokens an image becomes (the processor resizes to that).
    """
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(texts, max_vocab)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(_config(tokenizer, layers, tie))
        _initialise(model)
    model.generation_config.eos_token_id = tokenizer.token_to_id("<|im_end|>")
    model.save_pretrained(directory)
    fast = PreTrainedTokenizerFast(  # as it is: Qwen's own class would bring its word boundaries back
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
    )
    fast.save_pretrained(directory)
    _save_processor(directory, fast, image_tokens)
    return directory


def _train_tokenizer(texts: Iterable[str], max_vocab: int) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max_vocab - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=2,
    )
    plain = list(texts)
    for token in SPECIAL_TOKENS:
        plain = [text.replace(token, "\n") for text in plain]
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _config(tokenizer: Any, layers: int, tie: bool) -> Any:
    from transformers import Qwen3VLConfig

    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    return Qwen3VLConfig(
        text_config=dict(
            vocab_size=-(-tokenizer.get_vocab_size() // 64) * 64,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=32,
            max_position_embeddings=4096,
            rms_norm_eps=1e-6,
            rope_theta=10_000.0,
            rope_scaling=rope,
            rope_parameters=rope,
            tie_word_embeddings=tie,
            attention_bias=False,
            bos_token_id=ids["<|endoftext|>"],
            eos_token_id=ids["<|im_end|>"],
            initializer_range=0.06,
        ),
        vision_config=dict(
            depth=3,
            hidden_size=96,
            intermediate_size=192,
            num_heads=3,
            in_channels=3,
            patch_size=PATCH,
            spatial_merge_size=MERGE,
            temporal_patch_size=2,
            out_hidden_size=128,
            num_position_embeddings=256,
            deepstack_visual_indexes=DEEPSTACK,
            hidden_act="gelu_pytorch_tanh",
            initializer_range=0.06,
        ),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tie,
    )


def _initialise(model: Any) -> None:
    """Patch embedding std 0.03; position table [side², hidden] of 2-D sines (rows, then columns)."""
    import torch

    visual = model.model.visual
    with torch.no_grad():
        visual.patch_embed.proj.weight.normal_(0, 0.03)
        table = visual.pos_embed.weight
        side, quarter = int(table.shape[0] ** 0.5), table.shape[1] // 4
        frequency = math.pi * torch.logspace(0, math.log10(side / 2), quarter)
        angle = (torch.arange(side) / (side - 1))[:, None] * frequency
        wave = torch.cat([angle.sin(), angle.cos()], 1)  # [side, hidden / 2]
        grid = torch.cat([wave[:, None].expand(side, side, -1), wave[None].expand(side, side, -1)], -1)
        table.copy_(grid.reshape(side * side, -1))


def _save_processor(directory: Path, tokenizer: Any, image_tokens: tuple[int, int]) -> None:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    area = (PATCH * MERGE) ** 2
    common = dict(patch_size=PATCH, temporal_patch_size=2, merge_size=MERGE, image_mean=[1.0] * 3, image_std=[0.25] * 3)
    size = {"shortest_edge": image_tokens[0] * area, "longest_edge": image_tokens[1] * area}
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, **common),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**common),
        chat_template=_CHAT_TEMPLATE,
    )
    processor.save_pretrained(directory)
    separate = directory / "preprocessor_config.json"
    if not separate.exists():  # transformers 5 nests it in processor_config.json; other readers look for the file
        nested = json.loads((directory / "processor_config.json").read_text())["image_processor"]
        separate.write_text(json.dumps(nested, indent=2) + "\n")
