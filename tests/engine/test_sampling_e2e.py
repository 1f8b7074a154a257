"""Sampling settings in the real SGLang: temperature, top_p, top_k, and texts that end a reply."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from policies import IMAGE_PROMPT, TEXT_PROMPT, TOLERANCE, Policy, named, screenshot

from megatron_webrl.engine import GenerationClient
from megatron_webrl.processor import Processor
from megatron_webrl.trajectory import FLOAT32, INT32, unpack
from megatron_webrl.wire import BlockingClient, Client
from megatron_webrl.wire.messages import Done, Generated, LoadFromDisk

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

VERSION = 1_000
"""Above all that other tests publish to the engine of the session."""
PROMPTS = {"text": (TEXT_PROMPT, {}), "image": (IMAGE_PROMPT, named(screenshot(3)))}
STOP = ["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
"""So many that a random model soon says one of them."""


@pytest.fixture(scope="module")
def policy(engine: Any, tiny_model_dir: Path) -> Policy:
    """The weights that the engine has now."""
    engine.until(
        lambda: engine.statuses and engine.status.state in ("waiting_weights", "serving"), 600, "an engine that is up"
    )
    control = BlockingClient(engine.host.status().address, engine.run_id, "test")
    try:
        control.request(LoadFromDisk(str(tiny_model_dir), VERSION, 60.0), timeout=90.0, expect=Done)
    finally:
        control.close()
    return Policy(tiny_model_dir, Processor.load(tiny_model_dir))


def ask(engine: Any, policy: Policy, case: str, **options: Any) -> tuple[list[int], np.ndarray, Generated]:
    """Response tokens and their logprobs [R], of the reply."""
    prompt, images = PROMPTS[case]
    settings = {"seed": 1, "temperature": 1.0, "timeout_s": 120.0, **options}
    reply = engine.wait(engine.client.generate(policy.processor.encode(prompt), images, **settings))
    response = unpack(reply.response_ids, INT32).tolist()
    assert set(unpack(reply.versions, INT32)) == {VERSION}
    return response, unpack(reply.logprobs, FLOAT32), reply


def distribution(policy: Policy, case: str, response: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Log p [R, V] by transformers, at `temperature`."""
    prompt, images = PROMPTS[case]
    z = policy.distribution(policy.processor.encode(prompt), images, response).astype(np.float64) / temperature
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


@pytest.mark.parametrize("case", PROMPTS)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logprobs_are_those_of_the_temperature(engine: Any, policy: Policy, case: str, temperature: float) -> None:
    """As the trainer's are (tests/trainer/test_exactness.py); far from those of temperature 1."""
    for seed in range(3):
        response, logprobs, _ = ask(engine, policy, case, temperature=temperature, seed=seed)
        at = np.arange(len(response)), response
        assert np.abs(distribution(policy, case, response, temperature)[at] - logprobs).max() <= TOLERANCE
        assert np.abs(distribution(policy, case, response)[at] - logprobs).max() > 100 * TOLERANCE


@pytest.mark.parametrize("case", PROMPTS)
def test_one_candidate_is_greedy(engine: Any, policy: Policy, case: str) -> None:
    """top_k=1, and a top_p that the most likely token exceeds alone: temperature and seed do not matter."""
    greedy, *_ = ask(engine, policy, case, temperature=0.0)
    for options in ({"top_k": 1}, {"top_p": 1e-6}):
        response, *_ = ask(engine, policy, case, temperature=1.3, seed=8, **options)
        assert response == greedy, options


def test_only_the_most_likely_tokens_are_sampled(engine: Any, policy: Policy) -> None:
    """top_k: every token is among the k most likely of its place, and not always the first."""
    ranks: list[int] = []
    for seed in range(4):
        response, *_ = ask(engine, policy, "text", temperature=1.0, seed=seed, top_k=5)
        rows = distribution(policy, "text", response)
        ranks += (rows > rows[np.arange(len(response)), response][:, None] + TOLERANCE).sum(-1).tolist()
    assert 0 < max(ranks) < 5


def test_a_stop_text_ends_the_reply(engine: Any, policy: Policy, tiny_model_dir: Path) -> None:
    """With its token, kept in the reply and left out of the text; a special one is sampled as likely as the model says."""
    processor = Processor.load(tiny_model_dir, STOP)
    stopping = Policy(tiny_model_dir, processor)
    prompt = processor.encode(TEXT_PROMPT)

    async def replies() -> list[Generated]:
        coordinator = Client(engine.address, engine.run_id, "test-stop")
        client = GenerationClient(
            coordinator, engine.config.sampling, processor.banned_ids(), processor.stop_ids(), 120.0
        )
        try:
            return [
                await client.generate(prompt, {}, seed=seed, temperature=1.0, timeout_s=120.0) for seed in range(12)
            ]
        finally:
            await client.close()
            coordinator.close()

    ends: set[int] = set()
    for reply in engine.wait(replies()):
        response = unpack(reply.response_ids, INT32).tolist()
        assert not set(response[:-1]) & set(processor.stop_ids())
        if reply.finish_reason == "stop":
            ends.add(response[-1])
            assert processor.decode(response) == processor.tokenizer.decode(response[:-1], skip_special_tokens=False)
        else:
            assert len(response) == engine.config.sampling.max_new_tokens
        assert np.abs(stopping.logprobs(prompt, {}, response) - unpack(reply.logprobs, FLOAT32)).max() <= TOLERANCE, (
            "the mask leaves the stop tokens out"
        )
    assert ends <= set(processor.stop_ids()) and ends - {processor.end_token_id}
