"""Checks against the disk: a model directory that cannot work is refused before anything starts, in one line."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.config import ParallelConfig, check_files, model_shape, validate
from megatron_webrl.errors import UserError

CONFIG = {
    "model_type": "qwen3_vl",
    "text_config": {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6, "vocab_size": 512},
    "vision_config": {"deepstack_visual_indexes": [0, 1]},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (path / name).write_text("")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    return path


def check(path: Path, **sections):
    return check_files(validate({"model": {"path": path}, "tasks": {"names": ["click-test"]}, **sections}, "test"))


def refusal(path: Path, **sections) -> str:
    with pytest.raises(UserError) as caught:
        check(path, **sections)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("keep", [0, 5, 30, -1])
def test_weights_that_were_cut_short_are_named(model: Path, keep: int):
    """Length and header of a safetensors file are compared before anything starts."""
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = refusal(model)
    assert "model.safetensors is not whole" in message and "fetch it again" in message


def test_whole_directory_passes(model: Path):
    """A complete directory gives the shape of its config.json."""
    assert check(model) == (4, 2, 6, 512, 2)
    assert model_shape(model).layers == 6


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("preprocessor_config.json", "has no preprocessor_config.json"),
        ("model.safetensors", "has no *.safetensors"),
    ],
)
def test_missing_file_is_named(model: Path, name: str, words: str):
    """Each file that is lacking is named, with the directory."""
    (model / name).unlink()
    message = refusal(model)
    assert words in message
    assert f"model.path={model}" in message


def test_processor_config_stands_in(model: Path):
    """transformers 5 writes processor_config.json in place of preprocessor_config.json: either will do."""
    (model / "preprocessor_config.json").rename(model / "processor_config.json")
    check(model)


def test_missing_directory(tmp_path: Path):
    """A directory that is not there, or a file, is told as such."""
    assert "does not exist" in refusal(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "is no directory" in refusal(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "malformed"),
        ("[]", "malformed"),
        ('{"model_type": "qwen3_vl"}', "malformed"),
        ('{"model_type": "llama"}', "holds a 'llama': only dense Qwen3-VL"),
        ("{}", "holds a None"),
    ],
)
def test_wrong_config_json(model: Path, text: str, words: str):
    """Broken JSON, lacking keys and other architectures are told apart."""
    (model / "config.json").write_text(text)
    assert words in refusal(model)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"trainer": {"parallel": {"tp": 3}}}, "trainer.parallel.tp=3 does not divide the model's 4 attention heads"),
        ({"trainer": {"parallel": {"tp": 4}}}, "use one of [1, 2]"),
        ({"engine": {"tp": 3}}, "engine.tp=3 does not divide"),
        ({"trainer": {"parallel": {"pp": 4}}}, "trainer.parallel.pp=4 does not divide the model's 6 decoder layers"),
        ({"trainer": {"parallel": {"pp": 5}}}, "trainer.parallel.pp=5 does not divide the model's 6 decoder layers"),
        ({"trainer": {"parallel": {"pp": 6}}}, "2 take deepstack features: use a smaller pp"),
        (
            {"trainer": {"parallel": {"pp": 3, "vp": 2}}},
            "trainer.parallel.vp=2 leaves 1 decoder layers in the first chunk",
        ),
        (
            {"trainer": {"parallel": {"pp": 2, "vp": 2}}},
            "trainer.parallel.vp=2 with trainer.parallel.pp=2 does not divide",
        ),
        (
            {"trainer": {"parallel": {"pp": 3, "first_stage_layers": 3}}},
            "which the other 2 stages cannot share evenly: use one of [2, 4]",
        ),
        (
            {"trainer": {"parallel": {"pp": 2, "first_stage_layers": 1}}},
            "leaves 1 decoder layers in the first stage, but 2 take deepstack features",
        ),
    ],
)
def test_layout_must_fit_the_model(model: Path, sections: dict, words: str):
    """Tensor and pipeline sizes that do not fit are refused with those that do."""
    assert words in refusal(model, **sections)


def test_layouts_that_fit(model: Path):
    """An engine may have more ranks than key-value heads (they are replicated); the trainer may not."""
    check(model, trainer={"parallel": {"tp": 2, "pp": 3}}, engine={"tp": 4})


@given(layers=st.integers(1, 96), pp=st.integers(1, 8), vp=st.integers(1, 4), first=st.none() | st.integers(1, 40))
def test_stages_hold_every_layer_once(layers: int, pp: int, vp: int, first: int | None):
    """What is not refused adds up, leaves no stage empty, and gives all but the first the same."""
    refusal = ""
    try:
        parallel = ParallelConfig(pp=pp, vp=vp, first_stage_layers=first)
        stages = parallel.stage_layers(layers)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert "trainer.parallel." in refusal
        return
    assert sum(stages) == layers and len(stages) == pp * vp and min(stages) > 0
    assert len(set(stages[first is not None :])) == 1 or len(stages) == 1
    assert first is None or stages[0] == first
