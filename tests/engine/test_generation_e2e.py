"""Generation through the real SGLang when things go wrong: it is killed, it hangs, nobody wants the reply any more."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from policies import IMAGE_PROMPT, TEXT_PROMPT, TOLERANCE, Policy, make_policies, named, screenshot

from megatron_webrl.config import SamplingConfig
from megatron_webrl.engine import GenerationClient
from megatron_webrl.engine.generation import request_body
from megatron_webrl.processes import marked
from megatron_webrl.processor import Processor
from megatron_webrl.trajectory import FLOAT32, INT32, pack, unpack
from megatron_webrl.wire import BlockingClient, Client
from megatron_webrl.wire.messages import Done, Generate, Generated, LoadFromDisk

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

VERSION = 500
"""Above all that test_engine_e2e.py publishes to the engine of the session, below those of test_sampling_e2e.py."""
SHOWN = named(screenshot(3))


class Generation:
    """The engine of the session, weights to load into it, and clients that never stop a reply before its length."""

    def __init__(self, engine: Any, model: Path, directory: Path) -> None:
        self.engine = engine
        self.processor = Processor.load(model)
        self.policies = make_policies(model, self.processor, directory)
        self.ends = [self.processor.end_token_id]
        self.banned = np.concatenate([self.processor.banned_ids(), self.ends])
        self.version = VERSION

    def publish(self, policy: int) -> int:
        """Have it serve these weights, as soon as it takes any; the new version."""
        self.engine.until(
            lambda: self.engine.statuses and self.engine.status.state in ("waiting_weights", "serving"), 600, "up"
        )
        self.version += 1
        control = BlockingClient(self.engine.host.status().address, self.engine.run_id, "test")
        try:
            message = LoadFromDisk(str(self.policies[policy].directory), self.version, 60.0)
            control.request(message, timeout=90.0, expect=Done)
        finally:
            control.close()
        return self.version

    def client(self, tokens: int) -> GenerationClient:
        async def make() -> GenerationClient:
            self.coordinator = Client(self.engine.address, self.engine.run_id, "test-generation")
            return GenerationClient(self.coordinator, SamplingConfig(max_new_tokens=tokens), self.banned, [], 600.0)

        return self.engine.wait(make())

    def close(self, client: GenerationClient) -> None:
        async def close() -> None:
            await client.close()
            self.coordinator.close()

        self.engine.wait(close())

    def begin(self, client: GenerationClient, count: int) -> list[Any]:
        """Start so many replies to the image prompt, and wait until each has some tokens; futures."""
        prompt = self.processor.encode(IMAGE_PROMPT)
        flights = [
            self.engine.submit(client.generate(prompt, SHOWN, seed=i, temperature=1.0, timeout_s=500.0))
            for i in range(count)
        ]
        self.engine.until(lambda: sum(n >= 40 for n in self.sampled()) == count, 60, "tokens")
        return flights

    def sampled(self) -> list[int]:
        """Tokens so far of each generation that runs."""
        table = self.engine.host._generations._table
        return [len(g.sampled.ids) for g in list(table.values()) if not g.task.done()]

    def scheduler(self) -> psutil.Process:
        return next(p for p in marked(f"{self.engine.run_id}/engine-0/sglang") if p.name() == "sglang::scheduler")

    def check(self, reply: Generated, by_version: dict[int, Policy]) -> list[int]:
        """Each token's logprob is that of its version's weights over all that came before.  Returns the versions."""
        response, versions = unpack(reply.response_ids, INT32).tolist(), unpack(reply.versions, INT32)
        got = unpack(reply.logprobs, FLOAT32)
        assert len(response) == len(got) == len(versions)
        for version, policy in by_version.items():
            reference = policy.logprobs(self.processor.encode(IMAGE_PROMPT), SHOWN, response, banned=self.ends)
            mine = versions == version
            assert mine.any()
            assert np.abs(reference - got)[mine].max() < TOLERANCE, version
        return versions.tolist()


@pytest.fixture(scope="module")
def generation(engine: Any, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Generation:
    return Generation(engine, tiny_model_dir, tmp_path_factory.mktemp("policies"))


@pytest.fixture
def long(generation: Generation) -> Iterator[GenerationClient]:
    """Its replies have 600 tokens."""
    client = generation.client(600)
    yield client
    generation.close(client)


def test_tokens_before_a_kill_are_kept(generation: Generation, long: GenerationClient) -> None:
    """kill -9 in mid-generation: replies go on where they were, in the successor and with its weights.  Every logprob is
    that of the weights of its token's version."""
    first = generation.publish(0)
    flights = generation.begin(long, 3)
    had = min(generation.sampled())
    generation.scheduler().send_signal(signal.SIGKILL)
    generation.engine.until_state("starting", 20)
    second = generation.publish(1)
    for flight in flights:
        reply = flight.result(200)
        versions = generation.check(reply, {first: generation.policies[0], second: generation.policies[1]})
        assert versions == sorted(versions) and len(versions) == 600
        assert versions.count(first) >= had
        assert reply.waited_s > 1
        print(f"kept {versions.count(first)} tokens, waited {reply.waited_s:.1f} s")


