"""The objective: advantages, the surrogate and logprobs.  Pure torch and numpy; knows no Megatron."""

from megatron_webrl.algorithm.advantages import normalize_group_rewards, step_advantage
from megatron_webrl.algorithm.logprobs import logprobs_from_logits
from megatron_webrl.algorithm.surrogate import Surrogate, surrogate

__all__ = ["Surrogate", "logprobs_from_logits", "normalize_group_rewards", "step_advantage", "surrogate"]
