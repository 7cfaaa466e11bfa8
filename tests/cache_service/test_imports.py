"""The daemon runs where no model does, and its core where no network is."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("mapflow.cache_service.server", ["torch", "vllm", "transformers", "numpy", "cuda", "mapflow.connector"]),
        ("mapflow.cache_service.__main__", ["torch", "vllm", "transformers", "numpy", "cuda", "mapflow.connector"]),
        ("mapflow.cache_service.core.cache", ["grpc", "asyncio", "torch", "socket", "threading", "time", "structlog"]),
    ],
)
def test_what_a_module_does_not_import(module: str, forbidden: list[str]) -> None:
    script = f"import sys; before = set(sys.modules); import {module}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-P", "-I", "-c", script], capture_output=True, text=True, check=True)
    imported = done.stdout.split()
    assert module in imported
    assert [name for name in forbidden if name in imported] == []
