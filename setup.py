"""Package metadata.  The requirements themselves are in requirements/, where scripts/setup.sh reads them too."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def requirements(name: str) -> list[str]:
    lines = (
        line.partition("#")[0].strip() for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    )
    return [line for line in lines if line]


def version() -> str:
    found = re.search(r'__version__ = "(.+)"', (ROOT / "megatron_webrl" / "__init__.py").read_text())
    assert found
    return found[1]


setup(
    name="megatron_webrl",
    version=version(),
    description="Asynchronous reinforcement learning for visual web agents, on Megatron",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12,<3.14",
    packages=find_packages(include=["megatron_webrl", "megatron_webrl.*"]),
    package_data={"megatron_webrl": ["engine/standin/**/*"]},
    install_requires=requirements("main"),
    extras_require={
        "gpu": requirements("gpu"),
        "cpu-engine": requirements("sglang-cpu"),
        "dev": requirements("dev"),
    },
    entry_points={"console_scripts": ["megatron-webrl = megatron_webrl.cli:main"]},
)
