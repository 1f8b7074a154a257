"""The actions of the `computer_use` tool: what arguments they take, and what they do to a page.

Coordinates run from 0 to 1000 over the part of the page that the agent sees: px = round(W·x/1000), inside the view.
"""

from __future__ import annotations

import asyncio
from typing import Any

from megatron_webrl.browser.faults import PageError, TabClosed
from megatron_webrl.browser.page import Page

SCALE = 1000
MAX_TEXT = 10_000
MAX_KEYS = 5
MAX_WAIT_S = 10.0
ERROR_CHARACTERS = 300
KEYSTROKES = 200
"""A longer text is put in at once, as from a clipboard."""
DRAG_MOVES = 10
"""Mouse events on the way of a drag: pages that drag watch it move."""

ACTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "left_click": (("coordinate",), ()),
    "double_click": (("coordinate",), ()),
    "right_click": (("coordinate",), ()),
    "mouse_move": (("coordinate",), ()),
    "type": (("text",), ("coordinate", "press_enter")),
    "drag": (("to",), ("coordinate",)),
    "key": (("keys",), ()),
    "scroll": (("direction",), ("coordinate",)),
    "wait": (("time",), ()),
    "go_back": ((), ()),
    "navigate": (("url",), ()),
    "answer": (("text",), ()),
}
"""Action -> (required arguments, optional ones)."""

DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
SCROLL_SHARE = 0.6
"""Of the view, a scroll."""

KEYS = {
    "ctrl": "Control",
    "control": "Control",
    "alt": "Alt",
    "shift": "Shift",
    "meta": "Meta",
    "enter": "Enter",
    "return": "Enter",
    "tab": "Tab",
    "esc": "Escape",
    "escape": "Escape",
    "space": "Space",
    "backspace": "Backspace",
    "delete": "Delete",
    "home": "Home",
    "end": "End",
    "pageup": "PageUp",
    "pagedown": "PageDown",
    "up": "ArrowUp",
    "down": "ArrowDown",
    "left": "ArrowLeft",
    "right": "ArrowRight",
    "arrowup": "ArrowUp",
    "arrowdown": "ArrowDown",
    "arrowleft": "ArrowLeft",
    "arrowright": "ArrowRight",
    **{f"f{n}": f"F{n}" for n in range(1, 13)},
}
"""Names a policy may use, lower case -> Playwright's; single characters stand for themselves."""


def to_pixels(coordinate: list[int], view: tuple[int, int]) -> tuple[int, int]:
    """0–1000 -> pixels inside the view."""
    x, y = (min(max(round(size * c / SCALE), 0), size - 1) for c, size in zip(coordinate, view, strict=True))
    return x, y


def from_pixels(point: tuple[float, float], view: tuple[int, int]) -> list[int]:
    """Pixels -> 0–1000."""
    return [min(max(round(p / size * SCALE), 0), SCALE) for p, size in zip(point, view, strict=True)]


def check_action(arguments: Any) -> dict[str, Any]:
    """The arguments of a tool call, unchanged, if they are exactly one well-formed action.  Raises ValueError saying
    what is wrong."""
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    name = arguments.get("action")
    if not isinstance(name, str) or name not in ACTIONS:
        raise ValueError(f"unknown action {str(name)[:40]!r}: use one of {', '.join(ACTIONS)}")
    required, optional = ACTIONS[name]
    for key in required:
        if key not in arguments:
            raise ValueError(f"{name} needs {key}")
    for key, value in arguments.items():
        if key == "action":
            continue
        if key not in required and key not in optional:
            raise ValueError(f"{name} takes no {str(key)[:40]!r}")
        _CHECKS[key](value)
    return arguments


def _coordinate(value: Any) -> None:
    fits = isinstance(value, list) and len(value) == 2 and all(type(c) is int and 0 <= c <= SCALE for c in value)
    if not fits:
        raise ValueError(f"coordinate must be two whole numbers from 0 to {SCALE}")


def _to(value: Any) -> None:
    try:
        _coordinate(value)
    except ValueError as error:
        raise ValueError(str(error).replace("coordinate", "to", 1)) from None


def _text(value: Any) -> None:
    if not isinstance(value, str) or len(value) > MAX_TEXT or not _encodable(value):
        raise ValueError(f"text must be a string of at most {MAX_TEXT} characters")


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _url(value: Any) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not _encodable(value):
        raise ValueError("url must be a string")


def _press_enter(value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError("press_enter must be true or false")


def _keys(value: Any) -> None:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_KEYS or not all(isinstance(k, str) for k in value):
        raise ValueError(f"keys must be a list of 1 to {MAX_KEYS} strings")
    for key in value:
        if key.lower() not in KEYS and not (len(key) == 1 and key.isprintable() and _encodable(key)):
            raise ValueError(f"unknown key {key[:20]!r}")


def _direction(value: Any) -> None:
    if not isinstance(value, str) or value not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}")


def _time(value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value <= MAX_WAIT_S:  # NaN compares false
        raise ValueError(f"time must be a number of seconds from 0 to {MAX_WAIT_S:g}")


_CHECKS = {
    "coordinate": _coordinate,
    "to": _to,
    "text": _text,
    "url": _url,
    "press_enter": _press_enter,
    "keys": _keys,
    "direction": _direction,
    "time": _time,
}


async def perform(page: Page, action: dict[str, Any]) -> str:
    """Do one checked action.  Returns what the agent is told went wrong, empty if nothing.
    Raises BrowserFault, PageTimeout."""
    try:
        await _perform(page, action)
    except TabClosed:  # that was its doing
        return ""
    except PageError as error:
        return str(error)[:ERROR_CHARACTERS]
    return ""


async def _perform(page: Page, action: dict[str, Any]) -> None:
    mouse, keyboard = page.raw.mouse, page.raw.keyboard
    at = to_pixels(action.get("coordinate", [SCALE // 2, SCALE // 2]), page.view)
    match action["action"]:
        case "left_click":
            await page.call(mouse.click(*at))
        case "double_click":
            await page.call(mouse.dblclick(*at))
        case "right_click":
            await page.call(mouse.click(*at, button="right"))
        case "mouse_move":
            await page.call(mouse.move(*at))
        case "type":
            if "coordinate" in action:  # replaces what the field held
                await page.call(mouse.click(*at))
                await page.call(keyboard.press("Control+a"))
                if not action["text"]:
                    await page.call(keyboard.press("Delete"))
            await page.check_typing(action["text"])
            if action["text"]:
                long = len(action["text"]) > KEYSTROKES
                await page.call((keyboard.insert_text if long else keyboard.type)(action["text"]))
            if action.get("press_enter"):
                await page.call(keyboard.press("Enter"))
        case "drag":
            if "coordinate" in action:
                await page.call(mouse.move(*at))
            await page.call(mouse.down())
            try:
                await page.call(mouse.move(*to_pixels(action["to"], page.view), steps=DRAG_MOVES))
            finally:
                await page.call(mouse.up())
        case "key":
            if any(len(key) == 1 for key in action["keys"]):
                await page.check_typing("")
            await page.call(keyboard.press("+".join(KEYS.get(k.lower(), k) for k in action["keys"])))
        case "scroll":
            await page.call(mouse.move(*at))
            dx, dy = (
                round(d * SCROLL_SHARE * size)
                for d, size in zip(DIRECTIONS[action["direction"]], page.view, strict=True)
            )
            await page.call(mouse.wheel(dx, dy))
        case "wait":
            await asyncio.sleep(action["time"])
        case "go_back":
            await page.go_back()
        case "navigate":
            await page.goto(action["url"])
        case "answer":
            pass
