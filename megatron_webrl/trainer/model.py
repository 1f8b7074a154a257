"""Qwen3-VL on megatron.core: GPTModel with interleaved M-RoPE, deepstack features and our vision tower.

The vision tower sits on the first pipeline stage, replicated over tensor parallelism; all deepstack layers must be
there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from transformers import Qwen3VLConfig

from megatron_webrl.algorithm import ReduceHiddenGrad
from megatron_webrl.config import ParallelConfig
from megatron_webrl.errors import UserError
from megatron_webrl.trainer.batch import MicroBatch
from megatron_webrl.trainer.mapping import padded_vocab
from megatron_webrl.trainer.vision import VisionTower


@functools.cache
def layer_spec() -> tuple[Literal["transformer_engine", "local"], str]:
    """Whose decoder layers are used, and why: transformer-engine's where CUDA is there and it imports."""
    if not torch.cuda.is_available():
        return "local", "no GPU"
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # without its libraries it raises RuntimeError and worse
        return "local", f"transformer-engine does not import: {' '.join(str(error).split())[:200]}"
    return "transformer_engine", "a GPU, and transformer-engine imports"


def transformer_config(
    hf: Qwen3VLConfig, parallel: ParallelConfig, dtype: torch.dtype, *, recompute: str = "none"
) -> TransformerConfig:
    """Megatron's configuration of the language model.  Raises UserError for variants of the model it cannot express."""
    text: Any = hf.text_config
    rope = text.rope_parameters
    found = (text.attention_bias, text.hidden_act, rope["rope_type"])
    if found != (False, "silu", "default"):
        raise UserError(
            f"model.path: config.json has (attention_bias, hidden_act, rope_type) = {found}: only Qwen3-VL's own "
            "(False, 'silu', 'default') are supported"
        )
    return TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        kv_channels=text.head_dim,
        ffn_hidden_size=text.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mrope_section=list(rope["mrope_section"]),
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vp if parallel.vp > 1 else None,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        variable_seq_lengths=parallel.vp == 1,  # the interleaved schedule swaps the shapes of two directions if pp is 2
        moe_token_dispatcher_type="alltoall",  # asked for by variable_seq_lengths, dense models too
        calculate_per_token_loss=True,  # before DDP is built, else gradients are scaled by 1 / dp
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_modules=["mlp"]
        if recompute == "selective"
        else None,  # attention keeps no matrix that would be worth it
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
        batch_p2p_comm=torch.cuda.is_available(),
        deallocate_pipeline_outputs=False,
    )


class OutputLayer(NamedTuple):
    """What the last stage hands to a loss: hidden states and this rank's slice of the output weight, not multiplied yet."""

    hidden: Tensor
    """[S · B, H], or this rank's shard of it where `reduce_hidden_grad` is `reduce_scatter`."""
    weight: Tensor
    """[V / tp, H]."""
    at: Tensor
    """int64 [N]: rows of the whole hidden that predict response tokens."""
    reduce_hidden_grad: ReduceHiddenGrad


Head = Callable[[OutputLayer], Tensor]
"""Ends the forward pass on the last stage."""


