"""The reply of the policy: what it remembers, and exactly one call of the tool.

Tolerant of how models write (fences, quotes, missing tags, names of other agents' tools, boxes for points, numbers as
strings), strict about what they mean: nothing is guessed, and a refusal says in a sentence what to write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from megatron_webrl.browser import ACTIONS, SCALE, check_action
from megatron_webrl.errors import UserError
from megatron_webrl.loose_json import read_json, strict_json

TOOL = "computer_use"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
THOUGHT = "</think>"
MEMORY_CHARACTERS = 8_000
"""Of a Memory or Progress, as JSON, at most."""
MAX_BRACES = 50
"""So many places where a call without tags may begin are tried."""
_MARKUP = re.compile(r"<(?=/?tool_call>|\|)")
_FENCE = re.compile(r"```[a-zA-Z_]*")
_SECTION = re.compile(r"^[ \t#>*_-]{0,8}(Memory|Progress|Intention|Action)[ \t*_]{0,4}:", re.MULTILINE | re.IGNORECASE)

TOOLS = (TOOL, "computer", "browser", "browser_use", "mobile_use", "web", "web_agent")
ACTION_NAMES = {
    "click": "left_click", "tap": "left_click", "single_click": "left_click", "leftclick": "left_click",
    "doubleclick": "double_click", "dblclick": "double_click", "rightclick": "right_click", "context_click": "right_click",
    "hover": "mouse_move", "move": "mouse_move", "move_to": "mouse_move", "move_mouse": "mouse_move",
    "input": "type", "input_text": "type", "type_text": "type", "write": "type", "fill": "type", "enter_text": "type",
    "press": "key", "keypress": "key", "press_key": "key", "hotkey": "key", "key_press": "key", "keys": "key",
    "left_click_drag": "drag", "drag_and_drop": "drag", "swipe": "drag", "drag_to": "drag",
    "sleep": "wait", "pause": "wait",
    "back": "go_back", "goback": "go_back", "navigate_back": "go_back", "browser_back": "go_back",
    "goto": "navigate", "go_to": "navigate", "open_url": "navigate", "visit": "navigate", "open": "navigate",
    "go_to_url": "navigate", "navigate_to": "navigate", "load_url": "navigate",
    "terminate": "answer", "finish": "answer", "finished": "answer", "done": "answer", "stop": "answer",
    "submit_answer": "answer", "final_answer": "answer", "complete": "answer",
}  # fmt: skip
"""What other agents call the actions."""
ARGUMENT_NAMES = {
    "coordinates": "coordinate", "point": "coordinate", "position": "coordinate", "pos": "coordinate", "coord": "coordinate",
    "center": "coordinate", "box": "coordinate", "bbox": "coordinate", "bbox_2d": "coordinate", "point_2d": "coordinate",
    "start_coordinate": "coordinate", "start": "coordinate", "start_box": "coordinate", "from": "coordinate",
    "end": "to", "end_coordinate": "to", "end_box": "to", "target": "to", "to_coordinate": "to", "destination": "to",
    "value": "text", "content": "text", "answer": "text", "string": "text", "message": "text",
    "key": "keys", "hotkey": "keys", "seconds": "time", "duration": "time", "secs": "time",
    "link": "url", "href": "url", "address": "url", "website": "url",
    "enter": "press_enter", "submit": "press_enter", "pressenter": "press_enter",
}  # fmt: skip
"""What other agents call the arguments."""
SAID_BESIDE = frozenset(("reason", "reasoning", "thought", "description", "explanation", "element", "element_description",
                         "status", "amount", "distance", "button"))  # fmt: skip
"""Arguments of other agents that change nothing."""


class MalformedReply(Exception):
    """The reply is not exactly one well-formed call; the message is told to the agent."""


class Reply(NamedTuple):
    """What a reply says."""

    action: dict[str, Any]
    memory: dict[str, Any] | None
    """None: it has none that is a JSON object of at most MEMORY_CHARACTERS."""
    progress: dict[str, Any] | None


def format_call(action: dict[str, Any]) -> str:
    """Action -> reply text that `parse_reply` reads back."""
    call = json.dumps({"name": TOOL, "arguments": action}, ensure_ascii=False)
    return f"{OPEN}\n{_MARKUP.sub(r'\\u003c', call)}\n{CLOSE}"


def check_stop(texts: Iterable[str]) -> None:
    """Raises UserError for a text of `sampling.stop` that would end every reply before its call is whole."""
    for text in texts:
        if text in format_call({"action": "left_click", "coordinate": [0, 0]}):
            raise UserError(
                f"sampling.stop has {text!r}, which is a part of every tool call and would leave none whole: leave it out"
            )


def parse_reply(text: str, *, thinking: bool = False) -> Reply:
    """Reply text -> what it says.  thinking: it began with a thought.  Raises MalformedReply."""
    _, closed, text = text.rpartition(THOUGHT)
    if not closed and (thinking or text.lstrip().startswith("<think>")):
        raise MalformedReply(f"close your thinking with {THOUGHT}, then write the call")
    before, found, _ = text.partition(OPEN)
    calls = list(_tagged(text) if found else _untagged(text))
    if not calls:
        raise MalformedReply(f"write exactly one {OPEN}…{CLOSE}")
    if any(call != calls[0] for call in calls):
        raise MalformedReply(f"write exactly one {OPEN}…{CLOSE}: there are several, and they differ")
    sections = _sections(before)
    return Reply(calls[0], _remembered(sections.get("memory")), _remembered(sections.get("progress")))


# The call ---------------------------------------------------------------------------------------------------------------


def _tagged(text: str) -> Iterator[dict[str, Any]]:
    for part in text.split(OPEN)[1:]:
        body = _FENCE.sub(" ", part.partition(CLOSE)[0]).strip()
        try:
            values = [strict_json(body)]
        except ValueError:
            values = list(_values(body))
        for value in values:
            yield from _calls(value)


def _values(body: str) -> Iterator[Any]:
    """All that a body holds, one after another."""
    at = 0
    while at < len(body):
        try:
            value, at = read_json(body, at)
        except ValueError as error:
            raise MalformedReply(f"the tool call is not valid JSON: {error}") from None
        yield value
        at += len(body[at:]) - len(body[at:].lstrip(" \t\r\n}],;"))
    if not body:
        raise MalformedReply("the tool call is not valid JSON: it is empty")


def _untagged(text: str) -> Iterator[dict[str, Any]]:
    """Calls that a reply without tags holds, in fences or bare."""
    at = -1
    for _ in range(MAX_BRACES):
        at = text.find("{", at + 1)
        if at < 0:
            return
        try:
            value, end = read_json(text, at)
        except ValueError:
            continue
        if isinstance(value, dict) and ("action" in value or "arguments" in value):
            yield from _calls(value)
        at = end - 1


def _calls(value: Any) -> Iterator[dict[str, Any]]:
    """Actions of a call, or of a list of calls."""
    if isinstance(value, list) and value:
        for one in value:
            yield _action(one)
    else:
        yield _action(value)


def _action(call: Any) -> dict[str, Any]:
    expected = f'the tool call must be {{"name": "{TOOL}", "arguments": {{…}}}}'
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict):
        raise MalformedReply(expected)
    if "action" in call and "arguments" not in call:
        arguments, tool = {k: v for k, v in call.items() if k != "name"}, call.get("name", TOOL)
    elif set(call) - {"id", "type"} <= {"name", "arguments"} and "arguments" in call:
        arguments, tool = call["arguments"], call.get("name", TOOL)
    else:
        raise MalformedReply(expected)
    if isinstance(arguments, str):
        try:
            arguments, _ = read_json(arguments)
        except ValueError:
            raise MalformedReply("arguments must be an object") from None
    if not isinstance(arguments, dict):
        raise MalformedReply("arguments must be an object")
    if tool not in TOOLS:
        if not isinstance(tool, str) or "action" in arguments or _name(tool) not in ACTIONS:
            raise MalformedReply(expected)
        arguments = {"action": tool, **arguments}
    try:
        return check_action(arguments)
    except ValueError as error:
        refused = error
    action = _name(arguments.get("action"))
    try:
        return check_action(_usual(action, arguments))
    except ValueError as error:
        # What it meant is unknown if the usual form has no such action: say what was wrong with what it wrote.
        raise MalformedReply(str(refused if action not in ACTIONS else error)) from None


def _name(action: Any) -> str:
    if not isinstance(action, str):
        return ""
    plain = action.strip().lower().replace("-", "_").replace(" ", "_")
    return ACTION_NAMES.get(plain, plain)


def _usual(action: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `action` in our words.  Raises ValueError where they contradict each other."""
    written = {key: value for key, value in arguments.items() if key != "action" and value is not None}
    usual: dict[str, Any] = {"action": action}

    def put(key: str, value: Any) -> None:
        value = _COERCED[key](value) if key in _COERCED else value
        if key in usual and usual[key] != value:
            raise ValueError(f"{key} has two values that differ")
        usual[key] = value

    if "x" in written and "y" in written:
        put("coordinate", [written.pop("x"), written.pop("y")])
    if action == "drag" and str(arguments.get("action")).lower().endswith("click_drag") and "coordinate" in written:
        put("to", written.pop("coordinate"))  # Qwen's left_click_drag goes to `coordinate`
    if action == "scroll" and "pixels" in written:
        put("direction", _by_sign(written.pop("pixels")))
    if action == "answer" and not {"text", "answer", "content", "value", "message"} & set(written):
        put("text", str(written.get("status", "")))
    for key, value in written.items():
        name = ARGUMENT_NAMES.get(key.lower(), key.lower())
        if key.lower() not in SAID_BESIDE:
            put(name, value)
    return usual


