"""What every benchmark ends with: a table on the screen, and the same rows as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def row(case: str, metric: str, value: float, unit: str) -> dict[str, Any]:
    """One figure, rounded to what is worth reading: three decimals, or four digits of what is small."""
    return {
        "case": case,
        "metric": metric,
        "value": round(value, 3) if abs(value) >= 1 else float(f"{value:.4g}"),
        "unit": unit,
    }


def report(rows: list[dict[str, Any]], file: Path | None) -> None:
    """Print the rows; write {"rows": rows} to `file` if one is given."""
    wide = max([4, *(len(r["case"]) for r in rows)])
    long = max([6, *(len(r["metric"]) for r in rows)])
    print(f"\n{'case':<{wide}} {'metric':<{long}} {'value':>16} unit")
    for r in rows:
        value = (
            f"{r['value']:,.0f}" if abs(r["value"]) >= 10_000 else f"{r['value']:,.{3 if abs(r['value']) >= 1 else 4}f}"
        )
        print(f"{r['case']:<{wide}} {r['metric']:<{long}} {value:>16} {r['unit']}")
    if file:
        file.write_text(json.dumps({"rows": rows}, indent=1, ensure_ascii=False) + "\n")
