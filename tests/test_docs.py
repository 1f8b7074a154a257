"""Documents that are generated from the code are fresh, and each list of requirements agrees with the others."""

import re
from pathlib import Path

import pytest

from megatron_webrl.config import reference as configuration
from megatron_webrl.wire import reference as wire

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("render", "file"),
    [(configuration.render, "configuration.md"), (wire.render, "wire.md")],
    ids=["configuration", "wire"],
)
def test_reference_is_fresh(render, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """`--check` passes on the file in docs/, and fails, naming the command, on a stale or missing one."""
    assert configuration.write_or_check(render, ROOT / "docs" / file, ["--check"]) == 0, f"{file}: generate it again"
    assert configuration.write_or_check(render, tmp_path / file, ["--check"]) == 1
    assert "is stale: run python -m megatron_webrl." in capsys.readouterr().err
    assert configuration.write_or_check(render, tmp_path / file, []) == 0
    assert configuration.write_or_check(render, tmp_path / file, ["--check"]) == 0
    assert configuration.write_or_check(render, tmp_path / file, ["--frobnicate"]) == 2


def test_every_message_is_in_the_wire_reference():
    """Every type of AnyMessage has its heading."""
    from megatron_webrl.wire.messages import AnyMessage

    headings = set(re.findall(r"^### (\w+)$", wire.render(), re.MULTILINE))
    assert {message.__name__ for message in AnyMessage.__args__} <= headings


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    found = (re.match(r"([A-Za-z0-9_.-]+)(?:\[.+\])?==([^\s;]+)", line) for line in lines)
    return {match[1].lower().replace("_", "-"): match[2] for match in found if match}


@pytest.mark.parametrize("name", ["main", "dev", "sglang-cpu", "gpu", "no-deps"])
def test_pins_agree(name: str):
    """A version pinned in one file of requirements/ is the one pinned in every other."""
    everywhere = {**pins("lock"), **pins("main"), **pins("no-deps")}
    assert {package: everywhere.get(package, version) for package, version in pins(name).items()} == pins(name)
