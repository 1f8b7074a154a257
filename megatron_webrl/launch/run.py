"""A run from the driver's side: place the roles, lead them through the phases, end them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_webrl.config import RunConfig, check_files, dump
from megatron_webrl.errors import UserError
from megatron_webrl.launch import evaluation, roles
from megatron_webrl.launch.cluster import Cluster, RoleDied, free_port
from megatron_webrl.launch.display import Display
from megatron_webrl.launch.placement import RolePlace, describe, describe_trainer, place, place_trainer, visible_gpus
from megatron_webrl.launch.resume import Resume, check_run_dir, earlier_start, write_start
from megatron_webrl.processor import Processor
from megatron_webrl.run_directory import check_writable, checkpoint_step, locked, newest_checkpoint, remove_partial
from megatron_webrl.wire import BlockingClient, Keys, RequestTimeout, WireError
from megatron_webrl.wire.messages import (
    BeginTraining,
    Done,
    EndRun,
    EvaluationProgress,
    EvaluationState,
    GetStatus,
    LoadFromDisk,
    StartEvaluation,
    Status,
)

if TYPE_CHECKING:
    from megatron_webrl.replay import RecordedBatch

POLL_S = 0.5
RPC_TIMEOUT_S = 5.0
COORDINATOR_AWAY_S = 120.0
"""So long the coordinator may be starting again."""
LOAD_GRACE_S = 30.0
"""That an engine's reply may take beyond the deadline that it was given."""
WORKER_RESTARTS = 20
SERVICE_RESTARTS = 20
"""Of the coordinator and of the screenshot store, when they were killed; an error of theirs ends the run."""
TRAINER_LEAVES_S = 30.0


class RunFailed(Exception):
    """The run could not go on; the message says why and what to do."""


@dataclass
class RunResult:
    """What a run leaves to its caller."""

    status: Status
    evaluations: dict[str, EvaluationState] = field(default_factory=dict)
    minutes: dict[str, float] = field(default_factory=dict)
    """Of the phases: start, rl, evaluation."""


def check(config: RunConfig, *, with_trainer: bool = True) -> list[RolePlace]:
    """Every check that needs no process: model directory, layout, Chromium, ports, tasks, GPUs.  Raises UserError."""
    check_model(config)
    return check_surroundings(config, with_trainer=with_trainer)


def check_model(config: RunConfig) -> None:
    """Model directory, layout, and `sampling.stop` against its tokenizer.  Raises UserError."""
    path = config.model.path
    if (path / ".metadata").exists() and not (path / "config.json").exists():
        raise UserError(
            f"model.path={path} is a checkpoint of a training: write it as a Hugging Face directory with `megatron-webrl convert "
            f"megatron-to-hf {path} DST`, and give that"
        )
    check_files(config)
    Processor.load(config.model.path, config.sampling.stop)


def check_surroundings(config: RunConfig, *, with_trainer: bool = True) -> list[RolePlace]:
    """The checks of `check` that need no model directory, and the placement.  Raises UserError."""
    from megatron_webrl.agent import check_endpoint, check_stop
    from megatron_webrl.browser import find_chromium
    from megatron_webrl.engine import check_port
    from megatron_webrl.tasks import check_environment

    check_writable("run_dir", Path(config.run_dir))
    check_environment(config)
    check_stop(config.sampling.stop)
    check_endpoint(config)
    if with_trainer and config.evaluation.endpoint is not None:
        raise UserError(
            f"evaluation.endpoint={config.evaluation.endpoint} is for `megatron-webrl eval`: training evaluates its own policy, "
            "so leave it out"
        )
    find_chromium(config.browser.executable)
    if config.engine.port is not None:
        for i in range(config.engine.hosts):
            check_port(config.engine.port + i)
    return place(config, Path("/tmp/mwebrl-RUN"), visible_gpus(config.device), with_trainer=with_trainer)


def dry_run(config: RunConfig, *, resume: Resume = None) -> str:
    """The resolved configuration and the placement, after all checks of `train`."""
    checkpoint = check_run_dir(config, resume)
    if config.train_only is not None:
        _, placed = check_recorded(config, checkpoint)
    else:
        placed = check(config, with_trainer=not config.rollout_only)
    lines = [dump(config), describe(placed, config)]
    if any(role.name.startswith("trainer") for role in placed):
        lines.append(describe_trainer(config))
    return "\n".join(lines)


def dry_run_evaluation(config: RunConfig) -> str:
    """The resolved configuration and the placement, after all checks of `eval`."""
    placed = check(config, with_trainer=False)
    return "\n".join([dump(config), describe(placed, config)])


