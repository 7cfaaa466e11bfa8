# Everything runs in virtual environments that are made here; nothing else needs to be installed first.
#   make demo        daemon, two vLLM servers, conversations that alternate between them
#   make test        all tests that this machine can run without a GPU
#   make test-fast   those that need neither vLLM nor a daemon process
#   make lint type   what pre-commit checks          make fmt    reformat
#   make sanitize    the kernels under compute-sanitizer, on a Hopper GPU
#   make proto       regenerate the gRPC stubs       make clean  remove what was made here
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON     ?= python3.11
VENV       ?= .venv
PROTO_VENV ?= .venv-proto
BIN        := $(VENV)/bin
FOLDERS    := kernels cache_service connector calibration cli tests proto examples benchmarks

# the folders kernels/ and proto/ would shadow other packages for a Python that is started here
export PYTHONSAFEPATH := 1
export PROTOC_PYTHON  := $(abspath $(PROTO_VENV))/bin/python
export VLLM_NO_USAGE_STATS := 1
export HF_HUB_OFFLINE := 1

.PHONY: setup demo test test-fast lint type fmt sanitize proto build clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt scripts/make_venv.sh
	scripts/make_venv.sh $(PYTHON) $(VENV)

$(PROTO_VENV)/.ready:
	@echo "installing protoc into $(PROTO_VENV)"
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/pip install --quiet --disable-pip-version-check grpcio-tools==1.76.0
	touch $@

demo: $(VENV)/.ready
	$(BIN)/mapflow demo

test: $(VENV)/.ready $(PROTO_VENV)/.ready lint type
	$(BIN)/pytest -m "not gpu"

test-fast: $(VENV)/.ready
	$(BIN)/pytest

lint: $(VENV)/.ready
	$(BIN)/ruff check $(FOLDERS)
	$(BIN)/ruff format --check $(FOLDERS)

type: $(VENV)/.ready .typing
	$(BIN)/mypy -p mapflow

fmt: $(VENV)/.ready
	$(BIN)/ruff check --fix $(FOLDERS)
	$(BIN)/ruff format $(FOLDERS)

# mypy finds the namespace package through links: the folders' names on disk are not their import names
.typing:
	mkdir -p .typing/mapflow
	ln -sfn ../../proto/mapflow/v1 .typing/mapflow/v1
	for folder in kernels cache_service connector calibration cli; do ln -sfn ../../$$folder .typing/mapflow/$$folder; done

# the environment at hand is taken: a GPU's needs another torch than the one that is made here
sanitize:
	compute-sanitizer --tool memcheck --error-exitcode 1 \
	  python3 -m pytest -m gpu tests/kernels/triton/test_hopper.py tests/kernels/triton/test_warm_up.py
	@# of a warp-specialised kernel racecheck reports Triton's own hand-over of roles, which named barriers order
	compute-sanitizer --tool racecheck --error-exitcode 1 --kernel-name-exclude kernel_substring=hopper_kernel \
	  python3 -m pytest -m gpu tests/kernels/triton/test_warm_up.py

proto: $(PROTO_VENV)/.ready
	proto/generate.sh

build: $(VENV)/.ready
	$(BIN)/pip install --quiet build
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) $(PROTO_VENV) .typing .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info demo-logs
