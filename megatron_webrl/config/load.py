"""YAML file plus `key=value` overrides -> RunConfig, with errors that name the key, the value and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from megatron_webrl.config.models import RunConfig
from megatron_webrl.errors import UserError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, merge and validate.

    overrides: `section.key=value` each; later ones win; `null` empties, lists as `[a, b]`.
    Raises UserError with one line a mistake: unreadable file, malformed override, unknown key (with the nearest known
    one), wrong type or range, clash between keys.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"configuration {path}: {error.strerror or error}: give the path of a YAML file") from None
    except UnicodeDecodeError:
        raise UserError(f"configuration {path}: it is no text in UTF-8: give the path of a YAML file") from None
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip():
            raise UserError(f"override {override!r}: write it as key=value, for example replay.eta=1")
    try:
        parsed = OmegaConf.create(text or "{}")
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, AssertionError) as error:
        raise UserError(f"configuration {path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(parsed, DictConfig):
        raise UserError(f"configuration {path}: the top level is a list: give a mapping of sections")
    try:
        merged = OmegaConf.merge(parsed, OmegaConf.from_dotlist(list(overrides)))
        data = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except TypeError as error:
        raise UserError(
            f"configuration {path} with {' '.join(overrides)}: {' '.join(str(error).split())}: a list is replaced whole, as "
            "tasks.names=[click-test, focus-text]"
        ) from None
    except MissingMandatoryValue as error:
        raise UserError(f"configuration {path}: {' '.join(str(error).split())} (`???`): give a value") from None
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        said = f"configuration {path} with {' '.join(overrides)}" if overrides else f"configuration {path}"
        raise UserError(f"{said}: not readable as YAML: {' '.join(str(error).split())}") from None
    assert isinstance(data, dict)
    return validate(data, str(path))


def validate(data: dict[Any, Any], source: str) -> RunConfig:
    """Mapping -> RunConfig; raises UserError as `load_config`."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise UserError(f"configuration {source}: " + "; ".join(_explain(e) for e in error.errors())) from None


def _explain(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = list(_section(error["loc"][:-1]).model_fields)
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.5)
        prefix = key.rpartition(".")[0]
        if near:
            return f"unknown key {key}={error['input']!r}: did you mean {prefix + '.' if prefix else ''}{near[0]}?"
        return f"unknown key {key}={error['input']!r}: known here are {', '.join(known)}"
    if error["type"] == "missing":
        return f"{key} is missing: set it in the file or as {key}=VALUE"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "value_error" and not isinstance(error["input"], str):
        return message  # a section's or the whole's: it names keys and values itself
    if error["type"] == "too_short":
        return f"{key}={error['input']!r} is too short: give at least one"
    return f"{key}={error['input']!r}: {message[0].lower()}{message[1:]}"


def _section(location: Sequence[Any]) -> type[BaseModel]:
    section: Any = RunConfig
    for part in location:
        annotation = section.model_fields[part].annotation
        section = next(
            (a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)), None
        )
        if section is None:
            return RunConfig
    return section


def dump(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