def test_tokens_of_a_refresh_in_flight_before_a_kill(generation: Generation, long: GenerationClient) -> None:
    """The death comes before the engine's own account of versions: none of the tokens counts as newer than it is, and
    those of before the refresh are exact."""
    first = generation.publish(0)
    flights = generation.begin(long, 2)
    at_refresh = max(generation.sampled())
    second = generation.publish(1)
    generation.engine.until(lambda: min(generation.sampled()) > at_refresh + 40, 60, "tokens after the refresh")
    generation.scheduler().send_signal(signal.SIGKILL)
    generation.engine.until_state("starting", 20)
    third = generation.publish(2)
    for flight in flights:
        reply = flight.result(200)
        response, versions = unpack(reply.response_ids, INT32).tolist(), unpack(reply.versions, INT32)
        assert set(versions) == {first, second, third} and (np.diff(versions) >= 0).all()
        got, prompt = unpack(reply.logprobs, FLOAT32), generation.processor.encode(IMAGE_PROMPT)
        exact = {
            version: np.abs(policy.logprobs(prompt, SHOWN, response, banned=generation.ends) - got) < TOLERANCE
            for version, policy in zip((first, second, third), generation.policies, strict=True)
        }
        assert exact[second][versions == second].all() and exact[third][versions == third].all()
        too_old = (versions == first) & ~exact[first]
        assert too_old.sum() <= 16 and exact[second][too_old].all(), "at most a chunk counts as older than it is"


def test_prefix_cache_is_keyed_by_version(generation: Generation) -> None:
    """The same prompt with its image is found in the cache again under the same key, and not under another."""
    generation.publish(0)
    images = list(SHOWN.values())

    async def cached(version: int) -> int:
        message = Generate(
            "", pack(generation.processor.encode(IMAGE_PROMPT), INT32), [], {}, 2, 1.0, 0, b"", b"", 1.0, 1.0
        )
        body = request_body(message, images, version=version)
        async with aclosing(generation.engine.host.sglang.generate(body)) as chunks:
            return [chunk["meta_info"]["cached_tokens"] async for chunk in chunks][-1]

    found = [generation.engine.wait(cached(version)) for version in (9001, 9001, 9002, 9002, 9001)]
    assert found[0] == found[2] == 0
    assert min(found[1], found[3], found[4]) > 10


def test_a_silent_sglang_is_replaced(generation: Generation, long: GenerationClient) -> None:
    """One that lives and does not answer (here stopped) is killed after engine.health_timeout_s; its tokens are kept, and
    what it did not do is not counted as the episode's time."""
    first = generation.publish(0)
    [flight] = generation.begin(long, 1)
    stopped = generation.scheduler()
    stopped.send_signal(signal.SIGSTOP)
    settings = generation.engine.config.engine
    before, settings.health_timeout_s = settings.health_timeout_s, 4.0
    began = time.monotonic()
    try:
        generation.engine.until_state("starting", 20)
    finally:
        settings.health_timeout_s = before
    assert 3 < time.monotonic() - began < 10
    generation.engine.until(
        lambda: not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE, 10, "the stopped one is killed"
    )
    second = generation.publish(1)
    reply = flight.result(200)
    generation.check(reply, {first: generation.policies[0], second: generation.policies[1]})
    assert reply.waited_s > 3


def test_an_idle_sglang_is_left_alone(generation: Generation) -> None:
    """It answers the probes of its health."""
    generation.publish(0)
    starts = generation.engine.host.starts
    settings = generation.engine.config.engine
    before, settings.health_timeout_s = settings.health_timeout_s, 14.0
    try:
        time.sleep(20.0)
    finally:
        settings.health_timeout_s = before
    assert generation.engine.host.starts == starts


def test_what_nobody_wants_is_not_sampled_to_its_end(generation: Generation) -> None:
    """A cancelled call leaves nothing that runs in SGLang (which flushes its cache only when idle)."""
    generation.publish(0)
    client = generation.client(3000)
    try:
        flights = generation.begin(client, 2)
        for flight in flights:
            flight.cancel()
        began = time.monotonic()

        async def idle() -> None:
            while True:
                try:
                    await generation.engine.host.sglang.control("/flush_cache", 5.0)
                    return
                except Exception:
                    await asyncio.sleep(0.1)

        generation.engine.wait(idle(), 20)
        assert time.monotonic() - began < 3
        assert not generation.sampled()
    finally:
        generation.close(client)


def test_a_prompt_that_is_too_long_is_said(generation: Generation, long: GenerationClient) -> None:
    """By SGLang, in its own words, at once."""
    from megatron_webrl.engine import EngineUnreachable

    generation.publish(0)
    prompt = generation.processor.encode(TEXT_PROMPT) * 2000
    with pytest.raises(EngineUnreachable, match=r"(?i)length|tokens"):
        generation.engine.wait(long.generate(prompt, {}, seed=1, temperature=1.0, timeout_s=60.0))
