"""Entry point of the group `vllm.general_plugins`. vLLM calls it in each of its processes, maybe more than once."""

from __future__ import annotations

import logging


def register() -> None:
    """Make `"kv_connector": "mapflow"` known, and put the attention backend with reuse in place of vLLM's."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if "mapflow" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("mapflow", "mapflow.connector.vllm.connector", "MapFlowConnector")
    # vLLM's default names are overridden, so that nobody needs a flag; the classes pass through without a connector.
    register_backend(AttentionBackendEnum.CPU_ATTN, "mapflow.connector.vllm.cpu_backend.MapFlowCPUBackend")
    register_backend(AttentionBackendEnum.FLASH_ATTN, "mapflow.connector.vllm.cuda_backend.MapFlowFlashBackend")
    _log_like_vllm()


def _log_like_vllm() -> None:
    """Send our lines where vLLM's go, at its level; an application that configured our loggers is left alone."""
    ours, theirs = logging.getLogger("mapflow"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
