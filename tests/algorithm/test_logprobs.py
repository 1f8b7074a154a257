"""Logprobs from logits against torch's own log_softmax."""

from __future__ import annotations

import torch

from megatron_webrl.algorithm import logprobs_from_logits


def test_value_gradient_and_entropy() -> None:
    """Temperature, banned tokens at −inf, gradient and entropy are those of log_softmax."""
    torch.manual_seed(0)
    logits = torch.randn(7, 33, requires_grad=True)
    banned = torch.zeros(33, dtype=torch.bool)
    banned[[0, 5, 32]] = True
    targets = torch.tensor([1, 2, 3, 4, 6, 31, 7])
    logp, entropy = logprobs_from_logits(logits, targets, banned, temperature=0.7, entropy=True)
    reference = (logits / 0.7).masked_fill(banned, float("-inf")).log_softmax(-1)
    torch.testing.assert_close(logp, reference.gather(1, targets[:, None]).squeeze(1))
    p = reference.exp()
    torch.testing.assert_close(entropy, -(p * reference.masked_fill(banned, 0.0)).sum(-1).detach())
    weights = torch.randn(7)
    (expected,) = torch.autograd.grad((reference.gather(1, targets[:, None]).squeeze(1) * weights).sum(), logits)
    (got,) = torch.autograd.grad((logp * weights).sum(), logits)
    torch.testing.assert_close(got, expected)


def test_no_tokens() -> None:
    """A rank without response tokens gets empty tensors and zero gradients."""
    logits = torch.zeros(0, 8, requires_grad=True)
    logp, _ = logprobs_from_logits(logits, torch.zeros(0, dtype=torch.long), torch.zeros(8, dtype=torch.bool))
    assert logp.shape == (0,)
    logp.sum().backward()
    assert logits.grad is not None and logits.grad.shape == (0, 8)
