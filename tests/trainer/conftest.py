"""A four-layer model, so that two pipeline stages can hold its deepstack layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from on_ranks import free_port
from ranks import TEXTS, run_config

if TYPE_CHECKING:
    from megatron_webrl.trainer import PolicyTrainer


@pytest.fixture(scope="session")
def deep_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of a tiny Qwen3-VL with four decoder layers and tied embeddings."""
    from megatron_webrl.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "deep", TEXTS, layers=4, seed=1)


@pytest.fixture(scope="session")
def long_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with eight decoder layers, for virtual pipelines."""
    from megatron_webrl.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "long", TEXTS, layers=8, seed=3)


@pytest.fixture(scope="session")
def untied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an output layer of its own."""
    from megatron_webrl.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "untied", TEXTS, layers=4, seed=2, tie=False)


@pytest.fixture
def make() -> Iterator[Callable[..., PolicyTrainer]]:
    """Makes trainers of one rank, one at a time; the last is closed at the end."""
    from megatron_webrl.trainer import PolicyTrainer

    made: list[PolicyTrainer] = []

    def build(model: Path, **sections: Any) -> PolicyTrainer:
        if made:
            made.pop().close()
        place = {"rank": 0, "world_size": 1, "master_address": "127.0.0.1", "master_port": free_port()}
        made.append(PolicyTrainer(run_config(model, **sections), **place, total_steps=10))
        return made[-1]

    yield build
    if made:
        made.pop().close()
