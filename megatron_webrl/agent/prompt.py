"""The prompt of a step, built afresh each time: system prompt, earlier steps, screenshots, task.

Text that comes from pages or from the policy can never become a token that means something: `<|`, `<tool_call>` and their
like are broken up in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_webrl.agent.reply import TOOL
from megatron_webrl.browser import ACTIONS, DIRECTIONS, MAX_WAIT_S
from megatron_webrl.config import AgentConfig

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_SPECIAL = re.compile(r"<(?=\||/?(?:tool_call|tool_response|think)>)")
"""Where a token of Qwen's tokenizer that means something could begin: `<|…|>`, and the marks of calls and thinking."""
LINE_CHARACTERS = 160
"""Of an earlier step's action or error, at most."""

_COORDINATE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "x and y from the top left corner of the screenshot, each from 0 to 1000.",
}
_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": (
            "Use a mouse and keyboard to interact with a web page.\n"
            "* `left_click`, `double_click`, `right_click`, `mouse_move`: at `coordinate`.\n"
            "* `type`: type `text`; with `coordinate`, that field is clicked and cleared first; with `press_enter`, "
            "Enter follows.\n"
            "* `key`: press `keys` together.\n"
            "* `scroll`: scroll in `direction`, over `coordinate` if given.\n"
            "* `wait`: wait `time` seconds.\n"
            "* `go_back`: return to the page before.\n"
            "* `navigate`: go to `url`.\n"
            "* `answer`: end the task with `text` as its answer."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "action": {"type": "string", "enum": list(ACTIONS)},
                "coordinate": _COORDINATE,
                "text": {"type": "string"},
                "press_enter": {"type": "boolean"},
                "keys": {"type": "array", "items": {"type": "string"}},
                "direction": {"type": "string", "enum": list(DIRECTIONS)},
                "time": {"type": "number", "description": f"Seconds, at most {MAX_WAIT_S:g}."},
                "url": {"type": "string"},
            },
            "required": ["action"],
        },
    },
}
_FULL = (
    "You are a web agent. Complete the task in the browser, one action a turn.\n\n"
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    f"{json.dumps(_SCHEMA)}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_SYSTEM = {"vanilla": _FULL, "short": "Call computer_use."}


class PastStep(NamedTuple):
    """What is remembered of an earlier step."""

    title: str
    action: dict[str, Any] | None
    """None if the reply was malformed."""
    changed: bool
    error: str


def system_prompt(config: AgentConfig) -> str:
    """The text of the system turn."""
    return _SYSTEM[config.prompt]


def build_prompt(config: AgentConfig, utterance: str, past: Sequence[PastStep], images: int) -> str:
    """Prompt text of a step, ending where the reply begins.

    past: all earlier steps; the newest `history_steps` get a line each.
    images: how many screenshots it shows, oldest first, the present one last (1 … len(past) + 1): one image_pad each.
    """
    lines = [
        f"Step {number}: {_describe(step)}\n"
        for number, step in enumerate(past, 1)
        if number > len(past) - config.history_steps
    ]
    history = f"Earlier steps:\n{''.join(lines)}" if lines else ""
    earlier = "".join(f"Before step {len(past) - back + 1}: {IMAGE}\n" for back in range(images - 1, 0, -1))
    return (
        f"<|im_start|>system\n{system_prompt(config)}<|im_end|>\n"
        f"<|im_start|>user\n{history}{earlier}{IMAGE}{_plain(utterance)}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def _describe(step: PastStep) -> str:
    if step.action is None:
        return f"malformed reply: {_plain(step.error)[:LINE_CHARACTERS]}"
    arguments = json.dumps({k: v for k, v in step.action.items() if k != "action"}, ensure_ascii=False)
    what = _plain(f"on {step.title!r}, {step.action['action']} {arguments}")[:LINE_CHARACTERS]
    if step.error:
        return f"{what}: failed: {_plain(step.error)[:LINE_CHARACTERS]}"
    return f"{what}: the page {'changed' if step.changed else 'did not change'}"


def _plain(text: str) -> str:
    return _SPECIAL.sub("< ", text)
