"""Pure parts of an engine host: gate, image cache, request body, reply."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from megatron_webrl.engine.generation import (
    AFTER_JPEG,
    ImageCache,
    ServingGate,
    read_reply,
    request_body,
    token_versions,
)
from megatron_webrl.trajectory import FLOAT32, INT32, pack, unpack
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


def message() -> Generate:
    return Generate(
        prompt_ids=pack([5, 9, 5], INT32),
        digests=["a"],
        images={},
        max_new_tokens=7,
        temperature=0.5,
        seed=2**40 + 3,
        banned_ids=pack([8, 9], INT32),
        stop_ids=pack([2], INT32),
        deadline_s=1.0,
    )


def test_request_body():
    """Token ids as given (one pad an image), the mask as bias, nothing of the model's own sampling defaults."""
    body = request_body(message(), [b"png"])
    sampling = body["sampling_params"]
    assert body["input_ids"] == [5, 9, 5]
    assert [base64.b64decode(data) for data in body["image_data"]] == [b"png"]
    assert set(sampling["logit_bias"]) == {"8", "9"}
    assert np.exp(np.float32(max(sampling["logit_bias"].values()))) == 0
    assert (sampling["top_p"], sampling["top_k"], sampling["stop_token_ids"]) == (1.0, -1, [2])
    assert 0 <= sampling["sampling_seed"] < 2**31
    assert "image_data" not in request_body(message(), [])


def test_a_jpeg_is_marked_for_the_decoder_of_the_trainer():
    """By one byte after its end; a PNG is sent as it is."""
    jpeg = b"\xff\xd8\xff\xe0pixels\xff\xd9"
    data = request_body(message(), [jpeg, b"png"])["image_data"]
    assert [base64.b64decode(image) for image in data] == [jpeg + AFTER_JPEG, b"png"]


def reply(finish: str) -> dict:
    return {
        "output_ids": [4, 2],
        "meta_info": {
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[-0.5, 4, None], [-0.25, 2, None]],
            "weight_versions": [{"version": "6", "start": 0, "end": 2}],
        },
    }


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_read_reply(finish):
    generated = read_reply(reply(finish), waited_s=1.5, running=3)
    assert generated is not None
    assert unpack(generated.response_ids, INT32).tolist() == [4, 2]
    assert unpack(generated.logprobs, FLOAT32).tolist() == [-0.5, -0.25]
    assert unpack(generated.versions, INT32).tolist() == [6, 6]
    assert (generated.finish_reason, generated.waited_s, generated.running) == (finish, 1.5, 3)


def test_aborted_or_contradictory_replies_are_no_samples():
    assert read_reply(reply("abort"), waited_s=0, running=0) is None
    contradiction = reply("stop")
    contradiction["output_ids"] = [4, 3]
    with pytest.raises(ValueError, match="others"):
        read_reply(contradiction, waited_s=0, running=0)
