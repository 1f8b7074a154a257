"""One prompt of the agent is as many tokens to SGLang, to transformers and to us, whatever it shows."""

from __future__ import annotations

import io
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from policies import named, screenshot

from megatron_webrl.agent import PastStep, Told, build_prompt
from megatron_webrl.config import AgentConfig
from megatron_webrl.engine.generation import request_body
from megatron_webrl.processor import Processor
from megatron_webrl.trajectory import INT32, pack
from megatron_webrl.wire import BlockingClient
from megatron_webrl.wire.messages import Done, Generate, LoadFromDisk

VERSION = 900
"""Above what test_generation_e2e.py publishes to the engine of the session, below test_sampling_e2e.py's."""


@pytest.fixture(scope="module")
def url(engine: Any, tiny_model_dir: Path) -> str:
    """Of the session's SGLang, once it serves."""
    engine.until(lambda: engine.statuses and engine.status.state in ("waiting_weights", "serving"), 600, "up")
    control = BlockingClient(engine.host.status().address, engine.run_id, "test")
    try:
        control.request(LoadFromDisk(str(tiny_model_dir), VERSION, 60.0), timeout=90.0, expect=Done)
    finally:
        control.close()
    return f"http://127.0.0.1:{engine.host.sglang.port}/generate"


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("images", [1, 2, 5])
@pytest.mark.parametrize("kind", ["short", "additive_memory"])
def test_token_counts_are_equal_everywhere(url: str, tiny_model_dir: Path, images: int, kind: Any) -> None:
    """Our processor's expansion = transformers' processor on the text = SGLang's prompt_tokens."""
    from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLProcessor, Qwen3VLVideoProcessor

    processor = Processor.load(tiny_model_dir)
    shown = [screenshot(n) for n in range(images)]
    past = [PastStep(f"Page {n}", {"action": "go_back"}, True, "", ["a note"]) for n in range(6)]
    config = AgentConfig(prompt=kind, history_window=images)
    text = build_prompt(config, Told("Click “OK”.", past, {"price": "3 €"}, {"find": "done"}), images)
    ids = processor.encode(text)
    ours = processor.expand(ids, [processor.grid(160, 210)] * images)

    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model_dir), local_files_only=True)
    image_processor = AutoImageProcessor.from_pretrained(str(tiny_model_dir), local_files_only=True)
    theirs = Qwen3VLProcessor(image_processor, tokenizer, Qwen3VLVideoProcessor())(
        text=[text], images=[Image.open(io.BytesIO(data)) for data in shown]
    )
    assert theirs["input_ids"][0] == ours.tolist()

    message = Generate("x", pack(ids, INT32), list(named(*shown)), {}, 1, 1.0, 0, b"", b"", 60.0, 1.0)
    body = request_body(message, shown, version=VERSION) | {"stream": False}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        assert json.load(reply)["meta_info"]["prompt_tokens"] == len(ours)
