"""What every room's tests share: a tiny model, made once a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile(
    "ci", derandomize=True
)  # what CI says must not depend on luck; new examples are found by hand
if os.environ.get("CI"):
    settings.load_profile("ci")

os.environ.setdefault("OMP_NUM_THREADS", "1")

CLICK = (
    '<tool_call>\n{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [%d, %d]}}\n</tool_call>'
)
TYPE = '<tool_call>\n{"name": "computer_use", "arguments": {"action": "type", "text": "%s"}}\n</tool_call>'
TEXTS = [
    *(CLICK % (20 * i % 1000, 60 * i % 1000) for i in range(100)),
    *(TYPE % name for name in ("Ann", "Bob", "Chris")),
    *["Click the button.", "Focus into the textbox.", "user\nassistant\nsystem\n"] * 20,
]
"""What a tiny tokenizer for tests is trained on."""


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete Hugging Face directory of a tiny random Qwen3-VL."""
    from megatron_webrl.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", TEXTS)
