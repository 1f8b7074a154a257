"""A private Ray on this machine, and role processes in it: started, watched, restarted within limits, ended for sure."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from megatron_webrl.errors import UserError
from megatron_webrl.processes import MARK, reap

log = logging.getLogger(__name__)

STOP_GRACE_S = 10.0
DYING_S = 2.0
"""A role that fails takes others along: so long after one is found dead, the others' reasons are waited for."""
_PREFIX = "mwebrl-"


class RoleDied(Exception):
    """A role that is not restarted (or not any more) ended; the message says which, why, and where its log is."""


class _Process:
    """Body of the Ray actor of one role.  Two threads: `run`, and `stop`."""

    def __init__(self, run_id: str, name: str, log_file: str, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        os.environ[MARK] = f"{run_id}/{name}"
        reap(f"{run_id}/{name}")  # what an earlier process of this role left behind
        Path(log_file).with_suffix(".pid").write_text(f"{os.getpid()}\n")
        out = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s", force=True)
        self.stopping = threading.Event()
        self.cancel: Callable[[], Any] | None = None

    def run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        try:
            if inspect.iscoroutinefunction(function):
                with contextlib.suppress(asyncio.CancelledError):
                    asyncio.run(_cancellable(self, function, arguments))
            else:
                function(**arguments)
        except BaseException:
            log.exception("%s failed", function.__name__)
            raise

    def stop(self) -> None:
        """Cancel an asyncio role, so that it closes what it opened."""
        self.stopping.set()
        if self.cancel is not None:
            with contextlib.suppress(RuntimeError):  # its loop has just ended
                self.cancel()


async def _cancellable(process: _Process, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Not a method: Ray would run an actor with async methods in an event loop of its own."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    process.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
    if not process.stopping.is_set():
        await function(**arguments)


class Role:
    """A role as the driver sees it."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        gpus: tuple[str, ...],
        restarts: int,
        errors_are_final: bool,
        may_end: bool,
    ) -> None:
        self.name = name
        self.may_end = may_end
        self.function = function
        self.arguments = arguments
        self.gpus = gpus
        self.restarts_left = restarts
        self.errors_are_final = errors_are_final
        self.actor: Any = None
        self.result: Any = None


class Cluster:
    """A local Ray that belongs to one run.  Use as a context manager: leaving it ends every process, whatever happened.

    run_id: mark of all processes; log_dir: ROLE.log and ROLE.pid of each.
    """

    def __init__(self, run_id: str, log_dir: Path) -> None:
        self.run_id = run_id
        self.log_dir = log_dir.resolve()
        self.log_dir.mkdir(parents=True, exist_ok=True)
        _remove_abandoned()
        # In /tmp whatever TMPDIR says: names of Unix sockets have 107 characters, and Ray needs 70 of them.
        self.directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir="/tmp"))
        self.roles: dict[str, Role] = {}

    def __enter__(self) -> Cluster:
        os.environ.update(
            {
                MARK: f"{self.run_id}/ray",
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_DISABLE_IMPORT_WARNING": "1",
                "RAY_worker_niceness": "0",  # Ray would give way to every other process of the machine (15)
                "RAY_memory_monitor_refresh_ms": "0",  # a role killed by Ray for memory would look like a fault
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
                "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            }
        )
        try:
            import ray

            ray.init(
                address="local",
                num_cpus=max(2, os.cpu_count() or 2),
                include_dashboard=False,
                object_store_memory=80 << 20,
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace=self.run_id,
                _temp_dir=str(self.directory / "ray"),
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        with _undisturbed():
            with contextlib.suppress(Exception):
                self._stop_roles()
            with contextlib.suppress(Exception):
                ray.shutdown()
            reap(self.run_id, grace_s=2.0)
            shutil.rmtree(self.directory, ignore_errors=True)

    def start(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        *,
        gpus: tuple[str, ...] = (),
        restarts: int = 0,
        errors_are_final: bool = False,
        may_end: bool = False,
    ) -> None:
        """Start a role.  gpus: all that it sees; restarts: how often it may be started again when its process dies;
        errors_are_final: only if it was killed, since an error that it raises would come again; may_end: by itself."""
        role = Role(name, function, arguments, gpus, restarts, errors_are_final, may_end)
        self.roles[name] = role
        self._launch(role)

    def _launch(self, role: Role) -> None:
        import ray

        environment = {"CUDA_VISIBLE_DEVICES": ",".join(role.gpus)}
        log_file = str(self.log_dir / f"{role.name}.log")
        process: Any = ray.remote(_Process)
        process = process.options(num_cpus=0, max_restarts=0, max_concurrency=2)
        role.actor = process.remote(self.run_id, role.name, log_file, environment)
        role.result = role.actor.run.remote(role.function, role.arguments)

    def check(self, *, may_end: tuple[str, ...] = ()) -> list[str]:
        """Look at every role once; restart what died and may be restarted.

        Returns the names of those that ended without error, which only `may_end` and roles started so may.  Raises RoleDied;
        UserError if that is what a role raised, whichever died first.
        """
        import ray

        finished = self._finished(0)
        if any(death is not None and death.final(role) for role, death in finished):
            finished = self._finished(DYING_S)
        for _, death in finished:
            if death is not None and isinstance(death.cause, UserError):
                raise UserError(str(death.cause))
        ended = []
        for role, death in finished:
            if death is None:
                role.result = None
                if not role.may_end and not role.name.startswith(may_end):
                    raise RoleDied(f"{role.name} ended too early (log: {self.log_dir / role.name}.log)")
                ended.append(role.name)
                continue
            if death.final(role):
                raise RoleDied(f"{role.name} died: {death.reason} (log: {self.log_dir / role.name}.log)")
            role.restarts_left -= 1
            log.warning("%s died (%s): started again, %d restarts left", role.name, death.reason, role.restarts_left)
            with contextlib.suppress(Exception):
                ray.kill(role.actor)
            reap(f"{self.run_id}/{role.name}")
            self._launch(role)
        return ended

    def _finished(self, wait_s: float) -> list[tuple[Role, _Death | None]]:
        """The roles that have ended, and why unless by themselves; waits for all the others up to `wait_s`."""
        import ray

        results = {role.result: role for role in self.roles.values() if role.result is not None}
        if not results:
            return []
        done, _ = ray.wait(list(results), num_returns=len(results), timeout=wait_s, fetch_local=False)
        finished: list[tuple[Role, _Death | None]] = []
        for reference in done:
            death = None
            try:
                ray.get(reference, timeout=10)
            except Exception as error:
                death = _death(error)
            finished.append((results[reference], death))
        return finished

    def join(self, prefix: str, timeout_s: float) -> bool:
        """Wait for all roles of that prefix to end by themselves; False if the time was not enough."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check(may_end=(prefix,))
            if all(role.result is None for name, role in self.roles.items() if name.startswith(prefix)):
                return True
            time.sleep(0.1)
        return False

    def stop(self, prefix: str) -> None:
        """End all roles of that prefix: cancelled, given a grace, then killed with all that they started."""
        import ray

        roles = [role for name, role in self.roles.items() if name.startswith(prefix)]
        with contextlib.suppress(Exception):
            ray.get([role.actor.stop.remote() for role in roles], timeout=STOP_GRACE_S)
        pending = [role.result for role in roles if role.result is not None]
        if pending:
            with contextlib.suppress(Exception):
                ray.wait(pending, num_returns=len(pending), timeout=STOP_GRACE_S)
        for role in roles:
            with contextlib.suppress(Exception):
                ray.kill(role.actor)
            reap(f"{self.run_id}/{role.name}")
            del self.roles[role.name]

    def _stop_roles(self) -> None:
        for prefix in ("worker", "engine", "trainer", "coordinator", "store", ""):
            if any(name.startswith(prefix) for name in self.roles):
                self.stop(prefix)


class _Death(NamedTuple):
    """Why a role ended."""

    reason: str
    """In one line."""
    killed: bool
    cause: Exception
    """What it raised, if it was not killed."""

    def final(self, role: Role) -> bool:
        """Whether the role is not started again."""
        return not role.restarts_left or (role.errors_are_final and not self.killed)


def _death(error: Exception) -> _Death:
    from ray.exceptions import RayActorError

    if isinstance(error, RayActorError):
        return _Death("its process was killed", True, error)
    cause = getattr(error, "cause", None) or error
    return _Death(" ".join(f"{type(cause).__name__}: {cause}".split())[:1000], False, cause)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """While all is being ended, nobody's impatience leaves something behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _remove_abandoned() -> None:
    """Directories of drivers that were killed."""
    for directory in Path("/tmp").glob(f"{_PREFIX}*-*"):
        pid = directory.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(directory, ignore_errors=True)


def free_port() -> int:
    """A TCP port of loopback that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
