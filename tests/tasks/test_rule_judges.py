from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.tasks import Evidence, PageState, Ruling
from megatron_webrl.tasks.rules import Rule, judge_by_rules, normalised
from megatron_webrl.trajectory import Task

PAGE = PageState(
    "https://Shop.org/Cart/a%20b/?q=1",
    "Cart",
    "Your Cart\n  3 items:  Total € 1,000.00",
    {"#total": "€ 1,000", "#gone": None, "input": "x"},
)


def ruling(rule: dict[str, Any], answer: str = "") -> Ruling:
    evidence = Evidence(Task("t", "webgym", "t", 0, 5), "Do it.", answer, PAGE, [], [])
    return judge_by_rules([msgspec.convert(rule, Rule)], evidence).ruling


@pytest.mark.parametrize(
    ("rule", "answer", "holds"),
    [
        ({"type": "url", "equals": "https://shop.org/Cart/a b?q=1"}, "", True),
        ({"type": "url", "equals": "https://shop.org/cart/a b?q=1"}, "", False),
        ({"type": "url", "prefix": "https://shop.org/Cart"}, "", True),
        ({"type": "url", "prefix": "https://shop.org/cartoons"}, "", False),
        ({"type": "url", "matches": r"[?&]q=\d+$"}, "", True),
        ({"type": "text", "contains": "3 ITEMS: total"}, "", True),
        ({"type": "text", "contains": "4 items"}, "", False),
        ({"type": "element", "selector": "#total"}, "", True),
        ({"type": "element", "selector": "#gone"}, "", False),
        ({"type": "element", "selector": "#never asked"}, "", False),
        ({"type": "element", "selector": "input", "equals": "X"}, "", True),
        ({"type": "element", "selector": "#total", "contains": "000"}, "", True),
        ({"type": "element", "selector": "#total", "equals": "000"}, "", False),
        ({"type": "answer", "one_of": ["42"], "match": "exact"}, "42", True),
        ({"type": "answer", "one_of": ["42"], "match": "exact"}, "42.", False),
        ({"type": "answer", "one_of": ["The Eiffel Tower"]}, "eiffel tower.", True),
        ({"type": "answer", "one_of": ["1000"]}, "€ 1,000.00", True),
        ({"type": "answer", "one_of": ["50%"]}, "50 %", True),
        ({"type": "answer", "one_of": ["1000"]}, "1,0000", False),
        ({"type": "answer", "one_of": ["5"]}, "-5", False),
        ({"type": "answer", "one_of": ["3.5"]}, "35", False),
        ({"type": "answer", "one_of": ["café"]}, "CAFE\u0301", True),
        ({"type": "answer", "one_of": ["a", "b c"]}, "B, C!", True),
        ({"type": "answer", "one_of": ["42"], "match": "contains"}, "It is 42.", True),
        ({"type": "answer", "one_of": ["42"], "match": "contains"}, "It is 421", False),
        ({"type": "answer", "one_of": ["42"], "match": "contains"}, "It is 4.42", False),
    ],
)
def test_a_rule_holds_or_not(rule: dict[str, Any], answer: str, holds: bool) -> None:
    if rule.get("one_of") == ["a", "b c"]:
        rule["one_of"] = ["x", "b c"]
    assert ruling(rule, answer) is (Ruling.SUCCESS if holds else Ruling.FAILURE)


def test_all_rules_must_hold_and_the_broken_are_named() -> None:
    rules = [msgspec.convert({"type": "text", "contains": text}, Rule) for text in ("cart", "flowers", "trees")]
    evidence = Evidence(Task("t", "webgym", "t", 0, 5), "Do it.", "", PAGE, [], [])
    verdict = judge_by_rules(rules, evidence)
    assert verdict.ruling is Ruling.FAILURE
    assert "flowers" in verdict.reasons
    assert "trees" in verdict.reasons
    assert "cart" not in verdict.reasons


@pytest.mark.parametrize(
    "rule",
    [
        {"type": "url"},
        {"type": "url", "equals": "a", "prefix": "b"},
        {"type": "url", "matches": "("},
        {"type": "answer", "one_of": []},
        {"type": "answer", "one_of": ["..."]},
        {"type": "answer", "one_of": ["a"], "match": "nearly"},
        {"type": "text", "contains": "x", "exact": True},
        {"type": "colour"},
    ],
)
def test_malformed_rules_are_refused(rule: dict[str, Any]) -> None:
    with pytest.raises((msgspec.ValidationError, ValueError)):
        ruling(rule)


@given(st.text())
def test_normalising_twice_changes_nothing(answer: str) -> None:
    assert normalised(normalised(answer)) == normalised(answer)
