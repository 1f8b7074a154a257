"""One unmodified SGLang server: its command line, its port, its process, and its endpoints with every reply checked.

It listens on loopback only: its control endpoints would let whoever reaches them change the policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from megatron_webrl.config import RunConfig
from megatron_webrl.errors import UserError
from megatron_webrl.processes import reap, spawn

LOOPBACK = "127.0.0.1"
STANDIN = Path(__file__).parent / "standin"
INITIAL_VERSION = -1
"""Version tag of weights that the trainer did not publish."""

KEEP_ALIVE_S = 2.0
"""SGLang closes a connection that was idle for 5 s; one that we send on at that moment would look like its death."""
_JSON = {"Content-Type": "application/json"}


class SglangError(Exception):
    """SGLang refused, failed or was too late; the message says what it answered."""


class SglangGone(SglangError):
    """SGLang died, or is about to: the connection broke or it answered with an internal error."""


def check_port(port: int) -> None:
    """Raises UserError that names engine.port if loopback `port` is taken."""
    with contextlib.closing(_hold_port(port)):
        pass


def _hold_port(port: int | None) -> socket.socket:
    """A bound socket that never listens: nobody else is given the port meanwhile, while SGLang, which sets SO_REUSEADDR
    as we do, can bind and listen on it.  None: a free port."""
    if port is not None:
        # A plain bind finds what SO_REUSEADDR would overlook: another holder that does not listen yet.
        with contextlib.closing(socket.socket()) as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError as error:
                raise UserError(
                    f"engine.port={port} cannot be used ({error.strerror}): end what listens there, choose "
                    "another port, or leave it null for a free one"
                ) from None
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((LOOPBACK, port or 0))
    return holder


def command(config: RunConfig, device: str, port: int) -> list[str]:
    """SGLang's command line.  device: `cpu` or `cuda`.  `engine.args` comes last, so that it wins."""
    engine = config.engine
    options: dict[str, Any] = {
        "model-path": str(config.model.path),
        "device": device,
        "dtype": config.trainer.dtype,
        "tp": engine.tp,
        "host": LOOPBACK,
        "port": port,
        "max-running-requests": engine.max_running_requests,
        "max-total-tokens": engine.max_total_tokens,
        "weight-version": str(INITIAL_VERSION),
        "skip-tokenizer-init": True,  # token-in, token-out: no detokenizer work
        "disable-overlap-schedule": True,  # or version boundaries are one token off
        "incremental-streaming-output": True,  # a chunk has what is new, not all so far
        "skip-server-warmup": True,
        "sleep-on-idle": True,
        "log-level": "warning",
        "log-level-http": "warning",
    }
    if device == "cpu":
        options |= {"attention-backend": "torch_native", "sampling-backend": "pytorch"}
    options |= {name.replace("_", "-"): value for name, value in engine.args.items()}
    line = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in options.items():
        if value is None or value is False:
            continue
        line.append(f"--{name}")
        if value is not True:
            line += [str(v) for v in value] if isinstance(value, list) else [str(value)]
    return line