class Qwen3VL(MegatronModule):
    """A chunk of the policy: a rank's part, or one of its parts in a virtual pipeline.  Parameters are uninitialised until
    weights are loaded."""

    def __init__(
        self,
        config: TransformerConfig,
        hf: Qwen3VLConfig,
        *,
        first: bool,
        last: bool,
        chunk: int | None = None,
        overlap_grad_reduce: bool = False,
    ) -> None:
        """first, last: whether it holds embedding and vision tower, and the output layer; chunk: which of its stage's
        chunks it is; None where there is one."""
        super().__init__(config)
        self.vp_stage = chunk
        self.overlap_grad_reduce = overlap_grad_reduce
        text: Any = hf.text_config
        vision: Any = hf.vision_config
        tied = bool(hf.tie_word_embeddings)
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process = first, last
        self.share_embeddings_and_output_weights = tied
        base = float(text.rope_parameters["rope_theta"])
        self.language_model = GPTModel(
            config,
            _layers(config, chunk),
            vocab_size=padded_vocab(text.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=text.max_position_embeddings,
            pre_process=first,
            post_process=last,
            position_embedding_type="mrope",
            rotary_base=int(base),
            share_embeddings_and_output_weights=tied,
            scatter_embedding_sequence_parallel=False,
            vp_stage=chunk,
        )
        self.language_model.rotary_pos_emb = InterleavedMRoPE(text.head_dim, base)
        again = config.recompute_granularity
        self.visual = VisionTower(vision, config.params_dtype, recompute=again) if first else None
        if self.visual is not None and config.tensor_model_parallel_size > 1 and torch.cuda.is_available():
            for parameter in self.visual.parameters():  # replicas whose gradients differ in the last bits would part
                parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Embedding (first stage) or output weight (last stage) when tied: Megatron sums their gradients."""
        return self.language_model.shared_embedding_or_output_weight()

    def _idle_vision(self) -> Tensor:
        """Zero, through the vision tower and with its gradients.  They are reduced as they come (overlap_grad_reduce), so on
        every data-parallel rank they have to come, in the same order, images or not."""
        assert self.visual is not None
        settings: Any = self.visual.config
        side = settings.spatial_merge_size
        blank = torch.zeros(side * side, settings.in_channels * settings.patch_size**2, device=self.visual.device)
        features, deepstack = self.visual(blank, [(1, side, side)])
        return 0.0 * torch.stack([part.sum() for part in (features, *deepstack)]).sum()

    def set_input_tensor(self, tensor: Any) -> None:
        """Hidden states from the stage before, set by Megatron's schedule."""
        self.language_model.set_input_tensor(tensor[0] if isinstance(tensor, list) else tensor)

    def forward(self, batch: MicroBatch, head: Head) -> Tensor:
        """Last stage: what `head` makes of the hidden states; others: hidden states [S, B, H] (S / tp under sequence
        parallelism)."""
        hidden = deepstack = None
        if self.pre_process:
            hidden = self.language_model.embedding(input_ids=batch.ids, position_ids=None)  # [S, B, H]
            if batch.images:
                assert self.visual is not None
                features, deep = self.visual(batch.patches, list(batch.images.values()))
                deepstack = torch.stack([_place(torch.zeros_like(hidden), batch, f) for f in deep])  # [K, S, B, H]
                hidden = _place(hidden, batch, features)
            elif self.overlap_grad_reduce and torch.is_grad_enabled():
                hidden = hidden + self._idle_vision()
            if self.config.sequence_parallel:  # backward gathers, so the replicated vision tower gets whole gradients
                hidden = tensor_parallel.scatter_to_sequence_parallel_region(hidden)
                if deepstack is not None:
                    by_position = deepstack.transpose(0, 1).contiguous()  # [S, K, B, H]
                    deepstack = tensor_parallel.scatter_to_sequence_parallel_region(by_position).transpose(0, 1)
        return self.language_model(
            input_ids=None,
            position_ids=batch.positions,
            attention_mask=None,
            decoder_input=hidden,
            packed_seq_params=None if batch.ends is None else _packed(batch.ends, batch.ids.device),
            extra_block_kwargs=None if deepstack is None else {"context": deepstack},
            output_processor=_head_output,
            output_processor_context=(head, batch.predictors),
        )


def _packed(ends: Tensor, device: torch.device) -> PackedSeqParams:
    """Rows end to end in one sequence, none of which attends to another."""
    longest = int(ends.diff().max())
    ends = ends.to(device)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _place(hidden: Tensor, batch: MicroBatch, features: Tensor) -> Tensor:
    """Features at the image tokens of hidden [S, B, H]."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    return flat.index_copy(0, batch.image_places, features[batch.image_features].to(flat.dtype)).view_as(hidden)


def _head_output(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, context: Any, config: Any, **_: Any
) -> Tensor:
    """`head` in place of the output layer: of its logits only those that predict response tokens are wanted, and never
    all at once."""
    head, predictors = context
    weight = output_layer.weight if output_weight is None else output_weight
    reduce: ReduceHiddenGrad = "all_reduce"
    if config.sequence_parallel:
        # The gradient of N rows summed on all ranks, or that of all S · B rows summed and scattered: what moves less.
        if 2 * len(predictors) > hidden_states.shape[0] * hidden_states.shape[1] * config.tensor_model_parallel_size:
            reduce = "reduce_scatter"
        else:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
    return head(OutputLayer(hidden_states.flatten(0, 1), weight, predictors, reduce))


class InterleavedMRoPE(torch.nn.Module):
    """Rotary angles of three position axes, interleaved over the frequencies (t h w t h w … then t)."""

    def __init__(self, dim: int, base: float) -> None:
        super().__init__()
        self.frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def forward(self, positions: Tensor, mrope_section: list[int], **_: Any) -> Tensor:
        """positions int64 [3, B, S] -> angles float32 [S, B, 1, dim]."""
        self.frequencies = self.frequencies.to(positions.device)
        angles = positions.float()[..., None] * self.frequencies
        mixed = angles[0].clone()
        for axis in (1, 2):
            places = slice(axis, mrope_section[axis] * 3, 3)
            mixed[..., places] = angles[axis][..., places]
        return torch.cat((mixed, mixed), -1).transpose(0, 1)[:, :, None].contiguous()


class DeepstackLayer(TransformerLayer):
    """Adds deepstack feature i after decoder layer i.

    The features [K, S, B, H] travel as `context`, which the block hands from layer to layer (also when it recomputes).
    """

    def forward(self, *args: Any, context: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        hidden, _ = super().forward(*args, context=None, **kwargs)
        layer = self.layer_number - 1
        if context is not None and layer < len(context):
            hidden = hidden + context[layer]
        return hidden, context


class RMSNorm(torch.nn.Module):
    """In float32, and allowed under sequence parallelism (Megatron's wrapper of torch's own is not)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size], any floating dtype, kept."""
        return F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype) * self.weight


class CausalAttention(torch.nn.Module):
    """torch's scaled dot product attention: no S × S matrix, and each packed row by itself; rows padded on the right need
    no mask."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """query [S, B, heads, D], key and value [S, B, groups, D] -> [S, B, heads · D]; packed: without B."""
        if packed_seq_params is None:
            q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
            return _causal(q, k, v).permute(2, 0, 1, 3).flatten(2)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        rows = zip(*(t.transpose(0, 1)[None].split(lengths, dim=2) for t in (query, key, value)), strict=True)
        return torch.cat([_causal(*row)[0] for row in rows], dim=1).transpose(0, 1).flatten(1)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, heads, S, D], k and v [B, groups, S, D] -> [B, heads, S, D]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _layers(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules:
    """Decoder layers of a chunk of this stage."""
    if layer_spec()[0] == "transformer_engine":
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization="RMSNorm", vp_stage=chunk)
        for layer in block.layer_specs:
            layer.module = DeepstackLayer
        return block
    layer = deepcopy(get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"))
    layer.module = DeepstackLayer
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = CausalAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config, chunk), layer_norm=RMSNorm)
