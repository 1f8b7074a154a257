"""Stand-in for SGLang's compiled kernel package where the device is a CPU and no real one is installed.

SGLang binds a few kernel names at import.  None is on the path of a dense Qwen3-VL served with the `torch_native`
attention backend (they belong to speculative decoding, KV compaction and other architectures), so each only raises
when it is called.  This directory's parent goes on the PYTHONPATH of that one child process, nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import library

_library = library.Library("sgl_kernel", "FRAGMENT")
for _operator in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_gdn_gating_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
):
    _library.define(f"{_operator}(Tensor x) -> Tensor")


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not in the CPU stand-in: install sglang-kernel")

    missing.__name__ = name
    return missing
