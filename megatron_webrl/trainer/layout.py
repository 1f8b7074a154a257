"""Where a trainer rank sits: process groups of torch and Megatron, each with a deadline."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_webrl.config import RunConfig
from megatron_webrl.errors import UserError


class Layout:
    """One rank's place among TP × PP × DP ranks, and the exchanges of host data between them.

    Host data travels over gloo, whatever moves the gradients.  Every wait ends after `trainer.collective_timeout_s`.
    """

    def __init__(self, config: RunConfig, *, rank: int, world_size: int, master_address: str, master_port: int) -> None:
        parallel = config.trainer.parallel
        if world_size != parallel.world_size:
            raise UserError(
                f"trainer.parallel asks for tp × pp × dp = {parallel.world_size} ranks, but {world_size} were started"
            )
        self.device = _device(config, rank)
        self.timeout = timedelta(seconds=config.trainer.collective_timeout_s)
        torch.set_num_threads(config.trainer.threads or max(1, (os.cpu_count() or 1) // world_size))
        if master_address in ("127.0.0.1", "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            init_method=f"tcp://{master_address}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=self.timeout,
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            virtual_pipeline_model_parallel_size=parallel.vp if parallel.vp > 1 else None,
            distributed_timeout_minutes=math.ceil(config.trainer.collective_timeout_s / 60),
        )
        model_parallel_cuda_manual_seed(config.seed)
        self.parallel = parallel
        self.rank, self.world_size = rank, world_size
        self.tp, self.tp_rank = parallel.tp, parallel_state.get_tensor_model_parallel_rank()
        self.pp, self.pp_rank = parallel.pp, parallel_state.get_pipeline_model_parallel_rank()
        self.dp, self.dp_rank = parallel.dp, parallel_state.get_data_parallel_rank()
        self.first_stage = self.pp_rank == 0
        self.last_stage = self.pp_rank == self.pp - 1
        self.leads = self.first_stage and self.tp_rank == 0
        """Whether this rank fetches what its data-parallel shard trains on."""
        self.exports = self.tp_rank == 0 and self.dp_rank == 0
        """Whether this rank alone hands out its pipeline stage's weights."""
        self.reports = self.last_stage and self.tp_rank == 0
        """Whether this rank alone, of its model-parallel group, accounts for its tokens."""
        self._world = self._host_group(list(range(world_size)))
        self._shard = self._host_groups_of(parallel_state.get_model_parallel_group())
        self.leads_here = self._leads_here()
        """Leads on this machine, which share its cores."""

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """Tensor-parallel ranks, in order of the slices they hold."""
        return parallel_state.get_tensor_model_parallel_group()

    def _leads_here(self) -> int:
        return sum(
            leads for host, leads in self.gather((socket.gethostname(), self.leads)) if host == socket.gethostname()
        )

    def _host_group(self, ranks: list[int]) -> Any:
        return dist.new_group(ranks, backend="gloo", timeout=self.timeout)

    def _host_groups_of(self, group: dist.ProcessGroup) -> Any:
        """The gloo twin of this rank's `group`; all ranks must call (each creates all twins)."""
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, dist.get_process_group_ranks(group), group=self._world)
        mine = None
        for ranks in sorted({tuple(sorted(r)) for r in everyone}):
            twin = self._host_group(list(ranks))
            if self.rank in ranks:
                mine = twin
        return mine

    def to_shard(self, value: Any) -> Any:
        """The lead's picklable `value` on all ranks of its data-parallel shard."""
        return self._broadcast(value, self._shard)

    def to_stage(self, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """The uint8 `values` of tensor-parallel rank 0 on the device of all ranks of its pipeline stage and shard; only
        their shape has to be known there."""
        values = (
            values.to(self.device) if self.tp_rank == 0 else torch.empty(shape, dtype=torch.uint8, device=self.device)
        )
        if self.tp > 1:
            dist.broadcast(values, src=parallel_state.get_tensor_model_parallel_src_rank(), group=self.tp_group)
        return values

    def _broadcast(self, value: Any, group: Any) -> Any:
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=min(ranks), group=group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The picklable values of all ranks, in order, on every rank."""
        values: list[Any] = [None] * self.world_size
        if self.world_size == 1:
            return [value]
        dist.all_gather_object(values, value, group=self._world)
        return values

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Float64 [n] on the host, summed over all ranks, on every rank."""
        if self.world_size > 1:
            dist.all_reduce(values, group=self._world)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier(group=self._world)

    def close(self) -> None:
        """Leave all groups; another layout may be made afterwards."""
        with contextlib.suppress(RuntimeError, AssertionError):
            parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def _device(config: RunConfig, rank: int) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise UserError("device=cuda, but torch sees no GPU: set device=cpu, or check the driver with nvidia-smi")
    if config.device == "cpu" and has_cuda:
        raise UserError("device=cpu on a machine with GPUs: start it with CUDA_VISIBLE_DEVICES= to hide them")
    if not has_cuda:
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def own_address(master_address: str) -> str:
    """Where other machines reach this one: its address on the network of `master_address`; loopback if that is."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect((master_address, 9))
        return str(probe.getsockname()[0])
