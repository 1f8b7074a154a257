"""Recorded batches: what a train step took, whole on disk, so that it can be trained again without rollouts.

batches/step-000150/manifest.json      step, policy version, group ids and their tokens
batches/step-000150/groups.msgpack     the groups with their payloads, as they crossed the wire
batches/step-000150/images/DIGEST.png  every screenshot that they refer to, or .jpg

Steps are numbered as in metrics.jsonl and checkpoints/: the first is 1.  A batch appears whole or not at all.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_webrl.config import RunConfig
from megatron_webrl.errors import UserError
from megatron_webrl.screenshots import image_file, write_image
from megatron_webrl.trajectory import Group, image_digest

FORMAT = 1
MANIFEST_FILE = "manifest.json"
GROUPS_FILE = "groups.msgpack"
IMAGES_FOLDER = "images"


class _Manifest(msgspec.Struct):
    format: int
    step: int
    version: int
    group_ids: list[int]
    costs: list[int]
    lineage: tuple[tuple[int, int], ...] = ((0, 0),)


class BatchWriter:
    """Writes the batch of train step `step` under `directory`, in place of an earlier one.  Raises OSError."""

    def __init__(self, directory: Path, step: int) -> None:
        self.step = step
        self._target = _folder(directory, step)
        self._partial = directory / f".{self._target.name}.partial"
        shutil.rmtree(self._partial, ignore_errors=True)
        (self._partial / IMAGES_FOLDER).mkdir(parents=True)

    def add_images(self, images: Mapping[str, bytes]) -> None:
        """Encoded screenshots by digest."""
        for digest, data in images.items():
            write_image(self._partial / IMAGES_FOLDER, digest, data)

    def finish(self, version: int, groups: list[Group], lineage: tuple[tuple[int, int], ...] = ((0, 0),)) -> Path:
        """The batch is whole, all its screenshots were added: it appears under its name, which is returned.

        version: policy version of the weights that the batch was taken for; lineage: segments of `Lineage`."""
        (self._partial / GROUPS_FILE).write_bytes(msgspec.msgpack.encode(groups))
        manifest = _Manifest(
            FORMAT, self.step, version, [g.group_id for g in groups], [g.tokens for g in groups], lineage
        )
        (self._partial / MANIFEST_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
        if self._target.exists():
            shutil.rmtree(self._target)
        return self._partial.rename(self._target)

    def abandon(self) -> None:
        """Remove what was written of a batch that will not be whole."""
        shutil.rmtree(self._partial, ignore_errors=True)


def has_batch(directory: Path, step: int) -> bool:
    """Whether the batch of that train step is whole there."""
    return _folder(directory, step).is_dir()


class RecordedBatch(NamedTuple):
    """A batch on disk."""

    folder: Path
    step: int
    """Train step, from 1."""
    version: int
    """Policy version of the weights that it was taken for."""
    group_ids: list[int]
    costs: list[int]
    """Tokens of each group."""
    lineage: tuple[tuple[int, int], ...]
    """Segments of `Lineage`."""

    def groups(self, group_ids: list[int]) -> list[Group]:
        """Those groups.  Raises UserError if the file is malformed or lacks one."""
        try:
            data = (self.folder / GROUPS_FILE).read_bytes()
            found = {group.group_id: group for group in msgspec.msgpack.decode(data, type=list[Group])}
        except (OSError, msgspec.MsgspecError) as error:
            raise _broken(self.folder, f"{GROUPS_FILE}: {error}") from None
        if missing := [i for i in group_ids if i not in found]:
            raise _broken(self.folder, f"{GROUPS_FILE} lacks groups {missing} of the manifest")
        return [found[i] for i in group_ids]

    def images(self, digests: list[str]) -> dict[str, bytes]:
        """Those screenshots.  Raises UserError if one is missing or altered."""
        found = {}
        for digest in digests:
            file = image_file(self.folder / IMAGES_FOLDER, digest)
            try:
                found[digest] = file.read_bytes()
            except OSError as error:
                raise _broken(self.folder, f"{file.name}: {error.strerror}") from None
            if image_digest(found[digest]) != digest:
                raise _broken(self.folder, f"{file.name} does not match its name")
        return found


def read_batches(directory: Path) -> list[RecordedBatch]:
    """The whole batches of a run's `batches/`, in order of steps; only the manifests are read.

    Raises UserError if there are none, or one is malformed or of another format."""
    batches = []
    for step, folder in _folders(directory):
        try:
            manifest = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=_Manifest)
        except (OSError, msgspec.MsgspecError) as error:
            raise _broken(folder, f"{MANIFEST_FILE}: {error}") from None
        if manifest.format != FORMAT or manifest.step != step or len(manifest.costs) != len(manifest.group_ids):
            raise _broken(folder, f"{MANIFEST_FILE} is not of step {step} in format {FORMAT}")
        batches.append(
            RecordedBatch(folder, step, manifest.version, manifest.group_ids, manifest.costs, manifest.lineage)
        )
    if not batches:
        raise UserError(
            f"train_only={directory} holds no recorded batch (step-NNNNNN): give the batches/ of a run with "
            "observe.record_batches=true or rollout_only=true"
        )
    return batches


def choose_batches(config: RunConfig, *, after_step: int) -> list[RecordedBatch]:
    """Which batches of config.train_only are trained on, in order: those later than `after_step`, up to trainer.steps.

    Raises UserError if there is no batch up to trainer.steps, one is cut into more minibatches than it has groups, or what
    `read_batches` raises."""
    directory, last, minibatches = config.train_only, config.trainer.steps, config.algorithm.minibatches
    assert directory is not None
    batches = read_batches(directory)
    if batches[0].step > last:
        raise UserError(
            f"trainer.steps={last} ends before the first batch of train_only={directory}, which is of step {batches[0].step}: "
            "raise it"
        )
    chosen = [batch for batch in batches if after_step < batch.step <= last]
    for batch in chosen:
        if len(batch.group_ids) < minibatches:
            raise UserError(
                f"algorithm.minibatches={minibatches} exceeds the {len(batch.group_ids)} groups of {batch.folder}: groups are "
                "not split, so lower it"
            )
    return chosen


def remove_batches(directory: Path, after_step: int) -> None:
    """Remove the batches of steps later than `after_step`: they were rolled back."""
    for step, folder in _folders(directory):
        if step > after_step:
            shutil.rmtree(folder)


def _folder(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06d}"


def _folders(directory: Path) -> list[tuple[int, Path]]:
    found = [(f.name.removeprefix("step-"), f) for f in directory.glob("step-*")]
    return sorted((int(step), folder) for step, folder in found if step.isdigit())


def _broken(folder: Path, problem: str) -> UserError:
    return UserError(
        f"train_only={folder.parent}: {folder.name}: {' '.join(problem.split())}: record it again, or move {folder.name} away"
    )
