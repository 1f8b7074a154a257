"""The Triton kernels without a GPU: right in the interpreter, and compiled for Hopper without a spill."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")


def test_kernels_in_the_interpreter() -> None:
    """Same statistics and gradients as torch's rows, and the same fused loss.  Its own process: the interpreter is chosen
    when kernels are defined."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("interpreted.py")], env=environment, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "agree" in done.stdout


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, aligned_sizes: bool
) -> tuple[str, bytes]:
    """PTX and cubin for an H100 or H200, without a driver.  aligned_sizes: strides and columns are multiples of 16, as
    those of 151,936 are: a launch compiles another kernel for that."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "*fp32" if name.isupper() else "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    sizes = ("stride", "out_stride", "columns") if aligned_sizes else ()
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name][0] == "*" or name in sizes
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return result.asm["ptx"], result.asm["cubin"]


KERNELS = [
    ("statistics_kernel", {"OUT": "*fp32"}, {}),
    ("gradient_kernel", {"OUT": "*fp32"}, {"WITH_ENTROPY": False}),
    ("gradient_kernel", {"OUT": "*bf16"}, {"WITH_ENTROPY": False}),
    ("gradient_kernel", {"OUT": "*bf16"}, {"WITH_ENTROPY": True}),
]


@pytest.mark.parametrize("aligned_sizes", [True, False])
@pytest.mark.parametrize(("name", "types", "constants"), KERNELS)
def test_kernels_compile_for_hopper_without_spilling(
    name: str, types: dict[str, str], constants: dict[str, Any], aligned_sizes: bool, tmp_path: Path
) -> None:
    """sm_90a, the block and warps that are used: no stack, no local memory."""
    from megatron_webrl.algorithm import triton_rows

    types = {"TARGET": "*i64", "inverse_temperature": "fp32", **types}
    constants = {**constants, "BLOCK": triton_rows.BLOCK}
    ptx, cubin = compiled(getattr(triton_rows, name), types, constants, triton_rows.WARPS, aligned_sizes)
    assert ".target sm_90a" in ptx
    (tmp_path / "kernel.cubin").write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run(
        [tool, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert re.search(r"STACK:0\b", usage) and re.search(r"LOCAL:0\b", usage), usage
