"""`python -m megatron_webrl` is `megatron-webrl`."""

from megatron_webrl.cli import main

main()
