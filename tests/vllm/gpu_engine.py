"""One vLLM engine on a GPU in a process of its own: `python gpu_engine.py JOB.json`, results in JOB.out.json.

JOB: {"model", "transfer": KV transfer config or null, "engine": keyword arguments, "wait_for": file or null, "batches":
[{"prompts": [token ids], "mapflow": parameters or null, "max_tokens"}]}. Each batch's prompts are in one `generate`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams

    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    options: dict[str, Any] = {"kv_transfer_config": job["transfer"]} if job["transfer"] else {}
    engine = LLM(
        model=job["model"],
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=1 << 30,
        **job["engine"],
        **options,
    )
    while job["wait_for"] and not Path(job["wait_for"]).exists():
        time.sleep(0.05)
    results = []
    for batch in job["batches"]:
        extra = None if batch["mapflow"] is None else {"kv_transfer_params": {"mapflow": batch["mapflow"]}}
        params = SamplingParams(
            temperature=0.0, max_tokens=batch["max_tokens"], logprobs=20, ignore_eos=True, extra_args=extra
        )
        prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
        results.append([_result(one) for one in engine.generate(prompts, params, use_tqdm=False)])
    path.with_suffix(".out.json").write_text(json.dumps(results))


def _result(output: Any) -> dict[str, Any]:
    answer = output.outputs[0]
    return {
        "token_ids": list(answer.token_ids),
        "logprobs": [{token: one.logprob for token, one in step.items()} for step in answer.logprobs],
        "report": (output.kv_transfer_params or {}).get("mapflow"),
    }


if __name__ == "__main__":
    main()
