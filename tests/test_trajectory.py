"""What flows: packing and encoding lose nothing, and malformed bytes are refused."""

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_webrl.trajectory import (
    FLOAT32,
    INT32,
    Assignment,
    ImageRef,
    Lane,
    Outcome,
    Step,
    Task,
    Trajectory,
    decode_steps,
    encode_steps,
    image_digest,
    pack,
    unpack,
)

quick = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])

int32 = st.integers(-(2**31), 2**31 - 1)
text = st.text(st.characters(blacklist_categories=["Cs"]))
images = st.builds(
    ImageRef,
    st.binary().map(image_digest),
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.tuples(*[st.integers(1, 999)] * 3),
)
actions = st.none() | st.dictionaries(
    text, st.recursive(st.none() | st.booleans() | int32 | text, st.lists, max_leaves=5)
)
steps = st.builds(
    Step,
    prompt_ids=st.lists(int32).map(lambda ids: pack(ids, INT32)),
    images=st.lists(images, max_size=3),
    response_ids=st.lists(int32).map(lambda ids: pack(ids, INT32)),
    logprobs=st.lists(st.floats(width=32)).map(lambda values: pack(values, FLOAT32)),
    versions=st.lists(int32).map(lambda ids: pack(ids, INT32)),
    finish_reason=st.sampled_from(["stop", "length"]),
    text=text,
    action=actions,
    error=text,
    url=text,
    title=text,
    changed=st.booleans(),
    generate_s=st.floats(0, 1e6),
    act_s=st.floats(0, 1e6),
)


@quick
@given(st.lists(int32))
def test_token_ids_survive_packing(values: list[int]):
    """int32 values come back as they were, four bytes each, little-endian."""
    data = pack(values, INT32)
    assert len(data) == 4 * len(values)
    assert unpack(data, INT32).tolist() == values
    assert data == b"".join(value.to_bytes(4, "little", signed=True) for value in values)


@quick
@given(st.lists(st.floats(width=32)))
def test_logprobs_survive_packing_to_the_bit(values: list[float]):
    """float32 values come back bit for bit: infinities, negative zero and nan too."""
    again = unpack(pack(values, FLOAT32), FLOAT32)
    assert pack(again, FLOAT32) == pack(values, FLOAT32)
    np.testing.assert_array_equal(again, np.array(values, np.float32))


@quick
@given(st.lists(steps, max_size=4))
def test_steps_survive_encoding(value: list[Step]):
    """A payload decodes to the steps that it was made of."""
    assert decode_steps(encode_steps(value)) == value


@quick
@given(st.lists(steps, max_size=2), st.binary(min_size=1, max_size=40))
def test_malformed_payload_is_refused(value: list[Step], junk: bytes):
    """Bytes behind a payload, or a payload cut short, raise msgspec's errors and never give other steps."""
    payload = encode_steps(value)
    with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
        decode_steps(payload + junk)
    with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
        decode_steps(payload[:-1])


@quick
@given(
    outcome=st.sampled_from(Outcome),
    lane=st.sampled_from(Lane),
    reward=st.floats(-1, 1),
    payload=st.binary(),
    key=st.tuples(st.integers(0, 2**40), st.integers(0, 64), st.integers(0, 9)),
)
def test_trajectory_survives_the_wire(outcome, lane, reward, payload, key):
    """An envelope with its opaque payload is the same after msgpack, and its key is the account's unit."""
    task = Task("miniwob/click-test/17", "miniwob", "click-test", 17, 10)
    trajectory = Trajectory(
        Assignment(task, *key, lane, 1, 1.0, 600.0),
        outcome,
        "solved",
        reward,
        1,
        38,
        900,
        0,
        2,
        ["d"],
        "worker-0",
        1.0,
        2.0,
        payload,
    )
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(trajectory), type=Trajectory)
    assert again == trajectory
    assert again.assignment.key == key


def test_digest_is_the_first_half_of_sha_256():
    """FIPS 180-4's algorithm, its first 16 bytes in hexadecimal; other bytes, other name."""
    assert image_digest(b"") == "e3b0c44298fc1c149afbf4c8996fb924"
    assert image_digest(b"a") != image_digest(b"b")
