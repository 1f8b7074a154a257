"""The only place where we patch other people's packages: megatron.core on a CPU, its rotation of packed rows, its
checkpoints without a manager.

Must be applied before the first import of `megatron.core`; importing `megatron_webrl.trainer` takes care of that.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange")


@functools.cache
def apply_patches() -> None:
    """Apply all of them, once.  Where torch sees a GPU, only those for checkpoints and packed rows and, without
    transformer-engine and apex, for the optimizer."""
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # GPTModel's deprecation, a line a model
    warnings.filterwarnings("ignore", module=r"megatron\.core\..*")
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint\..*")
    if not torch.cuda.is_available():
        _patch_cuda()
        _patch_factories()
        _patch_tensor()
        _patch_megatron()
    _patch_optimizer()
    _rotate_packed_rows_at_once()
    _write_checkpoints_in_process()


def _write_checkpoints_in_process() -> None:
    """Megatron would start a multiprocessing manager, which imports the main program again and outlives a killed
    trainer, to hand back the results of a forked writer; ours is a thread."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem

    filesystem._results_queue = queue.Queue()


class _Stream:
    """Stands in for torch.cuda.Stream: everything is synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def record_event(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...


def _patch_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU  # only ever passed on as device=
    cuda.synchronize = cuda.empty_cache = lambda *args, **kwargs: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.Stream = _Stream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()


def _patch_factories() -> None:
    """Literal device="cuda" in schedules, gradient clipping and optimizers."""
    import torch.utils._device as device_mode

    device_mode._device_constructors()  # caches the originals, which loading on the meta device needs
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is not None and device is not CPU and (isinstance(device, int) or str(device).startswith("cuda")):
            kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def _patch_tensor() -> None:
    original = torch.Tensor.type

    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Optimizers compare param.type() with "torch.cuda.FloatTensor"."""
        name = original(self, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.") if isinstance(name, str) and "cuda" not in name else name

    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _patch_megatron() -> None:
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _rotate_packed_rows_at_once() -> None:
    """Megatron asks the host for the bounds of every packed row, in each layer, for queries and for keys, which a GPU has to
    wait for.  Our angles are those of each token already, so that rows need not be told apart."""
    import megatron.core.transformer.attention as attention

    original = attention.apply_rotary_pos_emb

    def apply(t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor | None = None, **options: Any) -> Tensor:
        """t [T, heads, D] if packed, freqs [T, 1, 1, D]."""
        if cu_seqlens is not None and freqs.shape[0] == t.shape[0]:
            return original(t[:, None], freqs, config, **options)[:, 0]
        return original(t, freqs, config, cu_seqlens=cu_seqlens, **options)

    attention.apply_rotary_pos_emb = apply


def _patch_optimizer() -> None:
    """torch's own AdamW, Megatron's last resort, keeps its step where the distributed optimizer cannot load it."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.Adam = distributed.Adam = FusedLayoutAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True


class FusedLayoutAdam(torch.optim.Optimizer):
    """AdamW whose state is laid out as in transformer-engine's FusedAdam (`step` in the parameter group), which is what
    Megatron's distributed optimizer expects to save and load."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        if not (adam_w_mode and bias_correction):
            raise ValueError("only AdamW with bias correction")
        super().__init__(
            params, {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            group["step"] = group.get("step", 0) + 1
            for p in params:
                if not self.state[p]:
                    self.state[p] = {
                        "exp_avg": torch.zeros_like(p, dtype=torch.float32),
                        "exp_avg_sq": torch.zeros_like(p, dtype=torch.float32),
                    }
            beta1, beta2 = group["betas"]
            grads = [p.grad.float() for p in params]
            means = [self.state[p]["exp_avg"] for p in params]
            squares = [self.state[p]["exp_avg_sq"] for p in params]
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_lerp_(means, grads, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
            roots = torch._foreach_sqrt(squares)
            torch._foreach_div_(roots, (1 - beta2 ** group["step"]) ** 0.5)
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_addcdiv_(params, means, roots, value=-group["lr"] / (1 - beta1 ** group["step"]))
