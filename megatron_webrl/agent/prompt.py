"""The prompt of a step, built afresh each time: system prompt, earlier steps, screenshots, task.

Text that comes from pages or from the policy can never become a token that means something: `<|`, `<tool_call>` and their
like are broken up in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
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
            "* `drag`: press the mouse button at `coordinate` (without it: where the pointer is), release it at `to`.\n"
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
                "to": _COORDINATE,
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
_TOOL = (
    "You are a web agent. Complete the task in the browser, one action a turn.\n\n"
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    f"{json.dumps(_SCHEMA)}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_PROGRESS = (
    "Progress: a JSON object with the parts of the task and how far each is, as "
    '{"find the price": "done", "compare": "to do"}.\n'
)
_ACTION = (
    "Intention: one sentence: what this step is to bring about.\n"
    "Action: one sentence: what you do.\n"
    "<tool_call>\n{the one call that does it}\n</tool_call>"
)
_MEMORY = (
    "Memory: a JSON object with what you need to remember: {rule} Screenshots of earlier steps are not shown again.\n"
)
_ADDITIVE = "keep every key that it has and add what is new; change or remove nothing."
_COMPRESSIVE = "write it anew at each step, and keep only what is still needed, as short as it can be."
_FORMAT = {
    "vanilla": _ACTION,
    "progress": _PROGRESS + _ACTION,
    "additive_memory": _MEMORY.format(rule=_ADDITIVE) + _PROGRESS + _ACTION,
    "compressive_memory": _MEMORY.format(rule=_COMPRESSIVE) + _PROGRESS + _ACTION,
}
"""What a reply is to look like, by agent.prompt."""
_RULES = (
    "\n\n# Reply\n\nReply with exactly these parts, in this order:\n{format}\n\n"
    "Make exactly one call a reply. When the task is done, or cannot be done, call `answer`."
)
SHORT = "Call computer_use."


class PastStep(NamedTuple):
    """What is remembered of an earlier step."""

    title: str
    action: dict[str, Any] | None
    """None if the reply was malformed."""
    changed: bool
    error: str
    notes: Sequence[str] = ()


class Told(NamedTuple):
    """What a prompt tells beside the screenshots."""

    utterance: str
    past: Sequence[PastStep] = ()
    """All earlier steps."""
    memory: dict[str, Any] | None = None
    progress: dict[str, Any] | None = None


def system_prompt(config: AgentConfig) -> str:
    """The text of the system turn."""
    return SHORT if config.prompt == "short" else _TOOL + _RULES.format(format=_FORMAT[config.prompt])


def keeps(config: AgentConfig) -> tuple[bool, bool]:
    """Whether replies hold Memory, and Progress, by agent.prompt."""
    return config.prompt in ("additive_memory", "compressive_memory"), config.prompt not in ("short", "vanilla")


def build_prompt(config: AgentConfig, told: Told, images: int, *, lines: int | None = None) -> str:
    """Prompt text of a step, ending where the reply begins.

    images: how many screenshots it shows, oldest first, the present one last (1 … len(told.past) + 1): one image_pad each.
    lines: how many earlier steps get a line, the newest; None: config.history_steps.
    """
    past = told.past
    lines = min(len(past), config.history_steps if lines is None else lines)
    history = [f"Step {n}: {_describe(step)}\n" for n, step in enumerate(past, 1) if n > len(past) - lines]
    if history and len(history) < len(past):
        history.insert(0, f"({len(past) - lines} before them are left out)\n")
    if history:
        history.insert(0, "Earlier steps:\n")
    earlier = [f"Before step {len(past) - back + 1}: {IMAGE}\n" for back in range(images - 1, 0, -1)]
    if config.prompt == "short":
        user = f"{''.join(history)}{''.join(earlier)}{IMAGE}{_plain(told.utterance)}"
    else:
        kept = [
            f"{name}: {_plain(json.dumps(value, ensure_ascii=False))}\n"
            for name, value in (("Memory", told.memory), ("Progress", told.progress))
            if value is not None
        ]
        user = (
            f"Task: {_plain(told.utterance)}\n\n{''.join(kept)}{''.join(history)}{''.join(earlier)}"
            f"Now, before step {len(past) + 1}: {IMAGE}"
        )
    return (
        f"<|im_start|>system\n{system_prompt(config)}<|im_end|>\n"
        f"<|im_start|>user\n{user}<|im_end|>\n"
        f"<|im_start|>assistant\n{'<think>' + chr(10) if config.thinking else ''}"
    )


def fit_prompt(
    config: AgentConfig,
    told: Told,
    images: int,
    size: Callable[[list[int], int], int],
    encode: Callable[[str], list[int]],
) -> tuple[list[int], int] | None:
    """The longest prompt within config.max_prompt_tokens: its token ids and how many screenshots it shows; None if even the
    shortest is too long.

    Left out are the oldest lines first, then the oldest screenshots.  images: how many there are.  size: of token ids that
    show so many of the newest screenshots, images expanded.
    """
    lines = min(len(told.past), config.history_steps)
    ways = [(n, images) for n in range(lines, -1, -1)] + [(0, n) for n in range(images - 1, 0, -1)]

    def attempt(way: int) -> tuple[list[int], int] | None:
        told_lines, shown = ways[way]
        ids = encode(build_prompt(config, told, shown, lines=told_lines))
        return (ids, shown) if size(ids, shown) <= config.max_prompt_tokens else None

    if found := attempt(0):
        return found
    low, high, best = 1, len(ways) - 1, None
    while low <= high:  # the first that fits; later ones are shorter
        middle = (low + high) // 2
        if found := attempt(middle):
            best, high = found, middle - 1
        else:
            low = middle + 1
    return best


def _describe(step: PastStep) -> str:
    if step.action is None:
        return f"malformed reply: {_plain(step.error)[:LINE_CHARACTERS]}"
    arguments = json.dumps({k: v for k, v in step.action.items() if k != "action"}, ensure_ascii=False)
    what = _plain(f"on {step.title!r}, {step.action['action']} {arguments}")[:LINE_CHARACTERS]
    notes = "".join(f"; {_plain(note)}" for note in step.notes)[:LINE_CHARACTERS]
    if step.error:
        return f"{what}: failed: {_plain(step.error)[:LINE_CHARACTERS]}{notes}"
    return f"{what}: the page {'changed' if step.changed else 'did not change'}{notes}"


def _plain(text: str) -> str:
    return _SPECIAL.sub("< ", text)
