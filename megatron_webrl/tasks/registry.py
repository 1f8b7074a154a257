"""Which environment `tasks.environment` names."""

from __future__ import annotations

import importlib
from typing import Any

from megatron_webrl.config import RunConfig
from megatron_webrl.errors import UserError
from megatron_webrl.tasks.environment import Environment
from megatron_webrl.tasks.miniwob import MiniWob
from megatron_webrl.tasks.webgym import ENVIRONMENT as WEBGYM
from megatron_webrl.tasks.webgym import WebGym


def make_environment(config: RunConfig) -> Environment:
    """The environment that `tasks.environment` names.  Raises UserError if there is none."""
    return _kind(config)(config)


def check_environment(config: RunConfig) -> None:
    """Raises UserError if `tasks.environment` names none, or if it cannot run `tasks` (its `check`, if it has one)."""
    kind = _kind(config)
    if check := getattr(kind, "check", None):
        check(config)


def _kind(config: RunConfig) -> Any:
    name = config.tasks.environment
    if name in (built_in := {"miniwob": MiniWob, WEBGYM: WebGym}):
        return built_in[name]
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"tasks.environment={name!r} is neither miniwob nor webgym nor a class that can be imported ({error}): give it as "
            "module:Class, with the module on PYTHONPATH"
        ) from None
