# `make sft`, `make grpo` and `make vlm` train the examples, `make test` runs the whole suite; all set up .venv first.
# `make dropin` runs the scripts of examples/dropin in an environment with Lightning, Ray and TRL.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: sft grpo vlm test test-bare test-oldest dropin bench check format clean

$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	@echo "Setting up $(VENV) with torch and the rest: minutes, the first time, and nothing is shown meanwhile"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,dev,docs]'
	$(BIN)/pip install --quiet --no-deps -c constraints.txt trl  # its chat templates, for tests/chat
	touch $@

sft: $(VENV)/.installed
	$(BIN)/accelerate launch --quiet examples/sft.py $(ARGS)

grpo: $(VENV)/.installed
	$(BIN)/accelerate launch --quiet examples/grpo.py $(ARGS)

vlm: $(VENV)/.installed
	$(BIN)/accelerate launch --quiet examples/vlm_sft.py $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# torch and NumPy, and nothing else of what setup.cfg requires.
build/bare/.installed: constraints.txt
	$(PYTHON) -m venv build/bare
	build/bare/bin/pip install --quiet -c constraints.txt torch numpy
	touch $@

test-bare: build/bare/.installed
	build/bare/bin/python -m tests.bare_environment

# The lowest versions that setup.cfg promises; torch and what only tests use as in constraints.txt.
build/oldest/.installed: setup.cfg constraints.txt
	$(PYTHON) -m venv build/oldest
	sed -nE 's/^ +(numpy|datasets|transformers|accelerate)>=/\1==/p' setup.cfg > build/oldest/versions.txt
	grep -E '^(torch|torchdata|pyarrow|matplotlib|pillow|pytest|pytest-xdist|hypothesis|mypy)==' constraints.txt \
		>> build/oldest/versions.txt
	build/oldest/bin/pip install --quiet -c build/oldest/versions.txt -e '.[test,plots]'
	build/oldest/bin/pip install --quiet --no-deps -c constraints.txt trl
	touch $@

test-oldest: build/oldest/.installed
	build/oldest/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

build/dropin/.installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv build/dropin
	build/dropin/bin/pip install --quiet -c constraints.txt -e '.[test,dropin]'
	touch $@

dropin: build/dropin/.installed
	build/dropin/bin/python -m pytest tests/dropin $(ARGS)

# Peers in an environment of their own; the two with --no-deps would replace torch. axolotl packs in numba.
build/bench/.installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv build/bench
	build/bench/bin/pip install --quiet -c constraints.txt -e '.[bench]' numba
	build/bench/bin/pip install --quiet --no-deps -c constraints.txt axolotl skyrl
	touch $@

bench: build/bench/.installed
	for name in packing vision_plan collate loader rollout stream chat vision; do build/bench/bin/python benchmarks/bench_$$name.py $(ARGS) || exit 1; done

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) *.egg-info outputs .ruff_cache .mypy_cache
