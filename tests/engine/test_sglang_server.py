"""SGLang's command line, environment and port, without starting it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
from pathlib import Path

import pytest

from megatron_webrl.config import RunConfig
from megatron_webrl.engine import check_port, sglang_server
from megatron_webrl.engine.sglang_server import STANDIN, SglangServer, command, environment
from megatron_webrl.errors import UserError


def config(**engine: object) -> RunConfig:
    data = {"model": {"path": "m"}, "tasks": {"names": ["click-test"]}, "engine": {"tp": 2, **engine}}
    return RunConfig.model_validate(data)


def options(line: list[str]) -> dict[str, list[str]]:
    """--name -> its values."""
    found: dict[str, list[str]] = {}
    for word in line[3:]:
        if word.startswith("--"):
            name = word
            found[name] = []
        else:
            found[name].append(word)
    return found


def test_command_line_of_a_cpu():
    """Loopback only, exact version boundaries, weights tagged as not the trainer's, the trainer's dtype."""
    line = options(command(config(max_total_tokens=512), "cpu", 4000))
    assert line["--host"] == ["127.0.0.1"]
    assert line["--port"] == ["4000"]
    assert line["--tp"] == ["2"]
    assert line["--dtype"] == ["bfloat16"]
    assert line["--weight-version"] == ["-1"]
    assert line["--max-total-tokens"] == ["512"]
    assert line["--disable-overlap-schedule"] == []
    assert line["--incremental-streaming-output"] == []
    assert line["--attention-backend"] == ["torch_native"]


def test_command_line_of_a_gpu_leaves_kernels_to_sglang():
    line = options(command(config(), "cuda", 4000))
    assert line["--device"] == ["cuda"]
    assert not {"--attention-backend", "--sampling-backend", "--max-total-tokens"} & set(line)


def test_engine_args_pass_through_and_win():
    """true is a flag, false and null take an option away, lists are several values, underscores are dashes."""
    args = {
        "attention_backend": "fa3",
        "enable-metrics": True,
        "sleep-on-idle": False,
        "cuda-graph-bs": [1, 2],
        "max_running_requests": 4,
    }
    line = options(command(config(args=args), "cpu", 4000))
    assert line["--attention-backend"] == ["fa3"]
    assert line["--enable-metrics"] == []
    assert "--sleep-on-idle" not in line
    assert line["--cuda-graph-bs"] == ["1", "2"]
    assert line["--max-running-requests"] == ["4"]


def test_environment(monkeypatch):
    """Image embeddings are never cached; the stand-in is on the path of a CPU child without sgl_kernel only."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    cpu, gpu = environment(config(threads=3), "cpu"), environment(config(), "cuda")
    assert cpu["SGLANG_VLM_CACHE_SIZE_MB"] == gpu["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    assert cpu["OMP_NUM_THREADS"] == "3"
    assert "PYTHONPATH" not in gpu
    assert "SGLANG_USE_CPU_ENGINE" not in gpu
    if importlib.util.find_spec("sgl_kernel") is None:
        assert cpu["PYTHONPATH"] == f"{STANDIN}{os.pathsep}/elsewhere"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "PYTHONPATH" not in environment(config(), "cpu")


def test_taken_port_is_named():
    """A port that another process listens on, or that another host of ours holds, is refused before any start."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"engine.port={port} .*null"):
            check_port(port)
    check_port(port)


async def test_port_is_held_until_used(tmp_path: Path):
    """Between choice and use nobody else gets the port, while SGLang, which sets SO_REUSEADDR, can listen on it."""
    server = SglangServer(config(), index=0, device="cpu", mark="m", log=tmp_path / "log")
    with pytest.raises(UserError):
        check_port(server.port)
    with contextlib.closing(socket.create_server(("127.0.0.1", server.port))):  # sets SO_REUSEADDR, listens
        pass
    await server.close()
    check_port(server.port)


async def test_ports_count_up(tmp_path: Path):
    """engine.port is the first host's port."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
    server = SglangServer(config(port=port - 1), index=1, device="cpu", mark="m", log=tmp_path / "log")
    assert server.port == port
    await server.close()


async def test_a_connection_that_sglang_is_about_to_close_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One that was idle for long is made anew: what is sent as it is closed would look like the death of SGLang."""
    monkeypatch.setattr(sglang_server, "KEEP_ALIVE_S", 0.3)
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    server = SglangServer(config(), index=0, device="cpu", mark="m", log=tmp_path / "log")
    fake = await asyncio.start_server(answer, "127.0.0.1", server.port, reuse_address=True)
    try:
        for _ in range(2):
            await server.control("/flush_cache", 5.0)
        assert connections == 1
        await asyncio.sleep(0.5)
        await server.control("/flush_cache", 5.0)
        assert connections == 2
    finally:
        await server.close()
        fake.close()
