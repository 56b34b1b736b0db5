# `make` lists the targets. PYTHON=… chooses another interpreter, PYTEST_ARGS=… goes to pytest, in
# WORKERS=6 processes: most tests wait some of the time. The long ones compute, in JOBS=2.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
LINTS := lint-ruff lint-format lint-mypy lint-imports
.PHONY: help setup test test-long test-sample nightly gate-proof test-alone chaos chaos-real deploy-test net-test fuzz lint $(LINTS) format demo docs docs-web docs-sentences comparison recording bench bench-guard bench-peers energy theory golden lock clean
PYTHON ?=
PYTEST_ARGS ?=
WORKERS ?= 6
CASES ?= tests/theory/cases.json
OUT ?= build/theory.json
BUDGET_S ?= 600
TIMES ?= 20
TESTS ?= tests
FUZZ_SECONDS ?= 60
FUZZ_TARGET ?=
FUZZ_RUNS ?= 0
SEEDS ?= 60
FIRST ?= 1
NODES ?= 3-7
MINUTES ?= 5
JOBS ?= 2
export PYTHON
# What is compiled is kept: agents start by the hundred.
unexport PYTHONDONTWRITEBYTECODE

# A strict editable install links each file, so the list of files is part of what is installed.
FILES := $(shell find peerload policies -type f ! -name '*.pyc' | LC_ALL=C sort)
INSTALLED := .venv/installed-$(firstword $(shell printf '%s\n' $(FILES) | cksum))

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

setup: $(INSTALLED)  ## make .venv with .venv/bin/peerload, for development too

.venv/requirements: .ci/requirements.txt
	@.ci/setup requirements
	@touch $@

$(INSTALLED): .venv/requirements pyproject.toml .ci/setup
	@.ci/setup project
	@rm -f .venv/installed-*
	@touch $@

test: setup  ## the gate: lint beside the tests that every change has to pass (PYTEST_ARGS='-k lease -x')
	.venv/bin/python -m pytest -p tests.gate -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-long: setup  ## the soak, chaos, property, model, fidelity and timing tests, up to an hour
	FORKS=0 .venv/bin/python -m pytest -m 'long and not timed' -n $(JOBS) --dist worksteal $(PYTEST_ARGS) tests
	FORKS=0 .venv/bin/python -m pytest -m 'long and timed' $(PYTEST_ARGS) tests
	$(MAKE) --no-print-directory bench-guard

test-sample: setup  ## the fixed part of `make test-long` that .ci/run plays: 40 chaos seeds, theory, one kill -9 campaign
	.venv/bin/python -m pytest -m 'long and sample' -n $(JOBS) --dist worksteal $(PYTEST_ARGS) tests

nightly: test-long  ## `make test-long`, then 2,000 chaos seeds, every broken variant, and a minute for each fuzz target
	$(MAKE) --no-print-directory chaos SEEDS=2000
	.venv/bin/python -m tests.chaos.hunt
	$(MAKE) --no-print-directory fuzz

gate-proof: lint  ## the gate TIMES=20 times in a row beside a busy loop on each core
	@.venv/bin/python -m tests.gate_proof --times $(TIMES) -- -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-alone: setup  ## each test file by itself, in random order (TESTS="tests/core tests/wire" SEED=1 JOBS=2)
	@.venv/bin/python -m tests.alone $(if $(SEED),--seed $(SEED)) --jobs $(JOBS) $(TESTS)

lint: setup  ## ruff, mypy --strict and the layers, side by side
	@$(MAKE) --no-print-directory --keep-going -j$(words $(LINTS)) -Otarget $(LINTS)

$(LINTS): setup
lint-ruff:
	.venv/bin/ruff check
lint-format:
	.venv/bin/ruff format --check
lint-mypy:
	.venv/bin/mypy
lint-imports:
	.venv/bin/lint-imports
	.venv/bin/lint-imports --config .ci/layers.toml --cache-dir .import_linter_cache/layers

format: setup  ## lay the code out as lint wants it
	.venv/bin/ruff check --fix && .venv/bin/ruff format

chaos: setup  ## the cluster under faults, simulated (SEEDS=500 FIRST=1 NODES=3-7 MINUTES=5 JOBS=2; SEED=7 TRACE=1 or PLAN=1 for one)
	@.venv/bin/python -m tests.chaos.run --seeds $(SEEDS) --first $(FIRST) --nodes $(NODES) --minutes $(MINUTES) \
		--jobs $(JOBS) $(if $(SEED),--seed $(SEED)) $(if $(TRACE),--trace) $(if $(PLAN),--plan) $(if $(GAUGES),--gauges)

