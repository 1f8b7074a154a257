"""The real SGLang behind an engine host: what it samples, what a refresh does to it, and what its death does.

One SGLang serves all tests, in this order; each leaves it serving.  Logprobs are compared with transformers in float32.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from policies import (
    IMAGE_PROMPT,
    TEXT_PROMPT,
    TOLERANCE,
    TWO_IMAGES_PROMPT,
    Policy,
    difference,
    make_policies,
    named,
    screenshot,
)

from megatron_webrl.config import SamplingConfig
from megatron_webrl.engine import EngineUnreachable, GenerationClient
from megatron_webrl.processor import Processor
from megatron_webrl.trajectory import FLOAT32, INT32, unpack
from megatron_webrl.wire import BlockingClient, Client
from megatron_webrl.wire.messages import Checksum, ChecksumValue, Done, Generated, LoadFromDisk

if TYPE_CHECKING:
    from refresher import Refresher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def processor(tiny_model_dir: Path) -> Processor:
    return Processor.load(tiny_model_dir)


@pytest.fixture(scope="module")
def policies(tiny_model_dir: Path, processor: Processor, tmp_path_factory: pytest.TempPathFactory) -> list[Policy]:
    return make_policies(tiny_model_dir, processor, tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def publisher(engine: Any, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Refresher]:
    """Several buckets, two pipeline stages; beside a default process group, as in a trainer."""
    import torch
    from refresher import Refresher

    own = not torch.distributed.is_initialized()
    if own:
        store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("world") / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    publisher = Refresher(engine, tiny_model_dir, tmp_path_factory.mktemp("refresher"), stages=2)
    yield publisher
    publisher.close()
    if own:
        torch.distributed.destroy_process_group()


@pytest.fixture
def control(engine: Any) -> Iterator[BlockingClient]:
    client = BlockingClient(engine.host.status().address, engine.run_id, "test")
    yield client
    client.close()


def ask(engine: Any, prompt: str, images: dict[str, bytes], processor: Processor, **options: Any) -> Generated:
    settings = {"seed": 1, "temperature": 1.0, "timeout_s": 120.0, **options}
    reply = engine.wait(engine.client.generate(processor.encode(prompt), images, **settings))
    assert isinstance(reply, Generated)
    return reply


def checksum(control: BlockingClient) -> str:
    return control.request(Checksum(30.0), timeout=40.0, expect=ChecksumValue).value


def test_serves_nothing_before_the_trainer_published(engine, processor):
    """A host whose SGLang is up waits for weights; a request waits too, and no longer than its deadline."""
    engine.until_state("waiting_weights")
    print(f"start: {time.monotonic() - engine.began:.1f} s")
    began = time.monotonic()
    with pytest.raises(EngineUnreachable):
        ask(engine, TEXT_PROMPT, {}, processor, timeout_s=1.5)
    assert time.monotonic() - began < 4


def test_first_publish_opens_it(engine, publisher, policies, processor):
    """A request that was waiting is served by the published version, and says how long it waited."""
    waiting = engine.submit(
        engine.client.generate(processor.encode(TEXT_PROMPT), {}, seed=1, temperature=1.0, timeout_s=60.0)
    )
    time.sleep(1.0)
    report = publisher.publish(3, policies[0].tensors)
    assert (report.hosts, report.failed, report.version) == (["engine-0"], [], 3)
    reply = waiting.result(60)
    assert set(unpack(reply.versions, INT32)) == {3}
    assert reply.waited_s > 0.9
    engine.until_state("serving")
    assert engine.status.version == 3


@pytest.mark.parametrize(("prompt", "images"), [(TEXT_PROMPT, 0), (IMAGE_PROMPT, 1), (TWO_IMAGES_PROMPT, 2)])
def test_logprobs_are_those_of_the_masked_distribution(engine, policies, processor, prompt, images):
    """Step-0 identity with transformers, at temperature 1 with never-sampled tokens masked, image or not."""
    shown = named(*(screenshot(seed) for seed in range(images)))
    for seed in range(4):
        reply = ask(engine, prompt, shown, processor, seed=seed)
        response = unpack(reply.response_ids, INT32)
        assert len(response)
        assert not set(response.tolist()) & set(processor.banned_ids().tolist())
        assert difference(reply, policies[0], prompt, shown) < TOLERANCE
        assert reply.finish_reason in ("stop", "length")
        assert (reply.finish_reason == "stop") == (response[-1] == processor.end_token_id)


def test_greedy(engine, policies, processor):
    """Temperature 0 takes the most likely token that may be sampled, twice the same."""
    shown = named(screenshot(7))
    replies = [ask(engine, IMAGE_PROMPT, shown, processor, temperature=0.0) for _ in range(2)]
    assert replies[0].response_ids == replies[1].response_ids
    response = unpack(replies[0].response_ids, INT32)
    rows = policies[0].distribution(processor.encode(IMAGE_PROMPT), shown, response.tolist())
    assert (rows.argmax(-1) == response).all()


def test_refresh_in_flight_is_exact(engine, publisher, policies, processor):
    """Requests that run through a refresh: every token's version is true, and its logprob is that of its version's
    weights over the whole prefix (KV is recomputed).  The next request of the same image uses no old embedding."""
    prompt, shown = processor.encode(IMAGE_PROMPT), named(screenshot(3))
    ends = [processor.end_token_id]
    banned = np.concatenate([processor.banned_ids(), ends])

    async def clients() -> tuple[Client, GenerationClient]:
        coordinator = Client(engine.address, engine.run_id, "long")
        return coordinator, GenerationClient(coordinator, SamplingConfig(max_new_tokens=700), banned, ends, 300.0)

    async def close() -> None:
        await client.close()
        coordinator.close()

    coordinator, client = engine.wait(clients())
    flights = [
        engine.submit(client.generate(prompt, shown, seed=i, temperature=1.0, timeout_s=200.0)) for i in range(4)
    ]
    engine.until(lambda: engine.status.running >= 4, 30, "in flight")
    time.sleep(0.7)
    report = publisher.publish(4, policies[1].tensors)
    assert report.hosts == ["engine-0"]
    print(f"refresh in flight: {report.pause_s:.3f} s")
    split = 0
    for flight in flights:
        reply = flight.result(200)
        response, versions = unpack(reply.response_ids, INT32).tolist(), unpack(reply.versions, INT32)
        assert set(versions) <= {3, 4}
        assert (np.diff(versions) >= 0).all()
        got = unpack(reply.logprobs, FLOAT32)
        for version, policy in ((3, policies[0]), (4, policies[1])):
            mine = versions == version
            reference = policy.logprobs(prompt, shown, response, banned=ends)
            if mine.any():
                assert np.abs(reference - got)[mine].max() < TOLERANCE
            if (~mine).any():
                assert np.abs(reference - got)[~mine].max() > 0.01
        split += len(set(versions)) == 2
        assert reply.waited_s > 0
    assert split, "no request ran through the refresh"
    engine.wait(close())
    after = ask(engine, IMAGE_PROMPT, shown, processor)
    assert set(unpack(after.versions, INT32)) == {4}
    assert difference(after, policies[1], IMAGE_PROMPT, shown) < TOLERANCE


def test_repeated_refreshes_keep_the_group(engine, publisher, policies, processor):
    """Further refreshes reuse the weight group; the same image and prefix stay exact each time."""
    shown = named(screenshot(3))
    seconds = []
    for version, policy in ((5, policies[2]), (6, policies[0]), (7, policies[1])):
        seconds.append(publisher.publish(version, policy.tensors).pause_s)
        reply = ask(engine, IMAGE_PROMPT, shown, processor)
        assert set(unpack(reply.versions, INT32)) == {version}
        assert difference(reply, policy, IMAGE_PROMPT, shown) < TOLERANCE
    print("refresh seconds:", [round(s, 3) for s in seconds])
    assert publisher.publisher._groups_made == 1


def test_checksum_proves_the_weights(engine, publisher, policies, control):
    """A refreshed engine holds what a second load of the same export from disk gives, and nothing else does."""
    publisher.publish(8, policies[2].tensors)
    refreshed = checksum(control)
    for policy, same in ((policies[1], False), (policies[2], True)):
        control.request(LoadFromDisk(str(policy.directory), 8, 60.0), timeout=70.0, expect=Done)
        assert (checksum(control) == refreshed) is same
    assert engine.host.state == "serving"


def scheduler() -> psutil.Process:
    return next(p for p in psutil.Process().children(recursive=True) if p.name() == "sglang::scheduler")


def test_killed_sglang_comes_back(engine, publisher, policies, processor):
    """kill -9 in mid-generation: a new incarnation waits for weights, and the request completes once it has them."""
    before = engine.status.incarnation
    prompt, shown = processor.encode(IMAGE_PROMPT), named(screenshot(9))
    doomed = scheduler()
    doomed.send_signal(signal.SIGSTOP)  # so that the request is surely in it when it dies
    flight = engine.submit(engine.client.generate(prompt, shown, seed=1, temperature=1.0, timeout_s=600.0))
    engine.until(lambda: engine.status.running == 1, 30, "in flight")
    doomed.send_signal(signal.SIGKILL)
    engine.until_state("starting", 20)
    engine.until_state("waiting_weights")
    assert engine.status.incarnation == before + 1
    report = publisher.publish(9, policies[0].tensors)
    assert report.hosts == ["engine-0"]
    reply = flight.result(60)
    assert set(unpack(reply.versions, INT32)) == {9}
    assert reply.waited_s > 1
    assert difference(reply, policies[0], IMAGE_PROMPT, shown) < TOLERANCE


def test_stuck_in_a_broadcast(engine, policies, processor, tiny_model_dir, tmp_path):
    """An SGLang that hangs in a refresh is killed by its host at the deadline; the publisher returns with it in `failed`,
    and the restarted one is given the weights from disk as soon as it is up."""
    from refresher import Refresher

    impatient = Refresher(engine, tiny_model_dir, tmp_path, timeout_s=4.0)
    try:
        assert impatient.publish(10, policies[0].tensors).hosts == ["engine-0"]
        scheduler().send_signal(signal.SIGSTOP)
        began = time.monotonic()
        report = impatient.publish(11, policies[1].tensors)
        assert (report.hosts, report.failed) == ([], ["engine-0"])
        assert time.monotonic() - began < 4.0 + 10.0
        impatient.load_joiners()
        engine.until_state("starting")
        engine.until_state("serving")
        reply = ask(engine, IMAGE_PROMPT, named(screenshot(3)), processor)
        assert set(unpack(reply.versions, INT32)) == {11}
        assert difference(reply, policies[1], IMAGE_PROMPT, named(screenshot(3))) < TOLERANCE
    finally:
        impatient.close()


def test_processes_carry_their_mark(engine):
    """Every process of an SGLang can be found by its mark, also under its changed title (the fixture's end uses it)."""
    from megatron_webrl.processes import marked

    names = {p.name() for p in marked(f"{engine.run_id}/engine-0/sglang")}
    assert {"sglang::scheduler", "sglang::detokenizer"} <= names
    assert os.getpid() not in {p.pid for p in marked(engine.run_id)}
