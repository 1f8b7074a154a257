"""Placement: every role once, GPUs as the layout says, too few of them refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.config import RunConfig, validate
from megatron_webrl.errors import UserError
from megatron_webrl.launch.placement import describe, place, visible_gpus


def config(**sections: Any) -> RunConfig:
    return validate({"model": {"path": "m"}, "tasks": {"names": ["click-test"]}, **sections}, "test")


def test_on_a_cpu_every_role_is_there_once() -> None:
    c = config(trainer={"parallel": {"tp": 2, "pp": 2}}, engine={"hosts": 2}, browser={"workers": 3})
    roles = place(c, Path("/tmp/x"), [])
    names = [r.name for r in roles]
    assert len(set(names)) == len(names) == 2 + 2 + 4 + 3
    assert not any(r.gpus for r in roles)
    assert all(name in describe(roles, c) for name in names)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_those_that_serve_have_an_address_of_their_own(transport: str) -> None:
    roles = place(config(wire={"transport": transport}, engine={"hosts": 3}), Path("/tmp/x"), [])
    serving = [r.address for r in roles if r.name.startswith(("store", "coordinator", "engine"))]
    assert len(set(serving)) == len(serving) == 5
    assert all(a.startswith("ipc:///tmp/x/" if transport == "ipc" else "tcp://127.0.0.1:") for a in serving)
    assert not any(r.address for r in roles if r.name.startswith(("worker", "trainer")))


@pytest.mark.parametrize(
    ("gpus", "trainer", "engines"), [(4, [0, 1], [2, 3]), (2, [0, 1], [0, 1]), (3, [0, 1], [2, 0])]
)
def test_trainer_ranks_take_the_first_gpus_and_engines_the_next(
    gpus: int, trainer: list[int], engines: list[int]
) -> None:
    roles = place(
        config(trainer={"parallel": {"dp": 2}}, engine={"hosts": 2}), Path("/tmp/x"), [f"GPU-{n}" for n in range(gpus)]
    )
    assert [r.gpus for r in roles if r.name.startswith("trainer")] == [(f"GPU-{g}",) for g in trainer]
    assert [r.gpus for r in roles if r.name.startswith("engine")] == [(f"GPU-{g}",) for g in engines]


def test_too_few_gpus_are_refused_naming_the_key() -> None:
    with pytest.raises(UserError, match=r"trainer\.parallel"):
        place(config(trainer={"parallel": {"dp": 4}}), Path("/tmp/x"), ["0", "1"])
    with pytest.raises(UserError, match=r"engine\.tp=4"):
        place(config(engine={"tp": 4}), Path("/tmp/x"), ["0", "1"])


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert visible_gpus("auto") == visible_gpus("cpu") == []
    with pytest.raises(UserError, match="device=cuda"):
        visible_gpus("cuda")


def test_the_gpus_that_the_user_chose_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES names them, by index or UUID; device=cpu takes none."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nfor n in 0 1 2 3; do echo GPU $n: fake; done\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus("auto") == ["0", "1", "2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-abc")
    assert visible_gpus("cuda") == ["2", "GPU-abc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus("auto") == []
    assert visible_gpus("cpu") == []


def test_triton_needs_a_gpu() -> None:
    with pytest.raises(UserError, match=r"trainer\.loss_backend=triton"):
        place(config(trainer={"loss_backend": "triton"}), Path("/tmp/x"), [])
