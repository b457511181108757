# make train   install into .venv and train a small GPT in FP8 (tensor parallel over two CPU processes)
# make test    install everything the tests need, lint, run the suite (WORKERS=4 processes)
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
CONFIG ?= examples/configs/tiny_gpt_cpu.yaml
RANKS  ?= 2
WORKERS ?= 4
ARGS   ?=
SEED   ?= $(START)

PY  := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check -c requirements/constraints.txt
REQ := setup.py requirements/constraints.txt

.PHONY: help docs train test test-quick .slurm test-slurm .browser .arm test-browser test-long lint format bench gpu-check gpu-bench gpu-wheels clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(VENV)/.train ## train a small GPT in FP8; options: ARGS="--model.fp8_format=mxfp8" CONFIG=... RANKS=...
	$(VENV)/bin/megatron-fp8 launch --ranks $(RANKS) train --config $(CONFIG) $(ARGS)
	@echo "      first, for your shell to find megatron-fp8: source $(VENV)/bin/activate"

# pytest-xdist: whole files go to one of several processes, the longest first (tests/support/order.py). Each has its own ranks.
# More processes than cores, since ranks that start, launchers and SLURM wait much of their time.
# Idle OpenMP threads do not spin. A process that dies ends the run: pytest-xdist would wait for its tests without an end.
# Bytecode is written, whatever the environment says: else each process compiles all files of tests and of the package.
SUITE := PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0 --durations=20
START := $(shell date +%s)

# mypy takes one core 40 seconds without its cache: beside the first tests; what it found is said after the last.
test: $(VENV)/.test .slurm .browser .arm ## install everything the tests need, lint, run the suite
	$(RUFF)
	@$(PY) -m mypy >$(VENV)/.mypy.log 2>&1 & mypy=$$!; \
	$(SUITE) -m "not long$$($(SLURM_HERE) || echo ' and not slurm')$$($(BROWSER_HERE) || echo ' and not browser')" $(ARGS); \
	suite=$$?; wait $$mypy; mypy=$$?; cat $(VENV)/.mypy.log; test $$suite = 0 && test $$mypy = 0
	@$(SLURM_HERE) || echo "The tests of SLURM DID NOT RUN: see above, before pytest's first line."
	@$(ARM_HERE) || echo "The tests of the kernels on Arm DID NOT RUN: see above, before pytest's first line."
	@$(BROWSER_HERE) || echo "The tests in a browser DID NOT RUN: see above, before pytest's first line."
	@echo "make test took $$(( $$(date +%s) - $(START) )) s. Without installation it takes about 650 s on two cores of a Zen 4."

test-quick: $(VENV)/.test ## the unit tests but the slowest, for daily work
	$(SUITE) --quick tests/unit $(ARGS)

test-slurm: $(VENV)/.test .slurm ## the SLURM scripts on a real two-node cluster on this machine (as root, on Debian)
	@if $(SLURM_HERE); then $(PY) -m pytest -m slurm tests/functional/test_slurm.py; fi

SLURM_HERE := test "$$(id -u)" = 0 && $(PY) -m tests.support.slurm_cluster
.slurm: $(VENV)/.test
	@if test "$$(id -u)" != 0; then \
		echo "The tests of SLURM DO NOT RUN: starting a SLURM cluster needs root"; \
	elif ! { $(SLURM_HERE) || { command -v apt-get >/dev/null && apt-get -qq update \
			&& DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends slurm-wlm munge >/dev/null \
			&& $(SLURM_HERE); }; }; then \
		echo "The tests of SLURM DO NOT RUN: they need Debian's packages slurm-wlm and munge, which could not be installed"; \
	fi

test-browser: $(VENV)/.test .browser ## the report of runs, driven in a real Chromium
	@if $(BROWSER_HERE); then $(PY) -m pytest -m browser tests/functional/test_report_page.py tests/functional/test_docs_pages.py; fi

BROWSER_HERE := $(PY) -m tests.support.browser
.browser: $(VENV)/.test
	@if ! { $(BROWSER_HERE) || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get -qq update \
			&& DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium chromium-driver >/dev/null \
			&& $(BROWSER_HERE); }; }; then \
		echo "The tests in a browser DO NOT RUN: they need Debian's packages chromium and chromium-driver, which could not be installed"; \
	fi

ARM_HERE := command -v qemu-aarch64 >/dev/null && command -v aarch64-linux-gnu-gcc >/dev/null
.arm:
	@if ! { { $(ARM_HERE); } || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get -qq update \
			&& DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
				gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user >/dev/null && $(ARM_HERE); }; }; then \
		echo "The tests of the kernels on Arm DO NOT RUN: they need Debian's packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user"; \
	fi

