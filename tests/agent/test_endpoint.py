import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from megatron_webrl import chat
from megatron_webrl.agent import Told, build_prompt, check_endpoint, format_call
from megatron_webrl.agent.endpoint import EndpointPolicy, messages
from megatron_webrl.config import AgentConfig, RunConfig
from megatron_webrl.engine import EngineUnreachable
from megatron_webrl.errors import UserError
from megatron_webrl.processor import Processor
from megatron_webrl.trajectory import INT32, image_digest, unpack
from megatron_webrl.wire.messages import Generated

IMAGES = {image_digest(data): data for data in (b"\x89PNG one", b"\xff\xd8\xff two")}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "BACK_OFF_S", (0.02, 0.05))


async def asked(
    config: RunConfig, processor: Processor, answer: Callable[[int], Any], *, timeout_s: float = 5.0, **evaluation: Any
) -> tuple[Generated, list[dict[str, Any]]]:
    """Reply of a scripted server, and the bodies that it got.  answer: number of the request -> text or response."""
    bodies: list[dict[str, Any]] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json() | {"key": request.headers.get("Authorization")})
        said = answer(len(bodies))
        if asyncio.iscoroutine(said):
            said = await said
        if isinstance(said, web.Response):
            return said
        return web.json_response({"choices": [{"message": {"content": said}, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    how = config.evaluation.model_copy(update={"endpoint": url, "endpoint_model": "m", **evaluation})
    policy = EndpointPolicy(config.model_copy(update={"evaluation": how}), processor)
    prompt = build_prompt(AgentConfig(history_window=2), Told("Click “OK”."), 2)
    try:
        reply = await policy.generate(
            processor.encode(prompt), IMAGES, seed=3, temperature=0.5, timeout_s=timeout_s, digests=list(IMAGES), top_p=0.9,
            top_k=20, affinity=None,
        )  # fmt: skip
    finally:
        await policy.close()
        await runner.cleanup()
    return reply, bodies


async def test_a_reply_is_tokens_of_what_came_back(config: RunConfig, processor: Processor) -> None:
    text = format_call({"action": "left_click", "coordinate": [1, 2]})
    reply, [body] = await asked(config, processor, lambda _: text)
    ids = unpack(reply.response_ids, INT32)
    assert processor.decode(ids) == text
    assert ids[-1] == processor.end_token_id
    assert set(unpack(reply.versions, INT32)) == {-1}
    assert (body["model"], body["temperature"], body["top_p"], body["top_k"], body["seed"]) == ("m", 0.5, 0.9, 20, 3)
    assert body["max_tokens"] == config.sampling.max_new_tokens


async def test_the_prompt_is_the_same_in_messages(config: RunConfig, processor: Processor) -> None:
    """System and user turn, screenshots in their places, nothing of the reply's beginning."""
    told = Told("Click “OK”.", [], {"a": "<|im_end|>"})
    prompt = build_prompt(AgentConfig(history_window=2, thinking=True), told, 2)
    system, user = messages(prompt, list(IMAGES), IMAGES)
    assert (system["role"], user["role"]) == ("system", "user")
    assert "<tools>" in system["content"]
    kinds = [part["type"] for part in user["content"]]
    assert kinds == ["text", "image_url", "text", "image_url"]
    urls = [part["image_url"]["url"] for part in user["content"] if part["type"] == "image_url"]
    assert [url.partition(";")[0] for url in urls] == ["data:image/png", "data:image/jpeg"]
    said = "".join(part.get("text", "") for part in user["content"])
    assert "Click “OK”." in said
    assert "<|vision" not in said
    assert "<think>" not in str((system, user))


async def test_a_reply_that_was_cut_says_so(config: RunConfig, processor: Processor) -> None:
    cut = {"choices": [{"message": {"content": "Memory: {"}, "finish_reason": "length"}]}
    reply, _ = await asked(config, processor, lambda _: web.json_response(cut))
    assert reply.finish_reason == "length"
    assert unpack(reply.response_ids, INT32)[-1] != processor.end_token_id


async def test_busy_servers_are_asked_again_and_dead_ones_are_faults(config: RunConfig, processor: Processor) -> None:
    """Within the request's deadline; what will never be is not asked twice; the key is sent, and in no message."""
    reply, bodies = await asked(
        config, processor, lambda n: "done" if n == 3 else web.Response(status=(429, 500)[n - 1])
    )
    assert len(bodies) == 3
    assert processor.decode(unpack(reply.response_ids, INT32)) == "done"
    with pytest.raises(EngineUnreachable, match="401"):
        await asked(config, processor, lambda _: web.Response(status=401))
    for answer in (lambda _: web.Response(status=503), lambda _: asyncio.sleep(3), lambda _: web.Response(text="?")):
        with pytest.raises(EngineUnreachable):
            await asked(config, processor, answer, timeout_s=0.4)


async def test_the_key_comes_from_the_environment(
    config: RunConfig, processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLICY_KEY", "sk-secret")
    _, [body] = await asked(config, processor, lambda _: "x", api_key_env="POLICY_KEY")
    assert body["key"] == "Bearer sk-secret"
    with pytest.raises(EngineUnreachable) as caught:
        await asked(config, processor, lambda _: web.Response(status=400, text="no"), api_key_env="POLICY_KEY")
    assert "sk-secret" not in str(caught.value)
    monkeypatch.delenv("POLICY_KEY")
    how = config.evaluation.model_copy(update={"api_key_env": "POLICY_KEY"})
    with pytest.raises(UserError, match=r"evaluation\.api_key_env=POLICY_KEY"):
        check_endpoint(config.model_copy(update={"evaluation": how}))
