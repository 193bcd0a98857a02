# `make sft`, `make dpo`, `make grpo`, `make vlm` and `make encoder` train the examples, `make notebooks` executes
# the notebooks and writes their outputs, `make test` runs the whole suite; all set up .venv first.
# `make dropin` runs the scripts of examples/dropin in an environment with Lightning, Ray and TRL.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: venv sft dpo grpo vlm encoder kills chains notebooks test test-bare test-oldest test-newest test-sdist dropin dist why bench gpu docs check format clean

# Launched once per GPU, or once on a CPU; all options are given, or the launcher prints a page about its defaults.
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)
RANKS := $(if $(filter 0 1,$(GPUS)),1,$(GPUS) --multi_gpu)
LAUNCH := $(BIN)/accelerate launch --quiet --num_machines 1 --mixed_precision no --dynamo_backend no --num_processes $(RANKS)

# `. .venv/bin/activate` then makes `python` the one with everything.
venv: $(VENV)/.installed

$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	@echo "Setting up $(VENV) with torch and the rest: minutes, the first time, and nothing is shown meanwhile"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[test,dev,docs]'
	$(BIN)/pip install --quiet --no-deps -c constraints.txt trl  # its chat templates, for tests/chat
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # pip does it on one core; templates fail
	touch $@

sft: $(VENV)/.installed
	$(LAUNCH) examples/sft.py $(ARGS)

dpo: $(VENV)/.installed
	$(LAUNCH) examples/preference.py $(ARGS)

grpo: $(VENV)/.installed
	$(LAUNCH) examples/grpo.py $(ARGS)

vlm: $(VENV)/.installed
	$(LAUNCH) examples/vlm_sft.py $(ARGS)

encoder: $(VENV)/.installed
	$(BIN)/python examples/encoder.py $(ARGS)

# Before a release: the tests that take long, on up to four ranks, and two-rank runs of sft.py that are
# killed twenty times, half of them while they save, and resumed.
kills: $(VENV)/.installed
	$(BIN)/python -m pytest -m release
	$(BIN)/python -m tests.examples.kills $(ARGS)

# Before a release: random chains of runs that stop, resume and change their ranks, against plain Python.
chains: $(VENV)/.installed
	$(BIN)/python -m tests.loading.chains --chains 1000 --with-workers 10 $(ARGS)

# One of them: make notebooks ARGS=notebooks/02_packing.ipynb
notebooks: $(VENV)/.installed
	$(BIN)/python notebooks/execute.py $(ARGS)

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
# With another interpreter, in an environment of its own: make test-oldest PYTHON=python3.12
OLDEST := build/oldest-$(notdir $(PYTHON))
$(OLDEST)/.installed: setup.cfg constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	sed -nE 's/^ +(numpy|datasets|transformers|accelerate)>=/\1==/p' setup.cfg > $(OLDEST)/versions.txt
	grep -E '^(torch|torchdata|pyarrow|matplotlib|pillow|pytest|pytest-xdist|hypothesis|mypy)==' constraints.txt \
		>> $(OLDEST)/versions.txt
	$(OLDEST)/bin/pip install --quiet -c $(OLDEST)/versions.txt -e '.[test,plots]'
	$(OLDEST)/bin/pip install --quiet --no-deps -c constraints.txt trl
	touch $@

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

# The newest versions that pip installs: nothing is pinned, so an environment that is there is updated.
NEWEST := build/newest-$(notdir $(PYTHON))
test-newest:
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --upgrade --upgrade-strategy eager -e '.[test,plots]'
	$(NEWEST)/bin/pip install --quiet --upgrade --no-deps trl
	$(NEWEST)/bin/pip list | grep -iE '^(torch|transformers|accelerate|datasets|numpy|peft) '
	$(NEWEST)/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

# A source archive and a wheel made from it, in dist/.
dist: $(VENV)/.installed
	$(BIN)/python -m build --no-isolation

# What a stranger has: the archive alone, unpacked and installed in a new environment, and its own tests there.
test-sdist: dist constraints.txt
	rm -rf build/sdist && mkdir -p build/sdist
	tar -xzf dist/torch_collate_kit-*.tar.gz -C build/sdist --strip-components 1
	$(PYTHON) -m venv build/sdist/.venv
	cd build/sdist && .venv/bin/pip install --quiet -c constraints.txt '.[test]'
	cd build/sdist && .venv/bin/pip install --quiet --no-deps -c constraints.txt trl
	cd build/sdist && .venv/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

build/dropin/.installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv build/dropin
	build/dropin/bin/pip install --quiet -c constraints.txt -e '.[test,dropin]'
	touch $@

dropin: build/dropin/.installed
	build/dropin/bin/python -m pytest -m "" tests/dropin $(ARGS)

# Peers in an environment of their own; the two with --no-deps would replace torch. axolotl packs in numba.
build/bench/.installed: setup.cfg pyproject.toml constraints.txt
	@echo "Setting up build/bench with TRL, axolotl and SkyRL: minutes, the first time, and nothing is shown meanwhile"
	$(PYTHON) -m venv build/bench
	build/bench/bin/pip install --quiet -c constraints.txt -e '.[bench]' numba
	build/bench/bin/pip install --quiet --no-deps -c constraints.txt axolotl skyrl
	touch $@

why: build/bench/.installed
	build/bench/bin/python benchmarks/why.py $(ARGS)

bench: build/bench/.installed
	for name in sources shapes packing balance steps vision_plan collate loader rollout skyrl stream hybrids encoders preference trees windows agents context chat vision scale elastic audit; do build/bench/bin/python benchmarks/bench_$$name.py $(ARGS) || exit 1; done
	build/bench/bin/python benchmarks/pages.py

# On a machine with a CUDA GPU, in .venv if it is there, else with its own Python: it installs nothing.
# Nine minutes at a time; what is measured already is skipped. One part: make gpu ARGS="--parts correctness"
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu/run.py $(ARGS)

# The site: build/site/index.html. Any warning fails.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/site/index.html; the search works from disk, too"

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) *.egg-info dist outputs .ruff_cache .mypy_cache
