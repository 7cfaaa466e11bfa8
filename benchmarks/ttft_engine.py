"""One vLLM engine that answers the TTFT benchmark: requests as JSON lines on stdin, times as JSON lines on stdout.

`python ttft_engine.py SETTINGS`: {"model", "engine": keyword arguments, "transfer": KV transfer settings or null,
"online_density": of the rival, or null}. A request is {"prompt", "mapflow", "max_tokens", "trace"}; the answer {"ms",
"report"}, and if "trace" is set, {"trace"} as in `gpu_trace.py`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH, which this project runs with, leaves it out

from gpu_trace import traced

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no process in between that would add to what is measured


def use_online_scores(density: float) -> None:
    """Replace the fixed mask of `static` layers by one that the receiver estimates itself, as FlexPrefill does.

    Queries and keys are averaged over blocks, their products softmaxed, and the best blocks of each row kept
    (Lai et al., 2025, query-aware estimation), here as many as the density says; the same attention follows.
    """
    from mapflow.connector.vllm import kernel_reuse
    from mapflow.kernels.block_rows import BlockIndex, BlockRows
    from mapflow.kernels.pack import pack
    from mapflow.kernels.paged import PagedKV
    from mapflow.kernels.select import select_by_mass

    now: dict[str, Any] = {}
    attend = kernel_reuse.KernelReuse.attend

    def remember(self: Any, layer: int, query: torch.Tensor, kv: PagedKV, scale: float, out: torch.Tensor) -> None:
        now.update(query=query, kv=kv, scale=scale)
        attend(self, layer, query, kv, scale, out)

    def estimate(self: Any, entries: Any, rows: BlockRows, of_layer: Any, num_heads: int) -> BlockIndex:
        (segment,) = rows.segments  # the benchmark has one request a step
        blocks = rows.num_columns
        query = now["query"][segment.batch_rows]
        padded = query.new_zeros(blocks * rows.block, *query.shape[1:])
        padded[segment.row_begin : segment.row_end] = query
        pooled = padded.view(blocks, rows.block, num_heads, -1).mean(1).transpose(0, 1)
        keys = pack(now["kv"].key_cache, rows).data
        pooled_keys = keys[:, : blocks * rows.block].unflatten(1, (blocks, rows.block)).mean(2)
        pooled_keys = pooled_keys.repeat_interleave(num_heads // pooled_keys.shape[0], 0)
        scores = pooled @ pooled_keys.transpose(1, 2) * now["scale"]
        causal = torch.ones(blocks, blocks, dtype=torch.bool, device=query.device).tril()
        shares = scores.float().masked_fill(~causal, float("-inf")).softmax(-1)
        place = torch.arange(blocks, device=query.device)
        shares[:, place, place] = 2.0
        rank = shares.argsort(-1, descending=True).argsort(-1)
        wanted = (density * (place + 1)).round().clamp(min=1)
        mass = ((rank < wanted[None, :, None]) & causal).float().transpose(0, 1).contiguous()
        if now.get("rows") is not rows:  # the same lines, numbered by block row instead of by chunk
            sizes: dict[str, Any] = {"block": rows.block, "num_batch_rows": rows.num_batch_rows}
            now.update(rows=rows, numbered=BlockRows.from_segments([segment], device=rows.device, **sizes))
        return select_by_mass(mass[segment.row_begin // rows.block :], now["numbered"], 0.9999)

    kernel_reuse.KernelReuse.attend = remember  # type: ignore[method-assign]
    kernel_reuse.KernelReuse._static_index = estimate  # type: ignore[method-assign]


def main() -> None:
    """Serve requests until stdin ends."""
    from vllm import LLM, SamplingParams

    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")  # vLLM may print to stdout
    os.dup2(2, 1)
    if settings["online_density"] is not None:
        use_online_scores(settings["online_density"])
    transfer = {} if settings["transfer"] is None else {"kv_transfer_config": settings["transfer"]}
    engine = LLM(model=settings["model"], load_format="dummy", **settings["engine"], **transfer)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        extra = None if request["mapflow"] is None else {"kv_transfer_params": {"mapflow": request["mapflow"]}}
        tokens = request["max_tokens"]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, extra_args=extra)
        if not engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache cannot be emptied while a request runs")
        prompt = {"prompt_token_ids": request["prompt"]}
        outputs: list[Any] = []

        def generate(prompt: Any = prompt, params: Any = params, outputs: list[Any] = outputs) -> None:
            outputs.extend(engine.generate(prompt, params, use_tqdm=False))

        start = time.perf_counter()
        trace = {"trace": traced(generate)} if request["trace"] else generate() or {}
        ms = 1e3 * (time.perf_counter() - start)
        report = (outputs[0].kv_transfer_params or {}).get("mapflow")
        print(json.dumps({"ms": ms, "report": report, **trace}), file=answers, flush=True)


if __name__ == "__main__":
    main()
