"""The reply of the policy: exactly one tool call in Qwen's format, after whatever it wrote before."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from megatron_webrl.browser import check_action
from megatron_webrl.errors import UserError

TOOL = "computer_use"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MARKUP = re.compile(r"<(?=/?tool_call>|\|)")


class MalformedReply(Exception):
    """The reply is not exactly one well-formed call; the message is told to the agent."""


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


def parse_reply(text: str) -> dict[str, Any]:
    """Reply text -> action.  Strict about types and ranges; raises MalformedReply."""
    if text.count(OPEN) != 1 or text.count(CLOSE) != 1:
        raise MalformedReply(f"write exactly one {OPEN}…{CLOSE}")
    _, _, rest = text.partition(OPEN)
    body, _, after = rest.partition(CLOSE)
    if after.strip():
        raise MalformedReply(f"write nothing after {CLOSE}")
    try:
        call = json.loads(body, parse_constant=_refuse, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise MalformedReply("the tool call is not valid JSON") from None
    if not isinstance(call, dict) or set(call) != {"name", "arguments"} or call["name"] != TOOL:
        raise MalformedReply(f'the tool call must be {{"name": "{TOOL}", "arguments": {{…}}}}')
    try:
        return check_action(call["arguments"])
    except ValueError as error:
        raise MalformedReply(str(error)) from None


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)