docs: setup  ## write what is generated in docs/: usage and flags of cli.md, the picture of top
	@.venv/bin/python -m tests.docs_cli --write
	@.venv/bin/python -m tests.docs_top

docs-web: setup  ## write docs/web.png, the picture of the web page (PICTURES=DIRECTORY: also narrow and dark)
	@.venv/bin/python -m tests.docs_web $(PICTURES)

comparison: setup  ## measure every preset and baseline, in about 50 minutes of processor time: docs/comparison.md and its figure (SCALE=400 JOBS=2 COMPARE_S=600)
	@.venv/bin/python -m tests.comparison --jobs $(JOBS) $(if $(SCALE),--scale $(SCALE)) $(if $(COMPARE_S),--budget-s $(COMPARE_S))

docs-sentences: setup  ## list sentences of the user pages that begin with a relative clause, to be read
	@.venv/bin/python -m tests.docs_sentences

recording: setup  ## what README.md shows, typed at a real terminal again
	@.venv/bin/python -m tests.recording

demo: setup  ## three agents and a broker on this machine, sharing real commands
	.venv/bin/peerload demo

bench: setup  ## measure, on a quiet machine
	@for bench in cli latency throughput queue handoff tls spread idle idle_while_waiting sim gpu mixed why map top web ls kept run_stream revoke files; do .venv/bin/python tests/bench/bench_$$bench.py; done

bench-guard: setup  ## compare counts and processor time, not elapsed time, with tests/bench/guard.json; RECORD=1 records them
	@.venv/bin/python tests/bench/bench_guard.py $(if $(RECORD),--record)

bench-peers: setup  ## the same work beside task-spooler, GNU parallel, HyperQueue, Dask, Ray, Celery and jobd (TOOLS=DIRECTORY keeps them)
	@.venv/bin/python tests/bench/bench_peers.py $(if $(TOOLS),--tools $(TOOLS))

energy: CASES = tests/energy/cases.json
energy: OUT = build/energy.json
energy: setup  ## play energy cases (CASES=FILE OUT=FILE): case, run, result
	@mkdir -p $(dir $(OUT)) && .venv/bin/peerload sim --energy $(CASES) --json > $(OUT)
	@.venv/bin/python -c "import json, sys; path = sys.argv[1]; found = json.load(open(path)); del found['v']; json.dump(found, open(path, 'w'))" $(OUT)

theory: setup  ## hold the simulator against reference cases (CASES=FILE OUT=FILE BUDGET_S=600)
	.venv/bin/python -m tests.theory.run --cases $(CASES) --out $(OUT) --budget-s $(BUDGET_S)

deploy-test: setup  ## install, use, upgrade and remove it on a machine of its own with systemd, in QEMU, as root
	@.venv/bin/python -m tests.deploy.run

chaos-real: setup  ## real processes, networks and faults, as root (TASKS=20000 FAULTS=400 SECONDS=600 SEED=1)
	.venv/bin/python -m tests.chaos_real.run $(foreach word,TASKS FAULTS SECONDS SEED,\
		$(if $($(word)),--$(shell echo $(word) | tr A-Z a-z) $($(word))))

net-test: setup  ## real agents on networks of every bad kind, as root: NAT, firewalls, tunnels, loss (ONLY="NAT UDP" JOBS=2)
	.venv/bin/python -m tests.net.run $(if $(ONLY),--only $(ONLY)) --jobs $(JOBS)

fuzz: setup  ## look for bytes that a decoder does not survive (FUZZ_SECONDS=60 each or FUZZ_RUNS=1000000, FUZZ_TARGET=name)
	.venv/bin/python -m pip install --quiet --disable-pip-version-check 'atheris>=3,<4'
	.venv/bin/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS) --runs $(FUZZ_RUNS) --target '$(FUZZ_TARGET)'

golden: setup  ## compare behaviour with the recorded state, before and after code is moved or renamed (RECORD=1 records it, ONLY="wires help")
	@.venv/bin/python -m tests.golden.run --jobs $(JOBS) $(if $(RECORD),--record) $(addprefix --only ,$(ONLY))

lock:  ## choose and pin the newest allowed versions of everything, with hashes
	.ci/lock

clean:  ## remove all that make made
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
