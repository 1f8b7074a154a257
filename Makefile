.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench soak

BIN := .venv/bin

help: ## What can be done here
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' Makefile

setup: ## Everything the project needs, in .venv/ (some minutes once, then a second)
	@bash scripts/setup.sh

demo: ## The whole loop on real input, about 15 minutes: a picture of what was learned in runs/demo/
	@began=$$(date +%s); bash scripts/setup.sh && $(BIN)/megatron-webrl demo --setup-seconds $$(($$(date +%s) - began))

test: setup ## All tests: the fast ones, then those that drive the real engine, browser and trainer
	@bash scripts/test.sh

lint: setup ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup ## Every benchmark in benchmarks/ (after `make demo`, whose warm model they run)
	@for file in benchmarks/[a-z]*.py; do name=$$(basename $$file .py); \
		echo "== python -m benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

soak: setup ## Long runs under faults
	@if grep -rqs 'pytest.mark.soak' tests; then $(BIN)/python -m pytest -m soak; \
	else echo "soak: no test is marked soak yet"; fi
