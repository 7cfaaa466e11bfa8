# make demo | test | test-fast | lint | type | fmt | proto | clean      (everything runs in a virtual environment that it makes itself)
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
export PYTHONSAFEPATH := 1
