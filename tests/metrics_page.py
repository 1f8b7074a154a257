"""The names in the tables of docs/metrics.md, and those of real rows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

VARIABLE = {
    r"(account/dropped|drops/reason)/.+": r"\1/REASON",
    r"(drops/difficulty)/\d+": r"\1/LEVEL",
    r"(drops/steps)/(0|\d+-(\d+|up))": r"\1/STEPS",
    r"(drops/age)/\d+-(\d+|up)": r"\1/SECONDS",
    r"(rollout/lag_share)/\d+": r"\1/N",
}
"""Names with a variable part, and what the page has for them."""

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def names_of(*sections: str) -> set[str]:
    """What the tables of those sections name."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    tables = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {name for section in sections for name in re.findall(r"^\| `([^`]+)` \|", tables[section], re.MULTILINE)}


def names_in(row: Iterable[str]) -> set[str]:
    """Names of a row as the page has them."""
    return {_on_page(name) for name in row} - {"step", "time", "nonfinite"}


def _on_page(name: str) -> str:
    for pattern, shown in VARIABLE.items():
        if found := re.fullmatch(pattern, name):
            return found.expand(shown)
    return name
