"""Engine hosts, their SGLang servers, and the client that generates on them."""

from megatron_webrl.engine.client import EngineUnreachable, GenerationClient
from megatron_webrl.engine.host import EngineHost
from megatron_webrl.engine.sglang_server import SglangError, check_port

__all__ = ["EngineHost", "EngineUnreachable", "GenerationClient", "SglangError", "check_port"]
