"""Several processes at once, for what needs a process group."""

from __future__ import annotations

import pickle
import queue
import random
import socket
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

DEADLINE_S = 240.0


def free_ports(count: int) -> list[int]:
    """Different ports, below those that outgoing connections get, so that none is taken before it is used."""
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            taken = stack.enter_context(socket.socket())
            with suppress(OSError):
                taken.bind(("127.0.0.1", random.SystemRandom().randrange(15_000, 32_000)))
                ports.append(taken.getsockname()[1])
        return ports


def free_port() -> int:
    return free_ports(1)[0]


def _rank(function: Callable[..., Any], rank: int, ranks: int, args: tuple[Any, ...], results: Any) -> None:
    torch.set_num_threads(1)
    try:
        results.put((rank, pickle.dumps(function(rank, ranks, *args)), None))  # tensors by value: this process ends
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any, preload: str = "torch.distributed") -> list[Any]:
    """`function(rank, ranks, *args)` in so many processes; their results in order.  Fails after DEADLINE_S.

    preload: module that is imported once, before the processes are forked from the one that did.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(function, rank, ranks, args, results), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        for _ in range(ranks):
            try:
                rank, value, error = results.get(timeout=DEADLINE_S)
            except queue.Empty:
                raise AssertionError(f"ranks other than {sorted(found)} gave no result") from None
            assert error is None, error
            found[rank] = pickle.loads(value)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
    return [found[rank] for rank in range(ranks)]
