"""The Hopper kernels through the real compiler and assembler, which run anywhere; `test_hopper.py` runs the result."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOPPER_SHARED_BYTES = 232_448


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has an assembler for Linux only")
def test_no_spills_and_products_in_flight() -> None:
    """Where the assembler gives up on keeping matrix products in flight, it waits for each single one."""
    script = Path(__file__).with_name("compile_for_hopper.py")
    run = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    said = "\n".join(line for line in run.stderr.splitlines() if "leaked" not in line)  # the compiler's bindings
    assert run.returncode == 0, said[-3000:]
    found = json.loads(run.stdout)
    assert len(found) == 6
    for name, kernel in found.items():
        assert kernel["stack"] == 0, (name, kernel)
        assert kernel["shared"] <= HOPPER_SHARED_BYTES, (name, kernel)
        assert kernel["products"] >= 8 and kernel["waits"] <= kernel["products"] // 4, (name, kernel)
        if name.startswith("tiles"):
            assert kernel["wide_stores"] > 0, (name, kernel)