class Run:
    """A started system.  Made by `started`."""

    def __init__(
        self,
        config: RunConfig,
        cluster: Cluster,
        placed: list[RolePlace],
        display: Display,
        checkpoint: Path | None,
        keys: Keys,
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.display = display
        self.checkpoint = checkpoint
        """That it went on from."""
        self.placed = {role.name: role for role in placed}
        self._beside: str | None = None
        """The evaluation that runs beside training."""
        self._evaluated = 0 if checkpoint is None else checkpoint_step(checkpoint)
        """Train step of the newest one that was due."""
        self._keys = keys.for_client()
        self._coordinator = BlockingClient(
            self.placed["coordinator"].address, cluster.run_id, "driver", keys=self._keys
        )

    def request(self, message: Any, expect: Any) -> Any:
        """Ask the coordinator, which is started again if it was killed.  Raises RoleDied if it, or another that was needed,
        died for good, WireError if it does not answer."""
        give_up = time.monotonic() + COORDINATOR_AWAY_S
        while True:
            try:
                return self._coordinator.request(message, timeout=RPC_TIMEOUT_S, expect=expect)
            except WireError as error:
                self.cluster.check()
                if not isinstance(error, RequestTimeout) or time.monotonic() > give_up:
                    raise

    def status(self) -> Status:
        return self.request(GetStatus(), Status)

    def wait_until_ready(self, *, load: Path | None = None) -> None:
        """An engine serves and a worker asked for work.  load: see `evaluate`.  Raises RunFailed after the engine's grace."""
        deadline = time.monotonic() + self.config.engine.start_timeout_s + 120
        while True:
            self.cluster.check()
            try:
                if load is not None:
                    self.load_engines(load)
                status = self.status()
                serving = self.config.evaluation.endpoint or any(e.state == "serving" for e in status.engines)
                if status.workers and serving:
                    return
                missing = "no browser worker" if not status.workers else "no engine serves"
            except RequestTimeout:
                missing = "the coordinator does not answer"
            if time.monotonic() > deadline:
                raise RunFailed(f"start-up took too long: {missing} (logs: {self.cluster.log_dir})")
            time.sleep(POLL_S)

    def evaluate(self, name: str, *, load: Path | None = None) -> EvaluationState:
        """Success on the held-out tasks with the weights that the engines have now.  load: where engines that wait for
        weights get them, when there is no trainer.  Raises RunFailed if no episode had a result."""
        self._start_evaluation(name)
        deadline = time.monotonic() + self.config.evaluation.timeout_s
        while time.monotonic() < deadline:
            self.cluster.check()
            if load is not None:
                self.load_engines(load)
            state: EvaluationState = self.request(EvaluationProgress(name), EvaluationState)
            self.display.evaluating(name, state)
            if state.over:
                if not state.all.results:
                    raise RunFailed(
                        f"evaluation {name}: no episode had a result, but {state.reasons} (logs: {self.cluster.log_dir})"
                    )
                evaluation.write(Path(self.config.run_dir), state)
                return state
            time.sleep(POLL_S)
        raise RunFailed(
            f"evaluation {name} did not end in evaluation.timeout_s={self.config.evaluation.timeout_s:.0f} s: give it more"
        )

    def _start_evaluation(self, name: str, *, beside: bool = False) -> None:
        from megatron_webrl.tasks import held_out_tasks

        how = self.config.evaluation
        tasks = held_out_tasks(self.config.tasks, how.episodes)
        self.request(StartEvaluation(name, tasks, how.temperature, how.top_p, how.top_k, how.seeds, beside), Done)

    def _evaluate_beside(self, step: int) -> None:
        """Begin the evaluation that is due after `step` steps, unless the last still runs; write the one that is over."""
        self._write_beside()
        every = self.config.evaluation.every
        if every is None or step >= self.config.trainer.steps or step // every <= self._evaluated // every:
            return
        self._evaluated = step
        if self._beside is not None:
            self.display.say(f"The evaluation of step {step} is left out: that of {self._beside} still runs")
            return
        self._beside = f"step-{step}"
        self._start_evaluation(self._beside, beside=True)

    def _write_beside(self) -> None:
        """Write the evaluation beside training, if it is over."""
        if self._beside is None:
            return
        state: EvaluationState = self.request(EvaluationProgress(self._beside), EvaluationState)
        if state.over:
            evaluation.write(Path(self.config.run_dir), state)
            self.display.say(f"Beside training, {self._beside}: {evaluation.report(state)[0]}")
            self._beside = None

    def _end_beside(self) -> None:
        """Training is over: so is what ran beside it, which what comes next ends."""
        self._write_beside()
        if self._beside is not None:
            self.display.say(f"The evaluation of {self._beside} is dropped: training is over")
            self._beside = None

    def load_engines(self, path: Path) -> None:
        """Give the weights of a Hugging Face directory to every engine that waits for weights."""
        for engine in self.status().engines:
            if engine.state != "waiting_weights":
                continue
            client = BlockingClient(engine.address, self.cluster.run_id, "driver", keys=self._keys)
            timeout = self.config.refresh.timeout_s
            try:
                client.request(
                    LoadFromDisk(str(path.resolve()), 0, timeout), timeout=timeout + LOAD_GRACE_S, expect=Done
                )
            except WireError as error:  # it starts again, and will wait for weights again
                self.display.say(f"{engine.name} did not load {path}: {error}")
            finally:
                client.close()

    def train(self, *, load: Path | None = None) -> Status:
        """The RL phase: until the trainer says that it finished, or (rollout_only) the last batch is recorded.  load: see
        `evaluate`."""
        self.request(BeginTraining(), Done)
        while True:
            self.cluster.check()
            if load is not None:
                self.load_engines(load)
            status = self.status()
            self.display.training(status, self.config.trainer.steps, self.config.trainer.max_minutes)
            if status.finished:
                self._end_beside()
                return status
            if not self.config.rollout_only:
                self._evaluate_beside(status.step)
            time.sleep(POLL_S)

    def end(self) -> Status:
        """Stop issuing; the trainer leaves by itself.  Returns the final state."""
        status: Status = self.request(EndRun(), Status)
        if not self.cluster.join("trainer", TRAINER_LEAVES_S):
            self.display.say(f"the trainer did not leave within {TRAINER_LEAVES_S:.0f} s: it is ended")
        return status

    def close(self) -> None:
        self._coordinator.close()


@contextmanager
def started(config: RunConfig, display: Display, *, kind: str = "train", resume: Resume = None) -> Iterator[Run]:
    """A running system of all roles; whatever happens inside, nothing is left running.

    kind: see `identify`; only `train` has a trainer.  resume: what to go on from; an evaluation takes any run_dir that holds
    no other kind of run.  Raises UserError for wrong input, before anything starts.
    """
    with_trainer = kind == "train"
    run_dir = Path(config.run_dir)
    if kind != "eval" and not run_dir.exists():
        check_run_dir(config, resume)  # refused before it is made
    check(config, with_trainer=with_trainer)
    with locked(run_dir):
        remove_partial(run_dir / "checkpoints")
        if kind == "eval":
            evaluation.begin(config, resume=resume is not None)
        checkpoint = None if kind == "eval" else check_run_dir(config, resume)
        yield from _started(
            config, run_dir, display, kind, checkpoint, with_trainer, kind == "eval" and resume is not None
        )


def _started(
    config: RunConfig,
    run_dir: Path,
    display: Display,
    kind: str,
    resume: Path | None,
    with_trainer: bool,
    keep_evaluations: bool,
) -> Iterator[Run]:
    identity = identify(run_dir, kind, again=resume is not None or keep_evaluations)
    for folder in ("logs", "trace", "checkpoints", "trajectories"):
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(dump(config))
    run_id = f"{identity['run_id']}.{identity['starts']}"
    with Cluster(run_id, run_dir / "logs") as cluster:
        placed = place(config, cluster.directory, visible_gpus(config.device), with_trainer=with_trainer)
        address = {role.name: role.address for role in placed}
        keys = Keys.make()
        common: dict[str, Any] = {"config": config, "run_id": run_id, "keys": keys.for_client()}
        serving = {**common, "keys": keys}
        service: dict[str, Any] = {"restarts": SERVICE_RESTARTS, "errors_are_final": True}
        where = {"coordinator_address": address["coordinator"], "store_address": address["store"]}
        cluster.start("store", roles.store, {**serving, "address": address["store"]}, **service)
        cluster.start(
            "coordinator",
            roles.coordinator,
            {
                **serving,
                "address": address["coordinator"],
                "store_address": address["store"],
                "wandb_id": identity["run_id"],
                "keep_evaluations": keep_evaluations,
            },
            **service,
        )
        port = free_port()
        for role in placed:
            kind, _, index = role.name.partition("-")
            if kind == "engine":
                arguments = {
                    **serving,
                    "name": role.name,
                    "index": int(index),
                    "address": role.address,
                    "coordinator_address": address["coordinator"],
                }
                restarts = config.engine.max_restarts  # it restarts its SGLang itself, as often
                cluster.start(
                    role.name,
                    roles.engine,
                    arguments,
                    gpus=role.gpus,
                    restarts=restarts,
                    errors_are_final=True,
                    may_end=True,  # it was drained
                )
            elif kind == "worker":
                arguments = {**common, **where, "name": role.name}
                cluster.start(role.name, roles.worker, arguments, restarts=WORKER_RESTARTS)
            elif kind == "trainer":
                arguments = {
                    **serving,
                    **where,
                    "rank": int(index),
                    "master_address": "127.0.0.1",
                    "master_port": port,
                    "resume": resume,
                }
                cluster.start(role.name, roles.trainer, arguments, gpus=role.gpus)
        run = Run(config, cluster, placed, display, resume, keys)
        try:
            yield run
        finally:
            run.close()


def train(config: RunConfig, display: Display, *, resume: Resume = None) -> RunResult:
    """`megatron-webrl train`: evaluation, RL, evaluation.  Raises UserError, RunFailed, RoleDied."""
    run_dir = Path(config.run_dir)
    minutes: dict[str, float] = {}
    evaluations: dict[str, EvaluationState] = {}
    evaluating = config.evaluation.episodes > 0
    try:
        with started(config, display, resume=resume) as run:
            with _timed(minutes, "start"):
                run.wait_until_ready()
            if evaluating and run.checkpoint is None:
                with _timed(minutes, "evaluation"):
                    evaluations["before"] = run.evaluate("before")
            with _timed(minutes, "rl"):
                run.train()
            if evaluating:
                with _timed(minutes, "evaluation"):
                    evaluations["after"] = run.evaluate("after")
            status = run.end()
    except RoleDied as error:
        hint = "" if newest_checkpoint(run_dir) is None else "; go on with --resume"
        raise RunFailed(f"{error}{hint}") from None
    return RunResult(status, evaluations, minutes)


def collect(config: RunConfig, display: Display, *, resume: Resume = None) -> Status:
    """`megatron-webrl train` with rollout_only: batches are recorded with the weights of model.path, nothing is trained.
    Raises UserError if it is to `resume`."""
    with started(config, display, kind="rollout_only", resume=resume) as run:
        run.wait_until_ready(load=config.model.path)
        run.train(load=config.model.path)
        return run.end()


def check_recorded(config: RunConfig, checkpoint: Path | None) -> tuple[list[RecordedBatch], list[RolePlace]]:
    """The batches to train on, and the placement.  Raises UserError."""
    from megatron_webrl.replay import choose_batches

    check_model(config)
    check_writable("run_dir", Path(config.run_dir))
    batches = choose_batches(config, after_step=checkpoint_step(checkpoint) if checkpoint else 0)
    return batches, place_trainer(config, visible_gpus(config.device))


def evaluate(config: RunConfig, display: Display, *, resume: bool = False) -> EvaluationState:
    """`megatron-webrl eval`: success of config.model.path, or of evaluation.endpoint, on held-out tasks, without a trainer.
    resume: go on with the one that run_dir holds."""
    if config.evaluation.episodes == 0:
        raise UserError("evaluation.episodes=0 leaves nothing to do: give a number of episodes")
    with started(config, display, kind="eval", resume="newest" if resume else None) as run:
        load = None if config.evaluation.endpoint else config.model.path
        run.wait_until_ready(load=load)
        state = run.evaluate("eval", load=load)
        run.end()
    return state


def identify(run_dir: Path, kind: str, *, again: bool) -> dict[str, Any]:
    """Name of the run, kept if it goes on (wandb continues under it), how often it was started, and what it is (`train`,
    `rollout_only` or `eval`).  Raises UserError if an evaluation would write over another kind of run."""
    identity: dict[str, Any] = {"run_id": uuid.uuid4().hex[:12], "starts": 0, "kind": kind}
    earlier = earlier_start(run_dir)
    if kind == "eval" and earlier.get("kind", kind) != kind:
        raise UserError(f"run_dir={run_dir} holds a {earlier['kind']} run: give the evaluation a run_dir of its own")
    if again:
        identity |= earlier
    identity["starts"] += 1
    write_start(run_dir, identity)
    return identity


@contextmanager
def _timed(minutes: dict[str, float], phase: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        minutes[phase] = minutes.get(phase, 0.0) + (time.monotonic() - began) / 60
