"""Conversion: what goes to Megatron and back is what it was, whole or not at all."""

from __future__ import annotations

import json
import re
import resource
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from on_ranks import free_port, on_ranks
from ranks import TEXTS, Recorded, run_config
from safetensors.torch import load_file, save_file

from megatron_webrl.cli import main
from megatron_webrl.errors import UserError
from megatron_webrl.trainer import PolicyTrainer, conversion, rows_of
from megatron_webrl.trainer.conversion import hf_to_megatron, megatron_to_hf
from megatron_webrl.trainer.weight_files import Architecture, Comparison, Progress, verify
from megatron_webrl.trainer.weights import copy_all_but_weights

LAYOUTS: list[dict[str, int]] = [
    {},
    {"tp": 2},
    {"pp": 2},
    {"tp": 2, "pp": 2},
    {"pp": 2, "first_stage_layers": 3},
]


def silent(what: str, done: int, total: int, unit: str) -> None:
    pass


def to_megatron(source: Path, target: Path, **layout: int) -> Comparison:
    options = {"tp": 1, "pp": 1, "first_stage_layers": None, **layout}
    return hf_to_megatron(source, target, **options, progress=silent)  # type: ignore[arg-type]


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def write_shards(directory: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    names = sorted(weights)
    files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({n: weights[n].contiguous() for n in names if files[n] == file}, directory / file, {"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.fixture(scope="session")
def mixed_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, a vocabulary that two ranks cannot share evenly, three files, bfloat16 with some float32 among it."""
    from megatron_webrl.tiny_model import make_tiny_model

    directory = make_tiny_model(tmp_path_factory.mktemp("model") / "mixed", TEXTS, layers=4, tie=False, seed=2)
    file = directory / "model.safetensors"
    weights = load_file(file)
    file.unlink()
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["vocab_size"] -= 1
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("model.language_model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:-1]
    wide = re.compile(r"norm|layers\.1\.self_attn\.q_proj|layers\.2\.mlp\.up_proj")
    write_shards(directory, {n: t if wide.search(n) else t.bfloat16() for n, t in weights.items()}, 3)
    return directory


@pytest.fixture(params=["deep_model_dir", "mixed_model_dir"])
def model_dir(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(f"{k}{v}" for k, v in layout.items()) or "one")
def test_there_and_back(model_dir: Path, tmp_path: Path, layout: dict[str, int]) -> None:
    """Tied and untied, whole and in shards, in every layout: names, dtypes and bits of all tensors, and the other files.
    The checkpoint has a file for each rank of the layout."""
    there = to_megatron(model_dir, tmp_path / "megatron", **layout)
    ranks = layout.get("tp", 1) * layout.get("pp", 1)
    files = sorted(file.name for file in (tmp_path / "megatron").glob("*.distcp"))
    assert files == [f"__{rank}_0.distcp" for rank in range(ranks)]
    back = megatron_to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_size="1.5MB", progress=silent)
    assert there == back
    assert not there.differing

    original, found = tensors(model_dir), tensors(tmp_path / "back")
    assert found.keys() == original.keys()
    for name, tensor in original.items():
        assert tensor.dtype == found[name].dtype, name
        assert torch.equal(tensor, found[name]), name
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == original.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in original.values())
    others = {f.name for f in model_dir.iterdir() if "safetensors" not in f.name}
    assert others == {f.name for f in (tmp_path / "back").iterdir() if "safetensors" not in f.name}
    assert all((model_dir / name).read_bytes() == (tmp_path / "back" / name).read_bytes() for name in others)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["back", "megatron"]


@pytest.mark.parametrize("size", ["100GB", "1.5MB"])
def test_transformers_reads_it(deep_model_dir: Path, tmp_path: Path, size: str) -> None:
    """Same logits as from the original directory, one file or several."""
    from transformers import Qwen3VLForConditionalGeneration

    to_megatron(deep_model_dir, tmp_path / "megatron", tp=2, pp=2)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_size=size, progress=silent)
    assert (tmp_path / "back" / "model.safetensors").exists() is (size == "100GB")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        want, got = (
            Qwen3VLForConditionalGeneration.from_pretrained(path)(input_ids=ids).logits
            for path in (deep_model_dir, tmp_path / "back")
        )
    assert torch.equal(want, got)


TRAINED: dict[str, dict[str, Any]] = {
    "tp2": {"parallel": {"tp": 2}},
    "pp2": {"parallel": {"pp": 2, "first_stage_layers": 3, "distributed_optimizer": True}, "dtype": "bfloat16"},
    "dp2": {"parallel": {"dp": 2, "distributed_optimizer": True}, "dtype": "bfloat16"},
}


def load_and_save(rank: int, ranks: int, model: Path, megatron: Path, out: Path, ports: list[int]) -> None:
    """In each layout: Megatron loads the converted checkpoint into the trainer's model; a step; the trainer's checkpoint."""
    for (name, settings), port in zip(TRAINED.items(), ports, strict=True):
        place = {"rank": rank, "world_size": ranks, "master_address": "127.0.0.1", "master_port": port}
        trainer = PolicyTrainer(run_config(model, trainer=settings), **place, total_steps=1)
        (chunk,) = trainer.chunks
        parameters = dict(chunk.named_parameters())
        before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.zero_()
        state = {"model": chunk.sharded_state_dict()}
        chunk.load_state_dict(dist_checkpointing.load(state, str(megatron))["model"])
        for key, parameter in parameters.items():
            assert torch.equal(parameter, before[key]), (name, key)
        recorded = Recorded(trainer.processor, groups=1, size=2, steps=1)
        rows = [row for t in recorded.groups[10].trajectories for row in rows_of(t, 1.0)]
        trainer.sft_step(rows, recorded.fetch_images)
        trainer.save(out / name / "checkpoint", {"step": 1})
        trainer.save_hf(out / name / "hf")
        trainer.close()


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_trainers_read_it_and_theirs_can_be_converted(mixed_model_dir: Path, tmp_path: Path) -> None:
    """Megatron loads what was converted for TP2 × PP2 into a model of another layout; each layout's own checkpoint, with
    its optimizer, converts to the directory that the trainer itself exports, in the training dtype."""
    to_megatron(mixed_model_dir, tmp_path / "megatron", tp=2, pp=2)
    ports = [free_port() for _ in TRAINED]
    on_ranks(
        load_and_save, 2, mixed_model_dir, tmp_path / "megatron", tmp_path, ports, preload="megatron_webrl.trainer"
    )
    for name, settings in TRAINED.items():
        source, want = tmp_path / name / "checkpoint", tmp_path / name / "hf"
        megatron_to_hf(source, tmp_path / name / "back", progress=silent)
        assert not verify(want, tmp_path / name / "back", progress=silent).differing
        assert not verify(source, want, progress=silent).differing
        dtypes = {tensor.dtype for tensor in tensors(tmp_path / name / "back").values()}
        assert dtypes == {torch.bfloat16 if "dtype" in settings else torch.float32}

    source = tmp_path / "tp2" / "checkpoint"
    megatron_to_hf(source, tmp_path / "cast", dtype="bfloat16", progress=silent)
    assert {tensor.dtype for tensor in tensors(tmp_path / "cast").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["dtype"] == "bfloat16"
    shutil.rmtree(source / "hf")  # as in checkpoints of before
    with pytest.raises(UserError, match="--model HF_DIR"):
        megatron_to_hf(source, tmp_path / "back", progress=silent)
    megatron_to_hf(source, tmp_path / "back", model=mixed_model_dir, progress=silent)
    assert not verify(tmp_path / "tp2" / "hf", source, model=mixed_model_dir, progress=silent).differing


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def place_of(directory: Path, tensor: torch.Tensor, pattern: str) -> tuple[Path, int]:
    """The file that holds these bytes, and where."""
    wanted = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    for file in sorted(directory.glob(pattern)):
        if (place := file.read_bytes().find(wanted)) >= 0:
            return file, place
    raise AssertionError("not found")


def test_verify_finds_one_bit(mixed_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hugging Face or Megatron, each with each: exit code 0 if equal; after one bit was flipped 1, and the tensor is named."""
    to_megatron(mixed_model_dir, tmp_path / "megatron", tp=2)
    shutil.copytree(mixed_model_dir, tmp_path / "hf")
    shutil.copytree(tmp_path / "megatron", tmp_path / "other")

    def run(a: Path, b: Path) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as ended:
            main(["convert", "verify", str(a), str(b)])
        return ended.value.code, capsys.readouterr().out

    for a, b in ((mixed_model_dir, tmp_path / "hf"), (mixed_model_dir, tmp_path / "megatron")):
        code, out = run(a, b)
        assert code == 0
        assert out.splitlines()[-1].startswith(f"Equal: {len(tensors(a))} tensors")
    name = "model.language_model.layers.2.mlp.down_proj.weight"
    weight = tensors(mixed_model_dir)[name]
    file, place = place_of(tmp_path / "hf", weight, "*.safetensors")
    flip(file, place + weight.nbytes // 2)
    half = weight[:, : weight.shape[1] // 2]
    file, place = place_of(tmp_path / "other", half, "*.distcp")
    flip(file, place + half.nbytes // 2)
    for a, b in (("megatron", "hf"), ("other", "megatron"), ("megatron", "other")):
        code, out = run(tmp_path / a, tmp_path / b)
        assert code == 1
        assert out.splitlines()[-2:][0] == f"{name} holds other values"
    with pytest.raises(UserError, match=re.escape(file.name)):  # and nobody converts it
        megatron_to_hf(tmp_path / "other", tmp_path / "back", progress=silent)


def test_verify_tells_models_apart(deep_model_dir: Path, mixed_model_dir: Path) -> None:
    """Names that only one has, other shapes, other dtypes."""
    differing = verify(deep_model_dir, mixed_model_dir, progress=silent).differing
    assert f"lm_head.weight is in {mixed_model_dir} only" in differing
    assert any(
        re.fullmatch(r"model\S+embed_tokens.weight has shape \[\d+, 128\] and \[\d+, 128\]", d) for d in differing
    )
    assert "model.language_model.layers.0.mlp.up_proj.weight is float32 and bfloat16" in differing


def change(directory: Path, name: str, edit: Callable[[torch.Tensor], torch.Tensor | None], new: str = "") -> None:
    file = next(f for f in directory.glob("*.safetensors") if name in load_file(f))
    weights = load_file(file)
    edited = edit(weights.pop(name))
    save_file(weights | ({} if edited is None else {new or name: edited}), file, {"format": "pt"})


Q = "model.language_model.layers.0.self_attn.q_proj.weight"
SHARD = "model-00002-of-00003.safetensors"
DAMAGED: dict[str, Callable[[Path], Any]] = {
    SHARD: lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes()[:5000]),
    "model-00002.*No such file": lambda d: (d / SHARD).unlink(),
    f"lack {Q}": lambda d: change(d, Q, lambda t: None),
    "hold unknown model.extra": lambda d: change(d, "lm_head.weight", lambda t: t, "model.extra"),
    f"{Q} has shape .*config.json says": lambda d: change(d, Q, lambda t: t[:-1].clone()),
    "is I64": lambda d: change(d, Q, lambda t: t.long()),
    "index.json is malformed": lambda d: (d / "model.safetensors.index.json").write_text("{"),
    "config.json is malformed": lambda d: (d / "config.json").write_text("{"),
    "config.json nor Megatron": lambda d: (d / "config.json").unlink(),
    "safetensors": lambda d: [f.unlink() for f in d.glob("*.safetensors*")],
}


@pytest.mark.parametrize("message", DAMAGED)
def test_damaged_directories_are_told(mixed_model_dir: Path, tmp_path: Path, message: str) -> None:
    """The file or tensor is named, and nothing is written."""
    broken = shutil.copytree(mixed_model_dir, tmp_path / "broken")
    if message.startswith("hold"):  # as well as all that it needs
        save_file({"model.extra": torch.ones(2)}, broken / "extra.safetensors")
        index = broken / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"]["model.extra"] = "extra.safetensors"
        index.write_text(json.dumps(content))
    else:
        DAMAGED[message](broken)
    with pytest.raises(UserError, match=f"SRC={re.escape(str(broken))}.*{message}"):
        to_megatron(broken, tmp_path / "out")
    assert [f.name for f in tmp_path.iterdir()] == ["broken"]


def test_damaged_checkpoints_are_told(mixed_model_dir: Path, deep_model_dir: Path, tmp_path: Path) -> None:
    """A part cut short, missing or altered, an index likewise, a model that it is not of: named, and nothing is written."""
    to_megatron(mixed_model_dir, tmp_path / "whole", tp=2)
    cases: list[tuple[str, Callable[[Path], Any], str]] = [
        ("__1_0.distcp", lambda f: f.write_bytes(f.read_bytes()[:-1000]), r"__1_0\.distcp is not what was written"),
        ("__1_0.distcp", lambda f: f.unlink(), r"__1_0\.distcp"),
        (".metadata", lambda f: f.write_bytes(f.read_bytes()[:-1000]), r"\.metadata cannot be read"),
        (".metadata", lambda f: f.unlink(), r"\.metadata cannot be read"),
        ("integrity.json", lambda f: f.unlink(), r"integrity\.json"),
        ("conversion.json", lambda f: f.write_text("[]"), r"conversion\.json is malformed"),
        ("hf/config.json", lambda f: f.unlink(), r"config\.json"),
        ("hf/config.json", lambda f: shutil.copy(deep_model_dir / "config.json", f), "unknown tensors|has shape"),
    ]
    for name, damage, message in cases:
        broken = tmp_path / "broken"
        shutil.copytree(tmp_path / "whole", broken)
        damage(broken / name)
        with pytest.raises(UserError, match=f"SRC={re.escape(str(broken))}.*({message})"):
            megatron_to_hf(broken, tmp_path / "back", progress=silent)
        shutil.rmtree(broken)
    assert [f.name for f in tmp_path.iterdir()] == ["whole"]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 4}, "--tp=4 does not divide the model's 4 attention heads and 2 key-value heads"),
        ({"pp": 3}, "--pp=3 does not divide the model's 4 decoder layers.*--first-stage-layers"),
        ({"pp": 4}, "--pp=4 .*deepstack"),
        ({"pp": 3, "first_stage_layers": 3}, "--first-stage-layers=3 leaves 1"),
        ({"first_stage_layers": 2}, "--first-stage-layers=2 needs --pp"),
        ({"tp": 0}, "--tp=0"),
    ],
)
def test_layouts_that_do_not_fit(deep_model_dir: Path, tmp_path: Path, layout: dict[str, int], message: str) -> None:
    """Told in the words of the command line."""
    with pytest.raises(UserError, match=message):
        to_megatron(deep_model_dir, tmp_path / "out", **layout)
    assert not list(tmp_path.iterdir())


def test_wrong_arguments(deep_model_dir: Path, tmp_path: Path) -> None:
    """A size without a unit, sources of the other kind, a source that is none: each says what to give."""
    to_megatron(deep_model_dir, tmp_path / "megatron")
    with pytest.raises(UserError, match="--max-shard-size=12 is no size"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "out", max_shard_size="12", progress=silent)
    with pytest.raises(UserError, match="use hf-to-megatron"):
        megatron_to_hf(deep_model_dir, tmp_path / "out", progress=silent)
    with pytest.raises(UserError, match="use megatron-to-hf"):
        to_megatron(tmp_path / "megatron", tmp_path / "out")
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="step-000020"):
            verify(deep_model_dir, path, progress=silent)
        with pytest.raises(UserError, match="step-000020"):
            megatron_to_hf(path, tmp_path / "out", progress=silent)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file can grow beyond 200 kB, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def megatron_dir(deep_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted") / "megatron"
    to_megatron(deep_model_dir, directory)
    return directory


def both_ways(hf: Path, megatron: Path, target: Path, progress: Progress = silent) -> list[Callable[[], Any]]:
    return [
        lambda: hf_to_megatron(hf, target, tp=2, pp=1, first_stage_layers=None, progress=progress),
        lambda: megatron_to_hf(megatron, target, progress=progress),
    ]


def test_full_disk(
    deep_model_dir: Path, megatron_dir: Path, tmp_path: Path, small_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing fails, or it is known beforehand that it would: said so, and nothing is left."""
    for convert in both_ways(deep_model_dir, megatron_dir, tmp_path / "out"):
        with pytest.raises(UserError, match=r"out could not be written \(.*: make room"):
            convert()
        assert not list(tmp_path.iterdir())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    for convert in both_ways(deep_model_dir, megatron_dir, tmp_path / "out"):
        with pytest.raises(UserError, match=r"needs 0\.0 GB, but 0\.0 GB are free"):
            convert()
        assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_interrupts_leave_nothing(
    deep_model_dir: Path, megatron_dir: Path, tmp_path: Path
) -> None:
    """An existing target stays as it is; after an interrupt, in whatever phase, there is nothing; what a killed conversion
    left does not stop the next."""
    phases = set()
    interrupts: list[str] = []

    def progress(what: str, done: int, total: int, unit: str) -> None:
        phases.add(what)
        if what in interrupts:
            raise KeyboardInterrupt

    for convert in both_ways(deep_model_dir, megatron_dir, tmp_path / "out", progress):
        for interrupts[:] in (["writing"], ["comparing"]):
            with pytest.raises(KeyboardInterrupt):
                convert()
            assert not list(tmp_path.iterdir())
        interrupts.clear()
        (tmp_path / ".out.partial" / "hf").mkdir(parents=True)
        convert()
        before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
        with pytest.raises(UserError, match="exists"):
            convert()
        assert before == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
        shutil.rmtree(tmp_path / "out")
    assert phases == {"writing", "comparing", "checking files"}


def test_what_was_written_is_compared(deep_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the result holds other values than its source, there is no result."""
    correct = conversion.to_megatron  # type: ignore[attr-defined]
    monkeypatch.setattr(conversion, "to_megatron", lambda *args, **kwargs: correct(*args, **kwargs).abs())
    with pytest.raises(UserError, match="differs from what was read"):
        to_megatron(deep_model_dir, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_tool_is_the_command(
    deep_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tools/convert_checkpoint.py takes the words of `megatron-webrl convert`; wrong input ends with 2 and one line."""
    tool = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"

    def run(*words: str | Path) -> Any:
        monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(tool), run_name="__main__")
        return ended.value.code

    assert run("hf-to-megatron", deep_model_dir, tmp_path / "megatron", "--tp", "2", "--pp", "2") == 0
    assert run("megatron-to-hf", tmp_path / "megatron", tmp_path / "back", "--max-shard-size", "1MB") == 0
    assert run("verify", deep_model_dir, tmp_path / "back") == 0
    equal = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Equal: ")]
    assert len(equal) == 3
    assert len(set(equal)) == 1
    assert run("hf-to-megatron", deep_model_dir, tmp_path / "megatron") == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def peak_growth(work: Callable[[], Any]) -> int:
    """Bytes by which resident memory exceeded, at its peak, what it was before."""

    def status(key: str) -> int:
        found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


@pytest.mark.e2e
def test_memory_does_not_grow_with_the_model(deep_model_dir: Path, tmp_path: Path) -> None:
    """A model of 24 layers and 190 MB takes less than a quarter of that, both ways, comparisons included."""
    hf = tmp_path / "hf"
    copy_all_but_weights(deep_model_dir, hf)
    config = json.loads((hf / "config.json").read_text())
    config["text_config"] |= {"num_hidden_layers": 24, "hidden_size": 512, "intermediate_size": 2048}
    config["vision_config"]["out_hidden_size"] = 512
    (hf / "config.json").write_text(json.dumps(config))
    lengths = Architecture.of(hf, "SRC").lengths
    weights = {name: torch.randn(length, dtype=torch.bfloat16) for name, length in lengths.items()}
    size = sum(tensor.nbytes for tensor in weights.values())
    assert size > 150e6
    write_shards(hf, weights, 4)
    del weights
    small = deep_model_dir, tmp_path / "small", tmp_path / "small-back"
    for source, megatron, back in (small, (hf, tmp_path / "megatron", tmp_path / "back")):  # the first one warms up
        there = peak_growth(lambda s=source, m=megatron: to_megatron(s, m, tp=2, pp=2))
        again = peak_growth(lambda m=megatron, b=back: megatron_to_hf(m, b, max_shard_size="40MB", progress=silent))
    print(f"\n{size / 1e6:.0f} MB of weights: peak +{there / 1e6:.0f} MB there, +{again / 1e6:.0f} MB back")
    assert max(there, again) < size / 4


def test_the_index_says_which_file_holds_a_tensor(untied_model_dir: Path, tmp_path: Path) -> None:
    """Shards of an older download beside it are passed over; without an index a tensor in two files is refused; a tied
    model's own output layer has to be its embeddings."""
    source = shutil.copytree(untied_model_dir, tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(weights)
    write_shards(source, weights, 2)
    save_file({names[0]: weights[names[0]] + 1}, source / "model-00002-of-00004.safetensors")
    assert verify(untied_model_dir, source, progress=silent).differing == []
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=f"{re.escape(names[0])} is in .*-of-00002.* and in .*-of-00004"):
        verify(untied_model_dir, source, progress=silent)
    tied = shutil.copytree(untied_model_dir, tmp_path / "tied")
    config = json.loads((tied / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (tied / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"lm_head\.weight differs from the embeddings"):
        verify(tied, tied, progress=silent)


def test_one_conversion_at_a_time_writes_a_name(untied_model_dir: Path, tmp_path: Path) -> None:
    """The second is refused and leaves the first alone; the lock goes with it."""
    refused: list[str] = []

    def meddle(*_: object) -> None:
        if not refused:
            with pytest.raises(UserError, match="written by another conversion") as error:
                to_megatron(untied_model_dir, tmp_path / "out")
            refused.append(str(error.value))

    hf_to_megatron(untied_model_dir, tmp_path / "out", tp=1, pp=1, first_stage_layers=None, progress=meddle)
    assert refused
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
