from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.browser import check_action, from_pixels, to_pixels

VIEW = (160, 210)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_pixels_follow_the_rule_and_stay_inside_the_view(x: int, y: int) -> None:
    """px = round(W·x/1000), clamped inside the view."""
    px, py = to_pixels([x, y], VIEW)
    assert px == min(round(160 * x / 1000), 159)
    assert py == min(round(210 * y / 1000), 209)


@given(st.integers(0, 159), st.integers(0, 209))
def test_every_pixel_can_be_named(x: int, y: int) -> None:
    """Views of up to 1,000 pixels: pixel -> 0–1000 -> the same pixel."""
    assert to_pixels(from_pixels((x, y), VIEW), VIEW) == (x, y)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "object"),
        ({}, "unknown action"),
        ({"action": "drop_tables"}, "unknown action"),
        ({"action": ["left_click"]}, "unknown action"),
        ({"action": "left_click"}, "needs coordinate"),
        ({"action": "left_click", "coordinate": [1, 2], "text": "x"}, "takes no 'text'"),
        ({"action": "left_click", "coordinate": [1, 1001]}, "coordinate"),
        ({"action": "left_click", "coordinate": [-1, 1]}, "coordinate"),
        ({"action": "left_click", "coordinate": [1.0, 2]}, "coordinate"),
        ({"action": "left_click", "coordinate": [True, 2]}, "coordinate"),
        ({"action": "left_click", "coordinate": "12"}, "coordinate"),
        ({"action": "left_click", "coordinate": [1, 2, 3]}, "coordinate"),
        ({"action": "type", "text": 5}, "text"),
        ({"action": "type", "text": "\ud800"}, "text"),
        ({"action": "type", "text": "x" * 10_001}, "text"),
        ({"action": "type", "text": "x", "press_enter": "yes"}, "press_enter"),
        ({"action": "key", "keys": []}, "keys"),
        ({"action": "key", "keys": ["launch"]}, "unknown key"),
        ({"action": "scroll", "direction": "in"}, "direction"),
        ({"action": "wait", "time": float("nan")}, "time"),
        ({"action": "wait", "time": 3600}, "time"),
        ({"action": "wait", "time": True}, "time"),
        ({"action": "navigate", "url": ""}, "url"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, reason: str) -> None:
    """Types and ranges are strict, and the agent is told what was wrong."""
    with pytest.raises(ValueError, match=reason):
        check_action(arguments)
