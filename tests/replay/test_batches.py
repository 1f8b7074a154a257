"""Recorded batches on disk: what is written is read back, whole or not at all, and what is not whole is named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from megatron_webrl.config import RunConfig, validate
from megatron_webrl.errors import UserError
from megatron_webrl.replay import BatchWriter, choose_batches, read_batches
from megatron_webrl.replay.batches import remove_batches
from megatron_webrl.trajectory import Assignment, Group, Lane, Outcome, Task, Trajectory, encode_steps, image_digest

JPEG = b"\xff\xd8\xff three"
IMAGES = {image_digest(data): data for data in (b"one", b"two", JPEG)}


def group(group_id: int, *, digests: list[str], tokens: int = 7) -> Group:
    task = Task(f"test/{group_id}", "test", "t", group_id, 5)
    members = [
        Trajectory(
            Assignment(task, group_id, i, 0, Lane.TRAIN, 0, 1.0, 60.0),
            Outcome.SUCCESS, "solved", 1.0, 1, 3, tokens + i, 4, 4, digests, "w", 0.0, 1.0, encode_steps([]),
        )
        for i in range(2)
    ]  # fmt: skip
    return Group(group_id, task, members)


def write(directory: Path, step: int, *groups: Group, version: int = 4) -> Path:
    writer = BatchWriter(directory, step)
    for one in groups:
        writer.add_images({digest: IMAGES[digest] for digest in one.digests})
    return writer.finish(version, list(groups))


def config(directory: Path, *, steps: int = 300, minibatches: int = 2) -> RunConfig:
    return validate(
        {
            "model": {"path": "m"},
            "tasks": {"names": ["click-test"]},
            "train_only": str(directory),
            "trainer": {"steps": steps},
            "algorithm": {"minibatches": minibatches},
        },
        "test",
    )


def test_what_is_recorded_is_read_back_in_order_of_steps(tmp_path: Path) -> None:
    """Groups with payloads, screenshots, version, and each group's tokens, by the step's number."""
    first, second, third = IMAGES
    groups = [group(7, digests=[first, second]), group(5, digests=[second, third], tokens=20)]
    write(tmp_path, 10, group(9, digests=[]), version=12)
    folder = write(tmp_path, 2, *groups)
    assert folder == tmp_path / "step-000002"
    early, late = read_batches(tmp_path)
    assert (early.step, early.version, early.group_ids, early.costs) == (2, 4, [7, 5], [15, 41])
    assert (late.step, late.version) == (10, 12)
    assert early.groups([5]) == [groups[1]] and early.groups([7, 5]) == groups
    assert early.images([third, first]) == {third: JPEG, first: b"one"}


def test_a_batch_appears_whole_or_not_at_all_and_replaces_an_earlier_one(tmp_path: Path) -> None:
    """What was begun and not finished is no batch, and is gone once it is abandoned or begun again."""
    write(tmp_path, 1, group(1, digests=list(IMAGES)))
    unfinished = BatchWriter(tmp_path, 2)
    unfinished.add_images(IMAGES)
    assert [batch.step for batch in read_batches(tmp_path)] == [1]
    unfinished.abandon()
    assert [file.name for file in tmp_path.iterdir()] == ["step-000001"]
    BatchWriter(tmp_path, 1).add_images(IMAGES)  # its writer was killed
    again = write(tmp_path, 1, group(2, digests=[]))
    assert [file.name for file in tmp_path.iterdir()] == ["step-000001"]
    assert read_batches(tmp_path)[0].group_ids == [2] and not list((again / "images").iterdir())


def test_rolled_back_batches_are_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, group(step, digests=[]))
    remove_batches(tmp_path, after_step=1)
    assert [batch.step for batch in read_batches(tmp_path)] == [1]
    remove_batches(tmp_path / "nothing", after_step=1)


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("manifest.json", None, "manifest.json"),
        ("manifest.json", b"{", "manifest.json"),
        ("manifest.json", b'{"format":1,"step":9,"version":4,"group_ids":[1],"costs":[1]}', "not of step 3"),
        ("manifest.json", b'{"format":2,"step":3,"version":4,"group_ids":[1],"costs":[1]}', "in format 1"),
        ("manifest.json", b'{"format":1,"step":3,"version":4,"group_ids":[1],"costs":[]}', "not of step 3"),
        ("groups.msgpack", None, "groups.msgpack"),
        ("groups.msgpack", b"\x91\x01", "groups.msgpack"),
        ("groups.msgpack", msgspec.msgpack.encode([]), r"lacks groups \[1\]"),
        (f"images/{next(iter(IMAGES))}.png", None, "No such file"),
        (f"images/{next(iter(IMAGES))}.png", b"on", "does not match its name"),
    ],
)
def test_a_batch_that_is_not_whole_is_named(tmp_path: Path, file: str, content: bytes | None, problem: str) -> None:
    """One error that names the key, the folder and the file, and what to do."""
    folder = write(tmp_path, 3, group(1, digests=list(IMAGES)))
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(UserError, match=rf"train_only={tmp_path}: step-000003: .*{problem}.*record it again"):
        [(b.groups(b.group_ids), b.images(list(IMAGES))) for b in read_batches(tmp_path)]


def test_batches_are_chosen_by_step(tmp_path: Path) -> None:
    """Those after the resumed step, up to trainer.steps; wrong input says what to change."""
    with pytest.raises(UserError, match=r"train_only=.*holds no recorded batch.*record_batches"):
        choose_batches(config(tmp_path), after_step=0)
    for step in (3, 4, 5, 6):
        write(tmp_path, step, group(step, digests=[]), group(100 + step, digests=[]))
    assert [b.step for b in choose_batches(config(tmp_path), after_step=0)] == [3, 4, 5, 6]
    assert [b.step for b in choose_batches(config(tmp_path, steps=5), after_step=3)] == [4, 5]
    assert choose_batches(config(tmp_path), after_step=6) == [], "all are used up"
    with pytest.raises(UserError, match=r"trainer\.steps=2 .*step 3: raise it"):
        choose_batches(config(tmp_path, steps=2), after_step=0)
    with pytest.raises(UserError, match=r"algorithm\.minibatches=3 exceeds the 2 groups of .*step-000003"):
        choose_batches(config(tmp_path, minibatches=3), after_step=0)


def test_rollouts_and_training_cannot_both_be_left_out(tmp_path: Path) -> None:
    data = config(tmp_path).model_dump(mode="json") | {"rollout_only": True}
    with pytest.raises(UserError, match=r"rollout_only=true .* train_only=.*set one of them"):
        validate(data, "test")
