"""A four-layer model, so that two pipeline stages can hold its deepstack layers."""

from __future__ import annotations

from pathlib import Path

import pytest

TEXTS = ["Click the button.", "user\nassistant\n", *(f'"coordinate": [{20 * i}, {15 * i}]' for i in range(50))]


@pytest.fixture(scope="session")
def deep_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of a tiny Qwen3-VL with four decoder layers and tied embeddings."""
    from megatron_webrl.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "deep", TEXTS, layers=4, seed=1)


@pytest.fixture(scope="session")
def untied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an output layer of its own."""
    from megatron_webrl.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "untied", TEXTS, layers=4, seed=2, tie=False)
