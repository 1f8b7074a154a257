"""The web agent: prompt, reply, episode, demonstrations, and the worker process with its slots."""

from megatron_webrl.agent.demonstrate import (
    Sample,
    check_scripts,
    collect_samples,
    demonstrate,
    load_demonstrations,
    save_demonstrations,
    tokenizer_texts,
)
from megatron_webrl.agent.endpoint import check_endpoint
from megatron_webrl.agent.episode import EpisodeResult, run_episode
from megatron_webrl.agent.generate import Generate
from megatron_webrl.agent.prompt import PastStep, Told, build_prompt, fit_prompt, system_prompt
from megatron_webrl.agent.reply import MalformedReply, Reply, check_stop, format_call, parse_reply
from megatron_webrl.agent.scripted import ScriptedPolicy
from megatron_webrl.agent.worker import BrowserWorker

__all__ = [
    "BrowserWorker",
    "EpisodeResult",
    "Generate",
    "MalformedReply",
    "PastStep",
    "Reply",
    "Sample",
    "ScriptedPolicy",
    "Told",
    "build_prompt",
    "check_endpoint",
    "check_scripts",
    "check_stop",
    "collect_samples",
    "demonstrate",
    "fit_prompt",
    "format_call",
    "load_demonstrations",
    "parse_reply",
    "run_episode",
    "save_demonstrations",
    "system_prompt",
    "tokenizer_texts",
]
