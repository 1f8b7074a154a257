"""Configuration: what is read back is what was written, and every mistake is told in one line with its remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_webrl.config import RunConfig, dump, load_config, validate
from megatron_webrl.errors import UserError

MINIMAL = {"model": {"path": "m"}, "tasks": {"names": ["click-test"]}}
YAML = "model: {path: m}\ntasks: {names: [click-test]}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_overrides_win_and_later_ones_win(file: Path):
    """File, then overrides in order; lists, null, quoted text and nested keys are read as YAML."""
    config = load_config(
        file,
        [
            "replay.eta=1",
            "replay.eta=3",
            "tasks.names=[click-link, click-tab]",
            "algorithm.constant_horizon=null",
            "trainer.parallel.tp=2",
            "trainer.optimizer.betas=[0.8, 0.9]",
            "observe.trace=false",
            "engine.args={attention-backend: fa3}",
            "run_dir=/tmp/a=b",
        ],
    )
    assert config.replay.eta == 3
    assert config.tasks.names == ["click-link", "click-tab"]
    assert config.algorithm.constant_horizon is None
    assert config.trainer.parallel.tp == 2
    assert config.trainer.optimizer.betas == (0.8, 0.9)
    assert config.observe.trace is False
    assert config.engine.args == {"attention-backend": "fa3"}
    assert config.run_dir == Path("/tmp/a=b")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("replay.etta=1", ["replay.etta=1", "did you mean replay.eta?"]),
        ("trainer.optimizer.learning=1", ["trainer.optimizer.learning=1", "known here are lr, betas"]),
        ("algorithms.epochs=1", ["algorithms", "did you mean algorithm?"]),
        ("replay.eta=-1", ["replay.eta=-1", "greater than or equal to 0"]),
        ("replay.eta=two", ["replay.eta='two'", "valid integer"]),
        ("trainer.dtype=float16", ["trainer.dtype='float16'", "'float32' or 'bfloat16'"]),
        ("browser.allow_hosts=[http://x]", ["browser.allow_hosts.0='http://x'", "*.site.org", "without scheme"]),
        ("tasks.horizons={4: 3}", ["tasks.horizons={4: 3}", "level 1"]),
        ("tasks.environment=webgym", ["tasks.train_file=null", "JSONL"]),
        ("evaluation.endpoint=http://x/v1", ["evaluation.endpoint_model=''", "http://x/v1"]),
        ("tasks.names=[]", ["tasks.names=[]", "name the tasks"]),
        ("name=../run", ["name='../run'"]),
        ("tasks.names.0=click-button", ["tasks.names.0=click-button", "replaced whole"]),
        ("replay.eta=???", ["replay.eta", "give a value"]),
        ("trainer.optimizer.lr=.inf", ["trainer.optimizer.lr=inf", "finite"]),
        ("tasks.names=[click-test,click-test]", ["tasks.names", "click-test", "more than once"]),
        ("engine.args={model-path: x}", ["engine.args.model-path", "use model.path"]),
        ("browser.viewport=[0, 5]", ["browser.viewport.0=0", "greater than 0"]),
        ("trainer.optimizer.betas=[0.9, 1.5]", ["trainer.optimizer.betas.1=1.5", "less than 1"]),
        ("sampling.top_p=0.9", ["sampling.top_p=0.9", "truncated", "leave it at 1;", "evaluation.top_p"]),
        ("sampling.top_k=20", ["sampling.top_k=20", "truncated", "leave it at 0;", "evaluation.top_k"]),
        ("evaluation.top_p=0", ["evaluation.top_p=0", "greater than 0"]),
        ("replay.eta", ["replay.eta", "write it as key=value"]),
        ("=1", ["=1", "write it as key=value"]),
    ],
)
def test_wrong_override_names_key_value_and_remedy(file: Path, override: str, words: list[str]):
    """One line that names the key and the value, with the nearest known key or what is allowed."""
    message = refusal(file, override)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tasks.train_seeds=[5, 5]"], ["tasks.train_seeds=[5, 5]", "empty range"]),
        (["tasks.held_out_seeds=[100, 200]"], ["tasks.held_out_seeds=[100, 200] overlaps tasks.train_seeds=[0, 1500]"]),
        (["trainer.parallel.sequence_parallel=true"], ["sequence_parallel=true needs trainer.parallel.tp > 1"]),
        (["trainer.parallel.vp=2"], ["trainer.parallel.vp=2 needs trainer.parallel.pp > 1"]),
        (["trainer.parallel.first_stage_layers=2"], ["first_stage_layers=2 needs trainer.parallel.pp > 1"]),
        (
            ["trainer.parallel.pp=2", "trainer.parallel.vp=2", "trainer.packing=false"],
            ["trainer.packing=false does not go with trainer.parallel.vp=2"],
        ),
        (
            ["trainer.parallel.pp=2", "trainer.parallel.vp=2", "trainer.parallel.first_stage_layers=2"],
            ["first_stage_layers=2 has no meaning with trainer.parallel.vp=2"],
        ),
        (["algorithm.minibatches=17"], ["algorithm.minibatches=17 exceeds replay.groups_per_step=16"]),
        (["algorithm.objective=raft++"], ["algorithm.constant_horizon=10", "raft++", "set it to null"]),
        (
            ["algorithm.objective=raft++", "algorithm.constant_horizon=null", "algorithm.unbiased_std=true"],
            ["algorithm.unbiased_std=true", "switch it off"],
        ),
        (
            ["algorithm.objective=raft++", "algorithm.constant_horizon=null"],
            ["replay.dynamic_sampling=true", "raft++", "switch it off"],
        ),
        (["engine.port=65535", "engine.hosts=2"], ["engine.port=65535", "engine.hosts=2", "lower port"]),
        (["browser.screenshot=[2000, 100]"], ["browser.screenshot=[2000, 100] exceeds browser.viewport=[1280, 768]"]),
        (["tasks.held_out_seeds=[2000, 2010]"], ["evaluation.episodes=1000 exceeds the 10 pages", "widen"]),
    ],
)
def test_clashes_between_keys_are_found(file: Path, overrides: list[str], words: list[str]):
    """Keys that are fine alone and not together are refused, both named."""
    message = refusal(file, *overrides)
    for word in words:
        assert word in message


def test_several_mistakes_are_told_together(file: Path):
    """All mistakes of a kind that can be seen at once are in the one line."""
    message = refusal(file, "replay.etta=1", "sampling.temperature=0")
    assert "replay.etta" in message
    assert "sampling.temperature=0" in message


def test_missing_key(tmp_path: Path):
    """A required key that is not there is named, with how to give it."""
    path = tmp_path / "run.yaml"
    path.write_text("tasks: {names: [click-test]}")
    assert "model is missing: set it in the file or as model=VALUE" in refusal(path)
    path.write_text("")
    assert "model is missing" in refusal(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "not readable as YAML"),
        ("- a\n- b", "the top level is a list: give a mapping"),
        ("x: ${nowhere}", "not readable as YAML"),
        ("just words", "unknown key just words"),
    ],
)
def test_unreadable_file(tmp_path: Path, text: str, words: str):
    """A file that is no mapping in YAML is refused by name."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    message = refusal(path)
    assert str(path) in message
    assert words in message


