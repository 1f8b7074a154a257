"""The names in the tables of docs/metrics.md, and those of real rows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def names_of(*sections: str) -> set[str]:
    """What the tables of those sections name."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    tables = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {name for section in sections for name in re.findall(r"^\| `([^`]+)` \|", tables[section], re.MULTILINE)}


def names_in(row: Iterable[str]) -> set[str]:
    """Names of a row as the page has them."""
    names = {re.sub(r"^(account/dropped/).+", r"\1REASON", name) for name in row}
    return names - {"step", "time", "nonfinite"}
