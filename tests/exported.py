"""The weights of a trainer, as tests look at them."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from megatron_webrl.trainer import PolicyTrainer


def exported(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """A copy of all weights by Hugging Face name, the same on every rank.  Collective."""
    snapshot = trainer.snapshot()
    trainer.export(snapshot, 1)
    mine = {name: tensor.clone() for name, tensor in snapshot.tensors(1)} if snapshot is not None else {}
    return {name: tensor for part in trainer.layout.gather(mine) for name, tensor in part.items()}


def load_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face directory, however many files they are in."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