def test_unreadable_override_is_not_blamed_on_the_file(file: Path):
    """A value that is no YAML is told with the override that holds it."""
    assert "with replay.eta=[1" in refusal(file, "replay.eta=[1")


def test_absent_file(tmp_path: Path):
    """A path that is not there, or a folder, is refused with what to give."""
    assert "No such file" in refusal(tmp_path / "none.yaml")
    assert "give the path of a YAML file" in refusal(tmp_path)


def test_secrets_are_masked_where_the_configuration_is_written() -> None:
    config = validate(MINIMAL | {"browser": {"credentials": {"Shop.local:7770": ["correct horse"]}}}, "test")
    assert config.browser.credentials["shop.local:7770"][0].get_secret_value() == "correct horse"
    assert "correct horse" not in dump(config) + repr(config)
    assert "shop.local:7770" in dump(config)


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    eta=st.integers(0, 50),
    lr=st.floats(1e-12, 1.0),
    names=st.lists(
        st.text(st.characters(blacklist_categories=["Cs"]), min_size=1), min_size=1, max_size=3, unique=True
    ),
    horizon=st.none() | st.floats(1e-6, 1e6),
    executable=st.none() | st.just(Path("/usr/bin/chromium")),
    project=st.text(st.characters(blacklist_categories=["Cs"])),
    arguments=st.dictionaries(
        st.text(st.characters(categories=["L"]), min_size=1), st.booleans() | st.integers() | st.text()
    ),
)
def test_dump_and_load_round_trip(tmp_path_factory, eta, lr, names, horizon, executable, project, arguments):
    """What `--dry-run` prints is a file that gives an equal configuration."""
    config = validate(
        {
            "model": {"path": "m"},
            "tasks": {"names": names},
            "replay": {"eta": eta},
            "trainer": {"optimizer": {"lr": lr}},
            "algorithm": {"constant_horizon": horizon},
            "browser": {"executable": executable},
            "observe": {"wandb_project": project},
            "engine": {"args": arguments},
        },
        "test",
    )
    path = tmp_path_factory.mktemp("round") / "resolved.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load_config(path) == config


def test_defaults_are_valid():
    """Every default passes its own validation, and the two required keys are all that a file must give."""
    assert validate(MINIMAL, "test").evaluation.episodes == 1000
    required = [name for name, field in RunConfig.model_fields.items() if field.is_required()]
    assert required == ["model", "tasks"]


def test_every_key_is_described():
    """Every field has a docstring, which is its entry in the reference."""
    from megatron_webrl.config.reference import _sections

    for prefix, model, _ in _sections("", RunConfig, None):
        assert model.__doc__, prefix
        for name, field in model.model_fields.items():
            is_section = hasattr(field.annotation, "model_fields")
            assert field.description or is_section, f"{prefix}.{name}"


def test_imports_no_torch():
    """`--dry-run` and `doctor` answer in a second: the configuration imports neither torch nor anything that does."""
    code = (
        "import sys, megatron_webrl.config; heavy = {'torch', 'transformers', 'ray', 'megatron', 'matplotlib', 'wandb'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": "."}
    )
    assert done.stdout.strip() == "[]", done.stderr
