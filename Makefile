# A fresh clone needs `make serve` or `make test`, nothing else.
#   make setup            create .venv with all that serving needs
#   make serve ARGS=...   serve the default model, or what ARGS says (see headrace serve --help)
#   make test             everything CI runs
#   make model            fetch the default model into the user's cache folder
#   make bench ARGS=...   closed-loop load on a server of its own
#   make clean            remove all that make created here

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
ENGINE := $(VENV)/.installed-engine
DEV := $(VENV)/.installed-dev
MODEL := smollm2-135m-instruct
ARGS ?=
# An interpreter of your choice; else the first of these that is new enough.
PYTHON ?=
PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python)

# Runs pip, shows what it downloads, keeps the rest in a log that is printed when it fails.
define pip_install
	$(BIN)/python -m pip --disable-pip-version-check --no-input install --progress-bar off \
		--constraint constraints.txt $(1) 2>&1 </dev/null | tee $(VENV)/setup.log \
		| awk '/^ *Downloading .*\(/ { sub(/^ */, "    "); print; fflush() }' \
		|| { tail -n 40 $(VENV)/setup.log; echo "setup failed: see $(VENV)/setup.log" >&2; exit 1; }
endef

.PHONY: help setup serve test lint model bench clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(ENGINE)

serve: $(ENGINE)
	@exec $(BIN)/headrace serve $(ARGS)

# The checks run in this order whatever -j says, and the first failure is the result.
test: $(DEV)
	@$(BIN)/headrace models pull $(MODEL)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest $(ARGS)

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

model: $(ENGINE)
	@$(BIN)/headrace models pull $(MODEL)

bench: $(DEV)
	@test -f benchmarks/closed_loop.py || { echo "there is no benchmarks/closed_loop.py" >&2; exit 1; }
	$(BIN)/python benchmarks/closed_loop.py $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@for python in $(PYTHONS); do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
			echo "==> $(VENV): $$("$$python" --version)" >&2; \
			"$$python" -m venv --clear $(VENV) && exit 0; \
			echo "setup failed: $$python cannot create a virtual environment" \
				"(on Debian: apt install python3-venv)" >&2; \
			exit 1; \
		fi; \
	done; \
	echo "setup failed: Headrace needs Python 3.11 or newer, and none of '$(PYTHONS)' is;" \
		"install one, or name it: make PYTHON=/path/to/python3" >&2; \
	exit 1

$(ENGINE): pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> installing Headrace and its engine (torch is large; some minutes the first time)" >&2
	@$(call pip_install,hatchling editables)
	@$(call pip_install,--no-build-isolation --editable '.[engine]')
	@touch $@

$(DEV): $(ENGINE)
	@echo "==> installing what the tests need" >&2
	@$(call pip_install,--no-build-isolation --editable '.[dev]')
	@touch $@
