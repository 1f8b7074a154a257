"""Asynchronous reinforcement learning for visual web agents, on Megatron."""

__version__ = "0.1.0"