def _number(value: Any) -> float:
    if isinstance(value, str):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e9:
        raise ValueError("not a number")
    return value


def _point(value: Any) -> list[int]:
    """[x, y]; of a box its centre."""
    wrong = ValueError(f"coordinate must be two whole numbers from 0 to {SCALE}")
    if isinstance(value, dict):
        value = [value.get("x"), value.get("y")]
    if isinstance(value, str):
        if len(value) > 100:
            raise wrong
        value = re.findall(r"-?\d+(?:\.\d+)?", value)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        [value] = value
    if isinstance(value, list) and len(value) == 2 and all(isinstance(corner, list) for corner in value):
        value = [*value[0], *value[1]]
    if not isinstance(value, list) or len(value) not in (2, 4):
        raise wrong
    try:
        numbers = [_number(part) for part in value]
    except ValueError:
        raise wrong from None
    if any(isinstance(n, float) and n % 1 for n in numbers) and all(0 <= n <= 1 for n in numbers):
        raise ValueError(f"coordinate must be two whole numbers from 0 to {SCALE}, not shares of 1")
    if len(numbers) == 4:
        left, top, right, bottom = numbers
        if left > right or top > bottom:
            raise ValueError("a box must be [left, top, right, bottom]; a point has two numbers")
        numbers = [(left + right) / 2, (top + bottom) / 2]
    return [round(n) for n in numbers]


