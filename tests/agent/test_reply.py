from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.agent import MalformedReply, check_stop, format_call, parse_reply
from megatron_webrl.errors import UserError

COORDINATE = st.lists(st.integers(0, 1000), min_size=2, max_size=2)
ACTION = st.one_of(
    st.fixed_dictionaries(
        {
            "action": st.sampled_from(["left_click", "double_click", "right_click", "mouse_move"]),
            "coordinate": COORDINATE,
        }
    ),
    st.fixed_dictionaries(
        {"action": st.just("type"), "text": st.text()},
        optional={"coordinate": COORDINATE, "press_enter": st.booleans()},
    ),
    st.fixed_dictionaries(
        {"action": st.just("key"), "keys": st.lists(st.sampled_from(["ctrl", "a", "Enter"]), min_size=1)}
    ),
    st.fixed_dictionaries(
        {"action": st.just("scroll"), "direction": st.sampled_from(["up", "down", "left", "right"])},
        optional={"coordinate": COORDINATE},
    ),
    st.fixed_dictionaries({"action": st.just("wait"), "time": st.integers(0, 10) | st.floats(0, 10)}),
    st.just({"action": "go_back"}),
    st.fixed_dictionaries({"action": st.just("navigate"), "url": st.text(min_size=1)}),
    st.fixed_dictionaries({"action": st.just("answer"), "text": st.text()}),
).filter(lambda action: len(action.get("keys", [])) <= 5)


@given(ACTION, st.sampled_from(["", "I see a button.\n", "Memory: {}\nAction: click\n"]))
def test_a_formatted_action_is_read_back(action: dict[str, Any], thoughts: str) -> None:
    """parse ∘ format = identity, whatever text was written before the call."""
    assert parse_reply(thoughts + format_call(action)) == action


@given(st.text())
def test_any_text_is_an_action_or_malformed(text: str) -> None:
    """No other exception escapes the parser."""
    for reply in (text, f"<tool_call>{text}</tool_call>"):
        with pytest.raises(MalformedReply):
            parse_reply(reply)


def test_the_format_is_qwen_s() -> None:
    assert format_call({"action": "left_click", "coordinate": [500, 20]}) == (
        '<tool_call>\n{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [500, 20]}}\n</tool_call>'
    )


@pytest.mark.parametrize("text", ["</tool_call>", "<tool_call>", "<|im_end|>", "a <|image_pad|> b", "π \u2028 \x00"])
def test_markup_in_a_text_stays_text(text: str) -> None:
    """It neither ends the call nor becomes a special token, and comes back unchanged."""
    reply = format_call({"action": "type", "text": text})
    assert "<|" not in reply
    assert parse_reply(reply)["text"] == text


CALL = '{"name": "computer_use", "arguments": {"action": "go_back"}}'


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("", "exactly one"),
        ("click the button", "exactly one"),
        (f"<tool_call>{CALL}", "exactly one"),
        (f"{CALL}</tool_call>", "exactly one"),
        (f"<tool_call>{CALL}</tool_call>" * 2, "exactly one"),
        (f"</tool_call>{CALL}<tool_call>", "JSON"),
        (f"<tool_call>{CALL}</tool_call> done", "nothing after"),
        ("<tool_call></tool_call>", "JSON"),
        ("<tool_call>{'name': 'computer_use'}</tool_call>", "JSON"),
        (f"<tool_call>{CALL},</tool_call>", "JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "JSON"),
        ("<tool_call>" + "9" * 10_000 + "</tool_call>", "JSON"),
        (
            '<tool_call>{"name": "computer_use", "arguments": {"action": "wait", "time": %s}}</tool_call>'
            % ("3" * 400),
            "time must be",
        ),
        (f"<tool_call>[{CALL}]</tool_call>", "must be"),
        ('<tool_call>{"name": "browser", "arguments": {"action": "go_back"}}</tool_call>', "must be"),
        ('<tool_call>{"name": "computer_use", "arguments": {"action": "go_back"}, "id": 1}</tool_call>', "must be"),
        ('<tool_call>{"name": "computer_use", "arguments": "go_back"}</tool_call>', "object"),
        ('<tool_call>{"name": "computer_use", "arguments": {"action": "wait", "time": NaN}}</tool_call>', "JSON"),
        (
            '<tool_call>{"name": "computer_use", "arguments": {"action": "wait", "time": 1, "time": 2}}</tool_call>',
            "JSON",
        ),
        (
            '<tool_call>{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [5, "5"]}}</tool_call>',
            "coordinate",
        ),
    ],
)
def test_a_malformed_reply_says_why(reply: str, reason: str) -> None:
    """Strict: exactly one call, exact names, exact types."""
    with pytest.raises(MalformedReply, match=reason):
        parse_reply(reply)


@pytest.mark.parametrize("text", ["</tool_call>", "<tool_call>", '"', "\n", "arguments"])
def test_a_stop_text_within_every_call_is_refused(text: str) -> None:
    """No call would be whole; what follows a call is fine."""
    check_stop(["<|endoftext|>", "\n\n", "Observation"])
    with pytest.raises(UserError, match=r"sampling\.stop") as caught:
        check_stop(["<|endoftext|>", text])
    assert repr(text) in str(caught.value)
