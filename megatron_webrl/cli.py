"""`megatron-webrl`: the words on the command line.

Exit codes: 0 done, 1 the run failed, 2 wrong input (one line says key, value and remedy), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_webrl import __version__
from megatron_webrl.config import RunConfig, load_config
from megatron_webrl.errors import UserError

NEWEST = "newest"
DEMO_CONFIG = Path(__file__).parent.parent / "examples" / "demo.yaml"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; ends the process with the exit code."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    odd = rest if not hasattr(arguments, "overrides") else [word for word in rest if word.startswith("-")]
    if odd:
        hint = " (keys of the configuration are written without dashes)" if any("=" in word for word in odd) else ""
        parser.error(f"unrecognized arguments: {' '.join(odd)}{hint}")
    resume = getattr(arguments, "resume", None)
    if isinstance(resume, str) and re.match(r"[A-Za-z_][\w.]*=", resume):  # key=value after a bare --resume
        arguments.overrides.append(resume)
        arguments.resume = NEWEST
    if rest:  # key=value after an option
        arguments.overrides += rest
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupt)
    try:
        code = arguments.run(arguments)
    except UserError as error:
        print(f"megatron-webrl: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print(
            "megatron-webrl: interrupted; everything was ended, go on with --resume if a checkpoint was saved",
            file=sys.stderr,
        )
        code = 130
    except _run_errors() as error:
        print(f"megatron-webrl: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run_errors() -> tuple[type[BaseException], ...]:
    """Errors of a run; imported late, for `--help` and wrong input must be quick."""
    from megatron_webrl.launch import RoleDied, RunFailed
    from megatron_webrl.wire import WireError

    return (RunFailed, RoleDied, WireError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-webrl",
        allow_abbrev=False,
        description="Asynchronous reinforcement learning for visual web agents, on Megatron.",
        epilog="Configurations are YAML; any key can be overridden as section.key=value. Reference: docs/configuration.md",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Any], int], text: str, *, config: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        if config:
            sub.add_argument("config", type=Path, metavar="CONFIG", help="YAML file, for example examples/demo.yaml")
        return sub

    def overrides(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("overrides", nargs="*", metavar="key=value", help="for example replay.eta=1")

    train = command("train", _train, "Evaluate, train with asynchronous GRPO, evaluate again.")
    overrides(train)
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything; print the configuration, the placement and what a trainer rank needs",
    )
    train.add_argument(
        "--resume",
        nargs="?",
        const=NEWEST,
        metavar="auto|DIR",
        help="go on from the newest checkpoint of run_dir; auto: begin at the beginning while there is none (for jobs that are "
        "started again by themselves); DIR: from that checkpoint, once later ones are moved away",
    )

    sft = command("sft", _sft, "Train on demonstrations (supervised) and write a Hugging Face directory.")
    overrides(sft)
    sft.add_argument(
        "--demonstrations", type=Path, required=True, metavar="DIR", help="folder with demonstrations.msgpack"
    )
    sft.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")

    evaluate = command(
        "eval", _eval, "Measure success of model.path, or of evaluation.endpoint, on the held-out tasks."
    )
    overrides(evaluate)
    evaluate.add_argument(
        "--resume",
        action="store_true",
        help="go on with the evaluation in run_dir: episodes with a result are kept, those that faults ended are run again",
    )
    evaluate.add_argument("--dry-run", action="store_true", help="check everything; print configuration and placement")
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")

    demo = command(
        "demo",
        _demo,
        "From nothing to a policy that learned: demonstrations, warm start, evaluation, GRPO, evaluation, pictures.",
        config=False,
    )
    overrides(demo)
    demo.add_argument("--config", type=Path, default=DEMO_CONFIG, help="default: examples/demo.yaml")
    demo.add_argument("--setup-seconds", type=float, default=0.0, help="what the set-up took, for summary.json")

    ledger = command(
        "ledger", _ledger, "Print the account of a run: issued = trained + dropped + in flight.", config=False
    )
    ledger.add_argument("run_dir", type=Path, metavar="RUN", help="run directory, for example runs/demo")

    convert = command("convert", _convert, "Weights between Hugging Face and Megatron, or compare two.", config=False)
    _add_conversions(convert)
    return parser


def _add_conversions(convert: argparse.ArgumentParser) -> None:
    ways = convert.add_subparsers(dest="way", required=True, metavar="WAY")

    meanings = {
        "SRC": "what to convert: a Hugging Face directory, or a checkpoint such as RUN/checkpoints/step-000020",
        "DST": "folder to write; must not exist",
        "A": "a Hugging Face directory or a checkpoint",
        "B": "another",
    }

    def way(name: str, text: str, **paths: str) -> argparse.ArgumentParser:
        sub = ways.add_parser(name, help=text, description=text, allow_abbrev=False)
        for path, shown in paths.items():
            sub.add_argument(path, type=Path, metavar=shown, help=meanings[shown])
        return sub

    layout = way("hf-to-megatron", "Write the distributed checkpoint DST.", source="SRC", target="DST")
    layout.add_argument("--tp", type=int, default=1, help="tensor-parallel size of the files; default: 1")
    layout.add_argument("--pp", type=int, default=1, help="pipeline-parallel size of the files; default: 1")
    layout.add_argument(
        "--first-stage-layers", type=int, help="decoder layers of the first stage, if not an even share"
    )
    back = way("megatron-to-hf", "Write the Hugging Face directory DST.", source="SRC", target="DST")
    back.add_argument("--max-shard-size", default="4GB", help="of a safetensors file; default: 4GB")
    back.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of all weights; default: as they were, or are stored",
    )
    both = way("verify", "Compare two of either kind: exit code 0 equal, 1 different.", first="A", second="B")
    for sub in (back, both):
        sub.add_argument(
            "--model", type=Path, metavar="HF_DIR", help="the run's model.path, for a checkpoint without a folder hf/"
        )


def _train(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    from megatron_webrl import launch

    resume: launch.Resume = arguments.resume if arguments.resume in (None, NEWEST, "auto") else Path(arguments.resume)
    if arguments.dry_run:
        print(launch.dry_run(config, resume=resume))
        return 0
    with launch.Display(config.name) as display:
        if config.train_only is not None:
            steps = launch.train_recorded(config, display, resume=resume)
            display.say(f"Trained up to step {steps}: {config.run_dir} has metrics.jsonl, checkpoints/, model_final/")
            return 0
        if config.rollout_only:
            status = launch.collect(config, display, resume=resume)
            display.say(_account(status.account))
            display.say(f"Recorded {status.step} batches in {config.run_dir}/batches; train on them with train_only")
            return 0
        result = launch.train(config, display, resume=resume)
        for name, state in result.evaluations.items():
            display.say("\n".join([f"Evaluation {name}:", *launch.report(state)]))
        display.say(_account(result.status.account))
        display.say(f"Results in {config.run_dir}: metrics.jsonl, checkpoints/, model_final/, trajectories/")
    return 0


def _sft(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    from megatron_webrl import launch

    with launch.Display(config.name) as display:
        launch.sft(config, display, arguments.demonstrations, arguments.output)
        display.say(f"Written: {arguments.output}")
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    from megatron_webrl import launch

    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise UserError(
            f"--json {arguments.json}: {arguments.json.parent} is no directory: make it, or give another file"
        )
    if arguments.json is not None and arguments.json.is_dir():
        raise UserError(f"--json {arguments.json} is a directory: give a file")
    if arguments.dry_run:
        print(launch.dry_run_evaluation(config))
        return 0
    with launch.Display(config.name) as display:
        state = launch.evaluate(config, display, resume=arguments.resume)
        measured = f"{config.evaluation.endpoint_model} at {config.evaluation.endpoint}"
        display.say(f"Evaluation of {measured if config.evaluation.endpoint else config.model.path}:")
        display.say("\n".join(launch.report(state)))
        display.say(f"All figures: {config.run_dir}/evaluation_{state.name}.json")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(launch.summary(state), indent=1) + "\n")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    config: RunConfig = load_config(arguments.config, arguments.overrides)
    from megatron_webrl.demo import run_demo
    from megatron_webrl.launch import Display

    with Display(config.name) as display:
        run_demo(config, display, setup_seconds=arguments.setup_seconds)
    return 0


def _ledger(arguments: argparse.Namespace) -> int:
    from megatron_webrl.replay import read_account
    from megatron_webrl.trajectory import Lane

    file = arguments.run_dir / "ledger.sqlite"
    if not file.exists():
        raise UserError(f"RUN={arguments.run_dir} holds no ledger.sqlite: give the run_dir of a run")
    print(_account(read_account(file, Lane.TRAIN)))
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from megatron_webrl.launch import Display
    from megatron_webrl.trainer import conversion, weight_files

    options = {name: value for name, value in vars(arguments).items() if name not in ("run", "way")}
    ways: dict[str, Callable[..., weight_files.Comparison]] = {
        "hf-to-megatron": conversion.hf_to_megatron,
        "megatron-to-hf": conversion.megatron_to_hf,
        "verify": weight_files.verify,
    }
    with Display("convert") as display:
        try:
            found = ways[arguments.way](**options, progress=display.progress)
        except KeyboardInterrupt:
            print("megatron-webrl: interrupted; nothing was kept", file=sys.stderr)
            return 130
        for line in found.differing[:10]:
            display.say(line)
        verdict = f"Different: {len(found.differing)}" if found.differing else "Equal"
        display.say(f"{verdict}: {found.tensors} tensors, {found.parameters:,} parameters, SHA-256 {found.digest}")
    return 1 if found.differing else 0


def _account(account: Any) -> str:
    dropped = ", ".join(f"{reason} {n}" for reason, n in sorted(account.dropped.items())) or "none"
    return f"Account: issued {account.issued} = trained {account.trained} + dropped ({dropped}) + in flight {account.in_flight}"
