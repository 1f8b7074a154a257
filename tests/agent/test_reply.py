import json
import time
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
    st.fixed_dictionaries({"action": st.just("drag"), "to": COORDINATE}, optional={"coordinate": COORDINATE}),
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


def action_of(reply: str) -> dict[str, Any]:
    return parse_reply(reply).action


@given(ACTION, st.sampled_from(["", "I see a button.\n", "Memory: {}\nAction: click\n", "<think>hm, {</think>\n"]))
def test_a_formatted_action_is_read_back(action: dict[str, Any], thoughts: str) -> None:
    """parse ∘ format = identity, whatever text was written before the call."""
    assert action_of(thoughts + format_call(action)) == action


@given(st.text() | st.text(alphabet="{}[]\",:'“”\\ab1 <>/_tool_call`"))
def test_any_text_is_an_action_or_malformed(text: str) -> None:
    """No other exception escapes the parser."""
    for reply in (text, f"<tool_call>{text}</tool_call>", f'{{"action": {text}}}', f"Memory: {{{text}"):
        with pytest.raises(MalformedReply):
            parse_reply(reply)


@pytest.mark.parametrize(
    "piece",
    [
        "{",
        "[",
        "'",
        "“",
        '"',
        '{"a":',
        "<tool_call>",
        "</tool_call>",
        "```",
        '{"action": ',
        "Memory: {",
        "9",
        "' ",
        "\\",
        " ",
    ],
)
def test_time_grows_with_the_length_only(piece: str) -> None:
    """A megabyte of anything, inside a call and outside, is refused in seconds (quadratic would be hours)."""
    began = time.monotonic()
    for reply in (piece * (2**20 // len(piece)), f"<tool_call>{piece * (2**18 // len(piece))}"):
        with pytest.raises(MalformedReply):
            parse_reply(reply)
    assert time.monotonic() - began < 20


def test_the_format_is_qwen_s() -> None:
    assert format_call({"action": "left_click", "coordinate": [500, 20]}) == (
        '<tool_call>\n{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [500, 20]}}\n</tool_call>'
    )


@pytest.mark.parametrize("text", ["</tool_call>", "<tool_call>", "<|im_end|>", "a <|image_pad|> b", "π \u2028 \x00"])
def test_markup_in_a_text_stays_text(text: str) -> None:
    """It neither ends the call nor becomes a special token, and comes back unchanged."""
    reply = format_call({"action": "type", "text": text})
    assert "<|" not in reply
    assert action_of(reply)["text"] == text


# How models write one and the same call --------------------------------------------------------------------------------

ACTIONS: list[dict[str, Any]] = [
    {"action": "left_click", "coordinate": [500, 20]},
    {"action": "double_click", "coordinate": [0, 1000]},
    {"action": "right_click", "coordinate": [1, 2]},
    {"action": "mouse_move", "coordinate": [999, 1]},
    {"action": "type", "text": "it's 5 o'clock, isn't it: yes", "coordinate": [10, 20], "press_enter": True},
    {"action": "type", "text": "{not: [a call]}"},
    {"action": "drag", "coordinate": [1, 2], "to": [3, 4]},
    {"action": "key", "keys": ["ctrl", "a"]},
    {"action": "scroll", "direction": "down", "coordinate": [5, 5]},
    {"action": "wait", "time": 2},
    {"action": "go_back"},
    {"action": "navigate", "url": "https://example.org/a?b=c&d=%20#e"},
    {"action": "answer", "text": "42 €\nin two lines"},
]


def _call(action: dict[str, Any]) -> str:
    return json.dumps({"name": "computer_use", "arguments": action}, ensure_ascii=False)


def _tag(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


SHAPES = {
    "on one line": lambda a: f"<tool_call>{_call(a)}</tool_call>",
    "indented": lambda a: _tag(json.dumps({"name": "computer_use", "arguments": a}, indent=2)),
    "fence inside the tags": lambda a: _tag(f"```json\n{_call(a)}\n```"),
    "fence around the tags": lambda a: f"```\n{_tag(_call(a))}\n```",
    "fence without tags": lambda a: f"Action: as follows\n```json\n{_call(a)}\n```",
    "bare": lambda a: f"I do this now: {_call(a)}",
    "trailing commas": lambda a: _tag(_call(a).replace("}}", ",},}")),
    "python's quotes": lambda a: _tag(repr({"name": "computer_use", "arguments": a})),
    "typographic quotes": lambda a: _tag(
        "{“name”: “computer_use”, “arguments”: {"
        + ", ".join(f"“{k}”: " + (f"“{v}”" if isinstance(v, str) else json.dumps(v)) for k, v in a.items())
        + "}}"
    ),
    "keys without quotes": lambda a: _tag(
        "{name: 'computer_use', arguments: {" + ", ".join(f"{k}: {json.dumps(v)}" for k, v in a.items()) + "}}"
    ),
    "no closing tag": lambda a: f"Intention: go on\n<tool_call>\n{_call(a)}",
    "a brace missing": lambda a: _tag(_call(a)[:-1]),
    "a brace too many": lambda a: _tag(_call(a) + "}"),
    "a thought before": lambda a: f"<think>\nmaybe <tool_call>? or {{}}\n</think>\n\n{_tag(_call(a))}",
    "the end of a thought before": lambda a: f"so I click.\n</think>\n{_tag(_call(a))}",
    "words after": lambda a: f"{_tag(_call(a))}\nI hope that this helps.",
    "twice the same": lambda a: _tag(_call(a)) * 2,
    "twice in one tag": lambda a: _tag(f"{_call(a)}\n{_call(a)}"),
    "a list of one": lambda a: _tag(f"[{_call(a)}]"),
    "arguments in a string": lambda a: _tag(json.dumps({"name": "computer_use", "arguments": json.dumps(a)})),
    "arguments alone": lambda a: _tag(json.dumps(a)),
    "as OpenAI's": lambda a: _tag(
        json.dumps({"id": "1", "type": "function", "function": {"name": "computer_use", "arguments": json.dumps(a)}})
    ),
    "its action as the tool": lambda a: _tag(
        json.dumps({"name": a["action"], "arguments": {k: v for k, v in a.items() if k != "action"}})
    ),
    "with reasons": lambda a: _tag(_call({**a, "reason": "because"})),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action["action"])
def test_one_call_written_in_many_ways(shape: str, action: dict[str, Any]) -> None:
    """What is tolerated means what the strict form means."""
    assert action_of(SHAPES[shape](action)) == action


CLICK = {"action": "left_click", "coordinate": [500, 20]}
OTHERS = [
    ({"action": "click", "coordinate": [500, 20]}, CLICK),
    ({"action": "Left Click", "coordinate": [500, 20]}, CLICK),
    ({"action": "tap", "point": [500, 20]}, CLICK),
    ({"action": "left_click", "coordinate": ["500", "20"]}, CLICK),
    ({"action": "left_click", "coordinate": [500.0, 20.4]}, CLICK),
    ({"action": "left_click", "coordinate": "500, 20"}, CLICK),
    ({"action": "left_click", "coordinate": "(500,20)"}, CLICK),
    ({"action": "left_click", "coordinate": "<point>500 20</point>"}, CLICK),
    ({"action": "left_click", "coordinate": {"x": 500, "y": 20}}, CLICK),
    ({"action": "left_click", "x": 500, "y": 20}, CLICK),
    ({"action": "left_click", "coordinate": [[500, 20]]}, CLICK),
    ({"action": "left_click", "bbox_2d": [490, 10, 510, 30]}, CLICK),
    ({"action": "left_click", "coordinate": [490, 10, 510, 30]}, CLICK),
    ({"action": "left_click", "box": [[490, 10], [510, 30]]}, CLICK),
    ({"action": "left_click", "coordinate": [500, 20], "point": [500, 20]}, CLICK),
    ({"action": "left_click", "coordinate": [500, 20], "text": None}, CLICK),
    ({"action": "left_click", "coordinate": [500, 20], "button": "left"}, CLICK),
    ({"action": "hover", "position": [1, 2]}, {"action": "mouse_move", "coordinate": [1, 2]}),
    ({"action": "dblclick", "coordinate": [1, 2]}, {"action": "double_click", "coordinate": [1, 2]}),
    ({"action": "left_click_drag", "coordinate": [3, 4]}, {"action": "drag", "to": [3, 4]}),
    (
        {"action": "left_click_drag", "start_coordinate": [1, 2], "coordinate": [3, 4]},
        {"action": "drag", "coordinate": [1, 2], "to": [3, 4]},
    ),
    ({"action": "drag", "start": [1, 2], "end": [3, 4]}, {"action": "drag", "coordinate": [1, 2], "to": [3, 4]}),
    ({"action": "input_text", "content": "x"}, {"action": "type", "text": "x"}),
    ({"action": "type", "text": 42}, {"action": "type", "text": "42"}),
    ({"action": "type", "text": "x", "enter": "true"}, {"action": "type", "text": "x", "press_enter": True}),
    ({"action": "key", "keys": "ctrl+a"}, {"action": "key", "keys": ["ctrl", "a"]}),
    ({"action": "key", "keys": ["ctrl+a"]}, {"action": "key", "keys": ["ctrl", "a"]}),
    ({"action": "press", "key": "Enter"}, {"action": "key", "keys": ["Enter"]}),
    ({"action": "hotkey", "keys": "ctrl + shift + t"}, {"action": "key", "keys": ["ctrl", "shift", "t"]}),
    ({"action": "key", "keys": "+"}, {"action": "key", "keys": ["+"]}),
    ({"action": "scroll", "direction": "Down"}, {"action": "scroll", "direction": "down"}),
    ({"action": "scroll", "pixels": -500}, {"action": "scroll", "direction": "down"}),
    ({"action": "scroll", "pixels": "300"}, {"action": "scroll", "direction": "up"}),
    ({"action": "scroll", "direction": "up", "amount": 3}, {"action": "scroll", "direction": "up"}),
    ({"action": "wait", "time": "3"}, {"action": "wait", "time": 3}),
    ({"action": "wait", "seconds": "1.5 s"}, {"action": "wait", "time": 1.5}),
    ({"action": "sleep", "duration": 1}, {"action": "wait", "time": 1}),
    ({"action": "back"}, {"action": "go_back"}),
    ({"action": "goto", "url": "http://x"}, {"action": "navigate", "url": "http://x"}),
    ({"action": "open_url", "link": "http://x"}, {"action": "navigate", "url": "http://x"}),
    ({"action": "terminate", "status": "success"}, {"action": "answer", "text": "success"}),
    ({"action": "finish", "answer": "42"}, {"action": "answer", "text": "42"}),
    ({"action": "done", "content": "42"}, {"action": "answer", "text": "42"}),
    ({"action": "answer", "text": 7}, {"action": "answer", "text": "7"}),
]


@pytest.mark.parametrize(("written", "meant"), OTHERS, ids=lambda value: json.dumps(value)[:60])
def test_words_of_other_agents(written: dict[str, Any], meant: dict[str, Any]) -> None:
    """Names of Qwen's, WebGym's and others' tools, and the ways in which they give points, keys and times."""
    assert action_of(_tag(json.dumps({"name": "computer_use", "arguments": written}))) == meant


CALL = '{"name": "computer_use", "arguments": {"action": "go_back"}}'


def _with(**arguments: Any) -> str:
    return _tag(json.dumps({"name": "computer_use", "arguments": arguments}))


REFUSED = [
    ("", "exactly one"),
    ("click the button", "exactly one"),
    ("click at {500, 20}", "exactly one"),
    (f"{_tag(CALL)}{_with(action='wait', time=1)}", "several, and they differ"),
    (_tag(f"{CALL} {_call(CLICK)}"), "several, and they differ"),
    (f"```{CALL}``` or ```{_call(CLICK)}```", "several, and they differ"),
    ("<think>I click <tool_call>" + CALL + "</tool_call>", "close your thinking"),
    ("<tool_call></tool_call>", "not valid JSON"),
    ("<tool_call>", "not valid JSON"),
    (_tag("go back"), "not valid JSON"),
    (_tag(CALL + " and then more"), "not valid JSON"),
    (_tag(CALL[:30]), "not valid JSON"),
    (_tag('{"name": "computer_use", "arguments": {"action": "type", "text": "say "hi" now"}}'), "not valid JSON"),
    ("<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deeply"),
    ("<tool_call>" + "9" * 10_000 + "</tool_call>", "not valid JSON"),
    (_tag('{"name": "computer_use", "arguments": {"action": "wait", "time": NaN}}'), "not valid JSON"),
    (_tag('{"name": "computer_use", "arguments": {"action": "wait", "time": 1, "time": 2}}'), "occurs twice"),
    (_tag("{'name': 'computer_use'}"), "must be"),
    (_tag('{"name": "shell", "arguments": {"action": "go_back"}}'), "must be"),
    (_tag('{"name": "shell", "arguments": {"command": "ls"}}'), "must be"),
    (_tag('{"name": "computer_use", "arguments": {"action": "go_back"}, "extra": 1}'), "must be"),
    (_tag('{"name": "computer_use", "arguments": "go_back"}'), "object"),
    (_tag('{"name": "computer_use", "arguments": null}'), "object"),
    (_tag("[]"), "must be"),
    (_tag("5"), "must be"),
    (_with(action="launch"), "unknown action 'launch'"),
    (_with(action=["left_click"]), "unknown action"),
    (_with(coordinate=[1, 2]), "unknown action"),
    (_with(action="left_click"), "needs coordinate"),
    (_with(action="left_click", coordinate=[500, 1200]), "0 to 1000"),
    (_with(action="left_click", coordinate=[-1, 2]), "0 to 1000"),
    (_with(action="left_click", coordinate=[0.5, 0.25]), "not shares of 1"),
    (_with(action="left_click", coordinate=[1, 2, 3]), "two whole numbers"),
    (_with(action="left_click", coordinate=["a", "b"]), "two whole numbers"),
    (_with(action="left_click", coordinate=[True, 1]), "two whole numbers"),
    (_with(action="left_click", bbox=[510, 30, 490, 10]), "a box must be"),
    (_with(action="left_click", coordinate=[1, 2], point=[3, 4]), "two values that differ"),
    (_with(action="left_click", coordinate=[1, 2], text="x"), "takes no 'text'"),
    (_with(action="type"), "needs text"),
    (_with(action="type", text=["a"]), "text must be"),
    (_with(action="type", text="a", value="b"), "two values that differ"),
    (_with(action="type", text="x", press_enter="maybe"), "press_enter"),
    (_with(action="key", keys="launch"), "unknown key"),
    (_with(action="scroll", pixels=0), "needs direction"),
    (_with(action="scroll", direction="in"), "direction must be"),
    (_with(action="wait", time=60), "time must be"),
    (_with(action="wait", time="soon"), "time must be"),
    (_with(action="navigate", url=""), "url must be"),
    (_with(action="drag", coordinate=[1, 2]), "needs to"),
    (_with(action="drag", to=[1, 2000]), "to must be"),
]


@pytest.mark.parametrize(("reply", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_a_malformed_reply_says_why(reply: str, reason: str) -> None:
    """Nothing is guessed: what could mean two things, or nothing, is refused in a sentence."""
    with pytest.raises(MalformedReply, match=reason) as caught:
        parse_reply(reply)
    assert len(str(caught.value)) < 300


def test_a_thinking_model_closes_its_thought() -> None:
    """Its prompt opened the thought, so a reply without the end of it is all thought."""
    assert parse_reply(f"hm\n</think>\n{_tag(CALL)}", thinking=True).action == {"action": "go_back"}
    with pytest.raises(MalformedReply, match="close your thinking"):
        parse_reply(f"I might write {_tag(CALL)}", thinking=True)


@pytest.mark.parametrize(
    ("written", "memory", "progress"),
    [
        ('Memory: {"a": 1}\nProgress: {"b": "done"}\nIntention: x\nAction: y\n', {"a": 1}, {"b": "done"}),
        ('**Memory:** ```json\n{\n "a": {"b": [1, 2]},\n}\n```\n', {"a": {"b": [1, 2]}}, None),
        ("## Memory:\n{'a': 'it's'}\nProgress:\n{}\n", {"a": "it's"}, {}),
        ("- memory: {“a”: “b”}\n", {"a": "b"}, None),
        ("Memory: none yet\nProgress: half\n", None, None),
        ('Memory: {"a": 1\nProgress: {"b": 2}\n', {"a": 1}, {"b": 2}),
        ('Memory: {"a": 1}\nMemory: {"a": 2}\n', {"a": 2}, None),
        ('Memory: ["a"]\n', None, None),
        ('Memory: {"a": "' + "x" * 9000 + '"}\n', None, None),
        ("", None, None),
    ],
)
def test_what_a_reply_remembers(written: str, memory: Any, progress: Any) -> None:
    """Memory and Progress as they stand, if they are JSON objects of bounded size; the call counts whatever they are."""
    assert parse_reply(written + _tag(CALL)) == ({"action": "go_back"}, memory, progress)


@pytest.mark.parametrize("text", ["</tool_call>", "<tool_call>", '"', "\n", "arguments"])
def test_a_stop_text_within_every_call_is_refused(text: str) -> None:
    """No call would be whole; what follows a call is fine."""
    check_stop(["<|endoftext|>", "\n\n", "Observation"])
    with pytest.raises(UserError, match=r"sampling\.stop") as caught:
        check_stop(["<|endoftext|>", text])
    assert repr(text) in str(caught.value)
