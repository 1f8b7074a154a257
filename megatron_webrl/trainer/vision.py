"""Qwen3-VL's vision tower with images of equal size batched, on the parameters of transformers' model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLVisionModel,
    Qwen3VLVisionRotaryEmbedding,
    apply_rotary_pos_emb_vision,
)
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from megatron_webrl.processor import Grid


class VisionTower(Qwen3VLVisionModel):
    """Same parameters and function as its parent, for still images.

    The parent runs attention image by image and the patch embedding as a convolution over two equal frames; here
    neighbouring images of one size share an attention call, and one frame is multiplied with the summed kernel.
    """

    def __init__(
        self,
        config: Qwen3VLVisionConfig,
        dtype: torch.dtype,
        *,
        recompute: Literal["selective", "full"] | None = None,
    ) -> None:
        """recompute: what the backward pass computes again: `selective`: MLPs; `full`: all but each block's input."""
        super().__init__(config)
        self._recompute = recompute
        torch.nn.Module.to(self, dtype)
        self.rotary_pos_emb = Qwen3VLVisionRotaryEmbedding(config)  # frequencies stay in float32

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, list[Tensor]]:
        """patches float32 [Σ h·w, C·P·P], one frame each, images in order; grids (1, h, w) of each.

        Returns features [Σ h·w / merge², H] and, for each deepstack layer, features of that shape.
        """
        runs = [(grid, len(list(same))) for grid, same in groupby(grids)]
        embed: Any = self.patch_embed.proj
        x = F.linear(patches, embed.weight.float().sum(2).flatten(1), embed.bias.float())  # [Σ h·w, D]
        places, angles = zip(*(self._positions(grid, count, x.device) for grid, count in runs), strict=True)
        x = (x + torch.cat(places)).to(self.dtype)
        cos, sin = (torch.cat(part) for part in zip(*angles, strict=True))
        sizes = [(count, h * w) for (_, h, w), count in runs]
        deepstack = []
        block: Any
        for index, block in enumerate(self.blocks):
            x = self._maybe_again("full", _block, block, x, cos, sin, sizes, partial(self._maybe_again, "selective"))
            if index in self.deepstack_visual_indexes:
                merger = self.deepstack_merger_list[self.deepstack_visual_indexes.index(index)]
                deepstack.append(merger(x))
        return self.merger(x), deepstack

    def _maybe_again(self, mode: str, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """`function`, which keeps only its arguments for the backward pass if `mode` is what is recomputed."""
        if self._recompute == mode and torch.is_grad_enabled():
            out: Any = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
            return out
        return function(*arguments)

    def _positions(self, grid: Grid, count: int, device: torch.device) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Position embedding and rotary cosine and sine of `count` images of one size, each [count · h · w, …]."""
        one = torch.tensor([grid], device=device)
        indices, weights = get_vision_interpolation_indices_and_weights(
            one,
            num_grid_per_side=self.num_grid_per_side,
            mode=self.interpolation_mode,
            align_corners=self.interpolation_align_corners,
            spatial_merge_size=self.spatial_merge_size,
        )
        place = (self.pos_embed(indices) * weights[:, :, None]).sum(1).repeat(count, 1)
        rotary: Any = self.rotary_pos_emb
        cos, sin = rotary(place, get_vision_position_ids(one, self.spatial_merge_size))
        return place, (cos.repeat(count, 1), sin.repeat(count, 1))


def _block(
    block: Any, x: Tensor, cos: Tensor, sin: Tensor, sizes: list[tuple[int, int]], mlp: Callable[..., Tensor]
) -> Tensor:
    """x [Σ count · length, D]; mlp calls block.mlp."""
    x = x + _attend(block.attn, block.norm1(x), cos, sin, sizes)
    return x + mlp(block.mlp, block.norm2(x))


def _attend(attention: Any, x: Tensor, cos: Tensor, sin: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
    """x [Σ count · length, D]; attention within each image."""
    q, k, v = attention.qkv(x).view(len(x), 3, attention.num_heads, -1).unbind(1)
    q, k = apply_rotary_pos_emb_vision(q, k, cos, sin)
    out, first = [], 0
    for count, length in sizes:
        last = first + count * length
        part = [t[first:last].view(count, length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v)]
        attended = F.scaled_dot_product_attention(part[0], part[1], part[2])  # [count, heads, length, D / heads]
        out.append(attended.transpose(1, 2).reshape(count * length, -1))
        first = last
    return attention.proj(torch.cat(out))