def environment(config: RunConfig, device: str) -> dict[str, str]:
    """Variables that SGLang needs beside ours."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_VLM_CACHE_SIZE_MB": "0",  # image embeddings are cached across weight updates otherwise
        "SPT_NOENV": "1",  # process titles must not overwrite the environment that holds our mark
        "PYTHONUNBUFFERED": "1",
    }
    if device == "cpu":
        threads = config.engine.threads or max(1, (os.cpu_count() or 1) // config.engine.tp)
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": str(threads)}
        if config.engine.tp > 1:
            variables["SGLANG_NCCL_SO_PATH"] = "/nonexistent"
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(config.engine.tp))
        if importlib.util.find_spec("sgl_kernel") is None:
            path = [str(STANDIN), *filter(None, [os.environ.get("PYTHONPATH")])]
            variables["PYTHONPATH"] = os.pathsep.join(path)
    return variables


async def resolve_device(config: RunConfig) -> str:
    """`cpu` or `cuda`.  torch is asked in a process of its own: the host itself does without it."""
    if config.device != "auto":
        return config.device
    code = "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(120):
            output, _ = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
    return output.decode().strip() or "cpu"


class SglangServer:
    """Starts, reaches and kills one SGLang.  The port is held from construction to `close`, over restarts.

    mark: what its processes are marked with (`processes.MARK`); log: file that gets its output.
    """

    def __init__(self, config: RunConfig, *, index: int, device: str, mark: str, log: Path) -> None:
        port = config.engine.port
        self._holder = _hold_port(None if port is None else port + index)
        self.port: int = self._holder.getsockname()[1]
        self.mark, self.log = mark, log
        self._command, self._environment = command(config, device, self.port), environment(config, device)
        self._process: subprocess.Popen[bytes] | None = None
        self._workers: list[psutil.Process] = []
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        """Start the process; `wait_ready` says when it serves."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._workers = []
        self._process = spawn(self._command, mark=self.mark, log=self.log, env=self._environment)

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns once SGLang has generated a token.  Raises SglangError with the end of its log."""
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise SglangError(f"SGLang ended with code {self._process.returncode} at its start: {self.log_tail()}")
            if await self.healthy(25.0):
                with contextlib.suppress(psutil.Error):
                    self._workers = [
                        p
                        for p in psutil.Process(self._process.pid).children(recursive=True)
                        if p.name().startswith("sglang::")
                    ]
                    return
            await asyncio.sleep(0.25)
        raise SglangError(f"SGLang did not serve within {timeout_s:.0f} s (engine.start_timeout_s): {self.log_tail()}")

    def alive(self) -> bool:
        """Whether its process and, once ready, each of its schedulers and detokenizers runs."""
        if self._process is None or self._process.poll() is not None:
            return False
        with contextlib.suppress(psutil.Error):
            return all(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in self._workers)
        return False

    def kill(self) -> None:
        """End all of its processes at once."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        reap(self.mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)

    async def close(self) -> None:
        """Kill it and give up the port."""
        await asyncio.to_thread(self.kill)
        if self._session is not None:
            await self._session.close()
        self._holder.close()

    async def generate(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """/generate with `stream`: its chunks, to the last.  Has no deadline.  Raises SglangGone if it went away, SglangError
        if it refused."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._posted("/generate", body, timeout) as reply:
            pending, done = b"", False
            async for data in reply.content.iter_any():  # to its end, so that the connection can be used again
                *events, pending = (pending + data).split(b"\n\n")
                for event in events:
                    if event == b"data: [DONE]":
                        done = True
                    else:
                        yield msgspec.json.decode(event.removeprefix(b"data: "), type=dict)
        if not done:
            raise SglangGone("/generate: the stream ended before the reply")

    async def healthy(self, timeout_s: float) -> bool:
        """Whether it generates: a token for us, or any for others."""
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._http().get("/health_generate", timeout=timeout) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def control(self, path: str, timeout_s: float, **body: Any) -> dict[str, Any]:
        """POST to a control endpoint, whose `success` must not be false.  Raises SglangError (also when too late)."""
        try:
            reply = await self._post(path, body, timeout_s)
        except TimeoutError:
            raise SglangError(f"{path} was not answered in {timeout_s:.0f} s") from None
        if reply.get("success") is False:
            raise SglangError(f"{path}: {reply.get('message')}")
        return reply

    def log_tail(self, lines: int = 5) -> str:
        """Last lines of its output, on one line."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
                text = file.read().decode(errors="replace")
        except OSError:
            return "it wrote no log"
        return f"{' | '.join(text.strip().splitlines()[-lines:])} (whole log: {self.log})"

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        async with self._posted(path, body, aiohttp.ClientTimeout(total=timeout_s)) as reply:
            data = await reply.read()
            return msgspec.json.decode(data, type=dict) if data.startswith(b"{") else {}

    @contextlib.asynccontextmanager
    async def _posted(
        self, path: str, body: Mapping[str, Any], timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer, whose status is 200.  Raises TimeoutError too."""
        try:
            async with self._http().post(path, data=msgspec.json.encode(body), headers=_JSON, timeout=timeout) as reply:
                if reply.status != 200:
                    kind = SglangGone if reply.status >= 500 else SglangError
                    said = (await reply.read())[:500].decode(errors="replace")
                    raise kind(f"{path} answered {reply.status}: {said}")
                yield reply
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise SglangGone(f"{path}: SGLang went away ({type(error).__name__}: {error})") from None

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(
                f"http://{LOOPBACK}:{self.port}", connector=connector, trust_env=False
            )
        return self._session