def _to(value: Any) -> list[int]:
    try:
        return _point(value)
    except ValueError as error:
        raise ValueError(str(error).replace("coordinate", "to", 1)) from None


def _keys(value: Any) -> Any:
    """ "ctrl+a" -> ["ctrl", "a"]; "+" stays."""
    if isinstance(value, list) and len(value) == 1:
        [value] = value
    if not isinstance(value, str):
        return value
    keys = [key.strip() for key in value.split("+")] if value.strip("+ ") else [value.strip() or value]
    return [key or "+" for key in keys]


def _seconds(value: Any) -> Any:
    if isinstance(value, str) and (
        found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:s|sec|secs|seconds?)?\s*", value[:40])
    ):
        value = float(found[1])
    return value


def _by_sign(pixels: Any) -> str:
    try:
        amount = _number(pixels)
    except ValueError:
        amount = 0
    if not amount:
        raise ValueError("scroll needs direction")
    return "up" if amount > 0 else "down"


_COERCED = {
    "coordinate": _point,
    "to": _to,
    "keys": _keys,
    "time": _seconds,
    "text": lambda value: str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value,
    "direction": lambda value: value.strip().lower() if isinstance(value, str) else value,
    "press_enter": lambda value: {"true": True, "false": False}.get(str(value).lower(), value),
}


# What it remembers ------------------------------------------------------------------------------------------------------


def _sections(text: str) -> dict[str, str]:
    """Memory, Progress, Intention and Action -> what is written under them; of several the last."""
    marks = list(_SECTION.finditer(text))
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return {mark[1].lower(): text[mark.end() : end] for mark, end in zip(marks, ends, strict=False)}


def _remembered(text: str | None) -> dict[str, Any] | None:
    if text is None or (start := text.find("{")) < 0:
        return None
    try:
        value, _ = read_json(text, start)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    written = json.dumps(value, ensure_ascii=False)
    halved = any("\ud800" <= mark <= "\udfff" for mark in written)  # half of a surrogate pair
    return value if len(written) <= MEMORY_CHARACTERS and not halved else None
