"""What asynchrony brings: the same run with η and with η = 0 (strictly synchronous), trajectories per hour of both.

    python -m benchmarks.asynchrony [--model runs/demo/model] [--minutes 3] [--rounds 2] [--eta 2] [--json FILE] [key=value …]

Both arms train the same model on the same machine with the same settings, one after the other, in the order η, 0, 0, η so
that a drift of the machine's speed cancels (`--rounds 1`: η, 0 only).  Trajectories are train episodes that ended with
success or failure.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from benchmarks._table import report, row
from megatron_webrl import launch
from megatron_webrl.config import load_config
from megatron_webrl.errors import UserError

CONFIG = Path(__file__).parent.parent / "examples" / "demo.yaml"


def measure(eta: int, minutes: float, model: Path, overrides: list[str], directory: Path) -> dict[str, float]:
    """One arm: trajectories per hour, trained trajectories per hour and train steps."""
    settings = [f"replay.eta={eta}", f"model.path={model}", f"run_dir={directory}", f"trainer.max_minutes={minutes}"]
    config = load_config(CONFIG, ["evaluation.episodes=0", "observe.wandb=disabled", *overrides, *settings])
    with launch.Display(f"η={eta}") as display:
        result = launch.train(config, display)
    hours = result.minutes["rl"] / 60
    return {
        "trajectories_per_hour": result.status.trajectories / hours,
        "trained_per_hour": result.status.account.trained / hours,
        "train_steps": float(result.status.step),
        "mean_lag": result.status.lag_mean,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/demo/model"), help="warm model; `make demo` makes one")
    parser.add_argument("--minutes", type=float, default=3.0, help="of each arm")
    parser.add_argument("--rounds", type=int, default=2, help="pairs of arms; every other one in reverse order")
    parser.add_argument("--eta", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    if not arguments.model.exists():
        raise SystemExit(f"--model={arguments.model} does not exist: run `make demo` first, or give a warm model")
    directory = Path(tempfile.mkdtemp(prefix="mwebrl-bench-"))
    arms: dict[str, list[dict[str, float]]] = {f"eta_{arguments.eta}": [], "eta_0": []}
    try:
        pairs = [(arguments.eta, 0) if n % 2 == 0 else (0, arguments.eta) for n in range(arguments.rounds)]
        for n, eta in enumerate(eta for pair in pairs for eta in pair):
            measured = measure(eta, arguments.minutes, arguments.model, arguments.overrides, directory / str(n))
            arms[f"eta_{eta}"].append(measured)
    except UserError as error:
        raise SystemExit(str(error)) from None
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    rows = []
    for case, runs in arms.items():
        for metric in runs[0]:
            unit = "1/h" if metric.endswith("hour") else "versions" if metric == "mean_lag" else "steps"
            rows.append(row(case, metric, sum(run[metric] for run in runs) / len(runs), unit))
    value = {(r["case"], r["metric"]): r["value"] for r in rows}
    for metric in ("trajectories_per_hour", "trained_per_hour"):
        ratio = value[f"eta_{arguments.eta}", metric] / max(1e-9, value["eta_0", metric])
        rows.append(row("ratio", metric, ratio, f"η={arguments.eta} / η=0"))
    report(rows, arguments.json)


if __name__ == "__main__":
    main()
