"""Compile the Hopper kernels for sm_90, which needs no GPU, and print what the assembler made of them as JSON.

Run by `test_hopper_compiles.py` in a process of its own, because in that of the tests kernels are interpreted.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from mapflow.kernels import guide_hopper, tiles_hopper

TYPES = {
    "out": "*bf16",
    "row_lse": "*fp32",
    "arena": "*u8",
    "offsets": "*i64",
    "schedule": "*i32",
    "lines": "*i32",
    "columns": "*i32",
    "counts": "*i32",
    "qk_scale": "fp32",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def disassembled(kernel: Any, constants: dict[str, Any], **types: str) -> dict[str, int]:
    """Bytes of stack of a thread (spilled registers), matrix instructions, and waits for them."""
    names = kernel.arg_names
    known = TYPES | types
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if known.get(name, "").startswith("*") or name.startswith("stride_")]
    source = GluonASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned if names[i] != "stride_lse"},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack is not None, usage
    return {
        "stack": int(stack[1]),
        "shared": compiled.metadata.shared,
        "products": len(re.findall(r"\bHGMMA\.", code)),
        "waits": len(re.findall(r"\bWARPGROUP\.DEPBAR", code)),
        "wide_stores": len(re.findall(r"\bSTG\.E\.128", code)),
    }


def main() -> None:
    """Every variant."""
    layout = repr(NVMMASharedLayout(128, 16))
    found = {}
    for dim in (64, 128):
        query, other = (f"tensordesc<bf16[{rows}, {dim}],{layout}>" for rows in (64, 128))
        found[f"guide {dim}"] = disassembled(
            guide_hopper.guide_hopper_kernel,
            {"GROUP": 4, "HEAD_DIM": dim, "STAGES": 2, "REGISTERS": 240},
            queries=query,
            keys=other,
            values=other,
        )
        for pairs, registers in tiles_hopper._REGISTERS.items():
            constants = {"GROUP": 4, "HEAD_DIM": dim, "STAGES": 2 + pairs, "PAIRS": pairs, "REGISTERS": registers}
            found[f"tiles {dim} {pairs}"] = disassembled(
                tiles_hopper.tiles_hopper_kernel, constants, queries=query, keys=other
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
