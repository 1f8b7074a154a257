"""Pure parts of an engine host: gate, image cache, request body, what its stream says."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from megatron_webrl.engine.generation import (
    AFTER_JPEG,
    ImageCache,
    Sampled,
    ServingGate,
    ended,
    request_body,
    token_versions,
)
from megatron_webrl.engine.sglang_server import SglangError, SglangGone
from megatron_webrl.trajectory import INT32, pack
from megatron_webrl.wire.messages import Generate


def test_version_of_every_token():
    """Spans of SGLang become one version a token."""
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]
    assert token_versions(spans, 5).tolist() == [3, 3, 4, 4, 4]


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "3", "start": 0, "end": 2}],
        [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 3, "end": 5}],
        [],
    ],
)
def test_tokens_without_a_version_are_an_error(spans):
    """No token's version is ever guessed."""
    with pytest.raises(ValueError, match="spans"):
        token_versions(spans, 5)


def test_image_cache_is_bounded_and_forgets_the_least_recently_used():
    cache = ImageCache(limit=100)
    cache.put({"a": bytes(40), "b": bytes(40)})
    assert cache.get("a") is not None
    cache.put({"c": bytes(40)})
    assert (cache.get("b"), cache.bytes) == (None, 80)
    cache.put({"a": bytes(40)})
    assert cache.bytes == 80
    cache.put({"huge": bytes(101)})
    assert cache.bytes <= 100


def test_gate_counts_what_requests_waited():
    """Seconds shut are counted across several closures, also while it is shut."""
    now = 0.0
    gate = ServingGate(lambda: now)
    now = 3.0
    gate.open()
    now = 10.0
    assert gate.shut_seconds() == 3.0
    gate.shut()
    gate.shut()
    now = 12.0
    assert gate.shut_seconds() == 5.0
    gate.open()
    now = 20.0
    assert gate.shut_seconds() == 5.0
    assert gate.is_open


def message(prefix: list[int] | None = None, **options: Any) -> Generate:
    return Generate(
        request="r",
        prompt_ids=pack([5, 9, 5], INT32),
        digests=["a"],
        images={},
        max_new_tokens=7,
        temperature=0.5,
        seed=2**40 + 3,
        banned_ids=pack([8, 9], INT32),
        stop_ids=pack([2], INT32),
        deadline_s=1.0,
        wait_s=1.0,
        prefix_ids=pack(prefix or [], INT32),
        **options,
    )


def test_request_body():
    """Token ids as given (one pad an image), the mask as bias, nothing of the model's own sampling defaults."""
    body = request_body(message(), [b"png"], version=6)
    sampling = body["sampling_params"]
    assert body["input_ids"] == [5, 9, 5]
    assert [base64.b64decode(data) for data in body["image_data"]] == [b"png"]
    assert set(sampling["logit_bias"]) == {"8", "9"}
    assert np.exp(np.float32(max(sampling["logit_bias"].values()))) == 0
    assert (sampling["top_p"], sampling["top_k"], sampling["stop_token_ids"]) == (1.0, -1, [2])
    assert 0 <= sampling["sampling_seed"] < 2**31
    assert "image_data" not in request_body(message(), [], version=6)
    narrow = request_body(message(top_p=0.9, top_k=20), [], version=6)["sampling_params"]
    assert (narrow["top_p"], narrow["top_k"]) == (0.9, 20)


def test_prefix_cache_of_a_version_is_its_own():
    """Whatever a refresh leaves in the cache."""
    assert request_body(message(), [], version=6)["extra_key"] != request_body(message(), [], version=7)["extra_key"]


def test_a_reply_is_continued():
    """What was sampled elsewhere follows the prompt, and counts towards the length."""
    body = request_body(message([3, 4, 6]), [b"png"], version=6)
    assert body["input_ids"] == [5, 9, 5, 3, 4, 6]
    assert body["sampling_params"]["max_new_tokens"] == 4


@pytest.mark.parametrize(("ids", "why"), [([], ""), ([2, 3], ""), ([3, 2], "stop"), ([3] * 7, "length"), ([3] * 6, "")])
def test_a_whole_reply_is_not_continued(ids, why):
    """One that ends in a stop token, or has as many tokens as it may."""
    assert ended(ids, [2], 7) == why
    if why:
        with pytest.raises(ValueError, match=why):
            request_body(message(ids), [], version=6)


def test_a_jpeg_is_marked_for_the_decoder_of_the_trainer():
    """By one byte after its end; a PNG is sent as it is."""
    jpeg = b"\xff\xd8\xff\xe0pixels\xff\xd9"
    data = request_body(message(), [jpeg, b"png"], version=6)["image_data"]
    assert [base64.b64decode(image) for image in data] == [jpeg + AFTER_JPEG, b"png"]


def chunk(ids: list[int], version: int, finish: str = "", **meta: Any) -> dict[str, Any]:
    """Of SGLang's stream; `version`: that was served when it was sent."""
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": finish, **meta} if finish else None,
            "output_token_logprobs": [[-i / 4, i, None] for i in ids],
            "weight_version": str(version),
            **meta,
        },
    }


def test_tokens_of_a_stream_are_never_counted_as_newer_than_they_are():
    """Weights changed somewhere between two chunks: the tokens that came with the second may be of before.  The last chunk
    knows better."""
    sampled = Sampled(version=6)
    seen = []
    for ids, version in (([4], 6), ([3, 3], 7), ([3], 8), ([5], 8)):
        sampled.add(chunk(ids, version))
        seen.append(list(sampled.versions))
    assert seen == [[6], [6, 6, 6], [6, 6, 6, 7], [6, 6, 6, 7, 8]]
    assert (sampled.ids, sampled.logprobs, sampled.finish_reason) == (
        [4, 3, 3, 3, 5],
        [-1, -0.75, -0.75, -0.75, -1.25],
        "",
    )
    spans = [{"version": "6", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 6}]
    sampled.add(chunk([2], 8, "stop", weight_versions=spans))
    assert (sampled.versions, sampled.finish_reason) == ([6, 6, 8, 8, 8, 8], "stop")


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_finish_reason(finish):
    sampled = Sampled(version=6)
    sampled.add(chunk([4, 2], 6, finish, weight_versions=[{"version": "6", "start": 0, "end": 2}]))
    assert sampled.finish_reason == finish


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (chunk([4], 6, "abort", message="by somebody"), SglangGone),
        (chunk([4], 6, "abort", message="too long", status_code=400), SglangError),
        ({"error": {"message": "too long", "code": 400}}, SglangError),
        ({"error": {"message": "broken", "code": 500}}, SglangGone),
        (chunk([4], 6) | {"output_ids": [5]}, ValueError),
    ],
)
def test_what_is_no_sample_adds_nothing(last, error):
    """Aborted, refused or contradictory: what was sampled before stays, and may be continued unless it was refused."""
    sampled = Sampled(version=6)
    sampled.add(chunk([4, 4], 6))
    with pytest.raises(error) as caught:
        sampled.add(last)
    assert type(caught.value) is error
    assert (sampled.ids, sampled.finish_reason) == ([4, 4], "")
