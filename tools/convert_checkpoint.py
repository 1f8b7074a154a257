"""Weights between Hugging Face and Megatron: `megatron-webrl convert` by another name."""

import sys

from megatron_webrl.cli import main

if __name__ == "__main__":
    main(["convert", *sys.argv[1:]])
