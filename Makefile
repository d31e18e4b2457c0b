# One command each: `make demo`, `make test`. Everything goes into .venv (tests build the library
# beside its sources, too); nothing else on the machine is changed.
#
#   TORCH   what pip installs as torch. The default is a version on which taskd is tested; on a machine with an accelerator set
#           your own, for example  make test TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126"
#   PYTHON  the interpreter that the virtual environment is made from
#   TESTS   what pytest is given, for example  make test TESTS="tests/process -k kill_of_any_rank"
#   JOBS    how many processes run tests side by side
#   SEED    which of the extended tests `make test-slice` runs

PYTHON ?= python3
TORCH ?= torch==2.13.0
TESTS ?= tests
JOBS ?= 4
SEED ?= $(shell git rev-parse HEAD 2>/dev/null || date +%s)
SLICE_S ?= 120
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: all install demo test test-all test-slice unit native-check lint bench clean

all: install

# torch first and alone: the requirement of the package would otherwise pull in the registry's newest build.
$(VENV)/torch: Makefile
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip setuptools wheel "cython>=3"
	$(PY) -m pip install --quiet $(TORCH)
	$(PY) -m pip install --quiet numpy
	@touch $@

SOURCES := setup.py pyproject.toml $(shell find taskd csrc -name '*.py' -o -name '*.c' -o -name '*.h' -o -name '*.def' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.map')

$(VENV)/installed: $(VENV)/torch $(SOURCES)
	$(PY) -m pip install --quiet --no-build-isolation --force-reinstall --no-deps .
	$(PY) -m pip install --quiet "pyzmq>=25" "msgpack>=1"
	@touch $@

$(VENV)/tested: $(VENV)/installed
	$(PY) -m pip install --quiet "pytest<9.2" hypothesis pytest-timeout pytest-randomly pytest-xdist scikit-learn ruff mypy
	$(PY) -m pip install --quiet --no-deps torchdata==0.11.0     # its loader carries a position; --no-deps: torch is there, and the rest is not imported
	$(PY) setup.py --quiet build_ext --inplace
	@touch $@

install: $(VENV)/installed

demo: install
	$(PY) examples/demo.py

# Side by side, and what shares processes in one of them; see tests/lanes.py.
PYTEST = $(PY) -m pytest -n $(JOBS) --dist loadgroup

test: $(VENV)/tested
	$(PYTEST) -m "not extended and not gpu" $(TESTS)

test-all: $(VENV)/tested
	$(PYTEST) -m "not gpu" $(TESTS)

# Extended tests that SEED chooses, for SLICE_S seconds.
test-slice: $(VENV)/tested
	$(PYTEST) -p no:randomly --slice "$(SEED)" --slice-seconds $(SLICE_S) $(TESTS)

unit: $(VENV)/tested
	$(PY) -m pytest tests/unit/core tests/unit/wire tests/unit/checkpoint tests/simulation -m "not extended"

# The C code under sanitizers and valgrind, as far as they are installed.
native-check:
	sh tests/native/c/check.sh

lint: $(VENV)/tested
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

bench: install
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
	$(PY) benchmarks/marks.py
	$(PY) benchmarks/hangs.py

clean:
	rm -rf $(VENV) build dist *.egg-info
