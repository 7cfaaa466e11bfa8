"""One offline vLLM engine in a process of its own: `python engine_process.py JOB.json`, results in JOB.out.json.

JOB: {"model", "transfer": KV transfer config or null, "engine": keyword arguments, "wait_for": file or null, "batches":
[{"prompts": [token ids], "mapflow": parameters or null, "max_tokens"}]}. Each batch's prompts are in one `generate`.
With `"disable_log_stats": false` in "engine" it prints after each batch how often requests were preempted so far.
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
    engine = LLM(model=job["model"], **job["engine"], **options)
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
        if not job["engine"].get("disable_log_stats", True):
            found = [one.value for one in engine.get_metrics() if one.name == "vllm:num_preemptions"]
            print(f"preemptions: {sum(found)}")
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
