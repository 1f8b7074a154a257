.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench soak

BIN := .venv/bin

help: ## What can be done here
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' Makefile

setup: ## Everything the project needs, in .venv/ (about 4 minutes once, then a second)
	@bash scripts/setup.sh

demo: setup ## The whole loop on real input, about 15 minutes: a picture of what was learned in runs/demo/
	@$(BIN)/megatron-webrl demo

test: setup ## All tests: the fast ones, then those that drive the real engine, browser and trainer
	@bash scripts/test.sh

lint: setup ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup ## Every benchmark in benchmarks/
	@if ls benchmarks/*.py >/dev/null 2>&1; then \
		for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done; \
	else echo "bench: there is no benchmark in benchmarks/ yet"; fi

soak: setup ## Long runs under faults
	@if grep -rqs 'pytest.mark.soak' tests; then $(BIN)/python -m pytest -m soak; \
	else echo "soak: no test is marked soak yet"; fi
