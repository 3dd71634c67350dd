# make run     set everything up, build the built-in model if it is not there, serve it on http://127.0.0.1:8000
#              make run ARGS="--port 9000"          passes options on to `moeflow serve`
# make test    everything that continuous integration runs: format, lint, types, architecture, all tests
# make quick   the tests that take no more than a second each, for daily work
# make test-all  the same as `make test`, and what is marked `thorough`: the CPU kernels under every instruction set that this processor
#              has and as every emulated one, all combinations of configurations and formats, long random runs
# make clean   remove the virtual environment and every tool's leftovers (the model cache stays)
#
# PYTHON=/path/to/python chooses the interpreter; otherwise the first Python 3.11 or newer on the PATH is taken.

SHELL := /bin/bash
ARGS ?=
# Where packages move, an installation that points to them has to be made again.
SETUP_INPUTS := pyproject.toml constraints.txt scripts/setup CMakeLists.txt $(wildcard csrc/* csrc/*/*) $(shell find moeflow -name __init__.py)

.PHONY: run test quick test-all check pytest clean

run: .venv/run.stamp
	@exec .venv/bin/moeflow serve $(ARGS)

# Side by side: types take one processor for as long as tests that wait leave it idle.
test: .venv/test.stamp
	@$(MAKE) --no-print-directory -j2 check pytest

check: .venv/test.stamp
	@VIRTUAL_ENV="$(CURDIR)/.venv" scripts/check

pytest: .venv/test.stamp
	@VIRTUAL_ENV="$(CURDIR)/.venv" scripts/test $(ARGS)

quick: .venv/test.stamp
	@VIRTUAL_ENV="$(CURDIR)/.venv" scripts/test -m "not slow and not browser and not weights" $(ARGS)

test-all: .venv/test.stamp
	@$(MAKE) --no-print-directory test ARGS="--thorough $(ARGS)"

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/run.stamp: $(SETUP_INPUTS)
	@PYTHON="$(PYTHON)" scripts/setup run

.venv/test.stamp: $(SETUP_INPUTS)
	@PYTHON="$(PYTHON)" scripts/setup test