# Each of these has a small case in make test: hypothesis with a twentieth of the inputs, values drawn from all that are
# tried here, two kills (tests/functional/test_kills.py), three faults in a short run (tests/functional/test_soak.py), two
# models (tests/functional/test_hf_specified.py), two planted faults of twenty, some layouts and recipes of each test
# (tests/support/long_cases.py).
# SEED draws the same inputs again, with the same hypothesis, tests and DRAWS_TIMES.
test-long: $(VENV)/.test .arm ## every nonsense value of every option, 20 times the drawn inputs and the fuzzing, every layout and estimate, 20 planted faults, 20 kills, 2,000 disturbed iterations, transformers' own tests (network)
	DRAWS_TIMES=20 $(SUITE) -m "long or draws" --timeout 3600 --hypothesis-seed=$(SEED) $(ARGS); \
	suite=$$?; echo "Inputs were drawn with seed $(SEED): make test-long SEED=$(SEED) draws them again."; exit $$suite
	$(PY) -m benchmarks.kills --kills 20
	$(PY) -m benchmarks.soak
	$(PY) -m benchmarks.transformers_tests

RUFF := $(PY) -m ruff check . && $(PY) -m ruff format --check .
lint: $(VENV)/.test ## ruff (rules and formatting) and mypy
	$(RUFF)
	$(PY) -m mypy

format: $(VENV)/.test ## let ruff fix and format every file
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(VENV)/.test ## the documentation as a site, into site/, without a network; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict --clean
	@echo "site/index.html"

bench: $(VENV)/.test ## CPU benchmarks against BF16 and the installed peers
	$(PY) benchmarks/cast.py $(ARGS)
	$(PY) benchmarks/step.py $(ARGS)
	$(PY) benchmarks/state.py $(ARGS)
	$(PY) benchmarks/telemetry.py $(ARGS)

# On a GPU machine, with its own Python that has torch and Triton; what was carried in wheels/ is used, nothing is fetched.
# DRY=1: the same on any machine, small, in the environment of make test where that is.
GPU_PYTHON ?= $(if $(and $(DRY),$(wildcard $(VENV)/.train)),$(PY),python3)
GPU_TARGET ?= 3.12
GPU_ARCH ?= x86_64
GPU_ENV = PYTHONPATH=$(if $(DRY),,.gpu-site:).
GPU_ARGS = $(if $(DRY),--dry-run) $(ARGS)

gpu-check: $(if $(DRY),,.gpu-site) ## on a GPU machine: is native FP8 right there? (ARGS="--resume", DRY=1 on any machine)
	$(GPU_ENV) $(GPU_PYTHON) -m benchmarks.gpu_check $(GPU_ARGS)

gpu-bench: $(if $(DRY),,.gpu-site) ## on a GPU machine: how fast is it, against BF16 and whoever is installed?
	$(GPU_ENV) $(GPU_PYTHON) -m benchmarks.gpu_bench $(GPU_ARGS)

GPU_PIP = $(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: -d wheels \
	--python-version $(GPU_TARGET) --implementation cp \
	$(foreach libc,manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014,--platform $(libc)_$(GPU_ARCH))
gpu-wheels: ## with network: download into wheels/ what a GPU machine without network lacks (GPU_TARGET, GPU_ARCH)
	mkdir -p wheels
	$(GPU_PIP) -c requirements/constraints.txt megatron-core einops docstring-parser torchao
	$(GPU_PIP) numpy packaging PyYAML # not by constraints: their markers ask this Python, not the other one
	@ls -sh wheels

.gpu-site: $(wildcard wheels/*.whl)
	rm -rf $@
	mkdir -p $@
	$(GPU_PYTHON) -m benchmarks.gpu_site $@ $^

clean: ## remove the environment and every cache
	rm -rf $(VENV) .gpu-site build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp is touched last, so an interrupted install is simply done again.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "error: $(PYTHON) must be Python 3.10 or newer; try: make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
		|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
			&& apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y python3-venv; } \
		|| { echo "error: $(PYTHON) has no venv module; on Debian or Ubuntu: sudo apt-get install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

# torch is named in every resolve: one that left it out might replace it, and download gigabytes again.
$(VENV)/.train: $(VENV)/.made $(REQ)
	$(PIP) "$(TORCH)" -e .
	touch $@

$(VENV)/.test: $(VENV)/.train $(REQ)
	@command -v $${CC:-cc} >/dev/null \
		|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
			&& apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y gcc libc6-dev; } \
		|| { echo "error: the tests of the compiled kernels need a C compiler; on Debian: sudo apt-get install gcc" >&2; exit 2; }
	$(PIP) "$(TORCH)" -e ".[test,docs]"
	touch $@
