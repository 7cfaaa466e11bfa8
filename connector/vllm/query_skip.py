"""The QKV projection without the queries that nobody reads: rows that `translate` reuses need K and V only.

In layers that a plan translates, the projection is one opaque operator, so that `torch.compile`, which would freeze a
Python condition at trace time, asks anew in every step. It knows its layer by the weight that it is given: a name would
be a constant of the compiled code, which then differs from layer to layer, is compiled once for each, and runs a third
slower on the host for want of a warm cache. Steps small enough to replay a CUDA graph compute all queries,
as they did when it was captured: a graph split at the operator as well would cost every step the launch of one more
piece a layer. Every model class with vLLM's fused QKV layer has it. Left
alone: quantised weights (their kernels take the matrix whole), LoRA (which replaces the layer), and engines without a
plan that translates.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import QKVParallelLinear, UnquantizedLinearMethod
from vllm.utils.torch_utils import direct_register_custom_op

from mapflow.connector.plan import Mode
from mapflow.connector.vllm import compat
from mapflow.connector.vllm.config import ConfigError, ConnectorConfig

logger = logging.getLogger(__name__)

_CODE_VERSION = 2  # of the operator, as compiled code calls it
_PATCHED = "_mapflow_wraps"
_library = torch.library.Library("mapflow", "FRAGMENT")


def install() -> None:
    """Look at every QKV layer that is built from now on; may be called again.

    Called when a model's first attention layer is made, not when the plugin is loaded: what is imported here has no
    business in a process that builds no model. The first layer's own projection exists by then and stays as it is.
    """
    original = QKVParallelLinear.__init__
    if hasattr(original, _PATCHED):
        return
    direct_register_custom_op("qkv_projection", qkv_projection, fake_impl=_output, target_lib=_library)

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        try:
            _adopt(self)
        except Exception:
            logger.exception("mapflow: the queries of %s are always computed", getattr(self, "prefix", "a layer"))

    setattr(init, _PATCHED, original)
    QKVParallelLinear.__init__ = init


def qkv_projection(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, query_width: int) -> torch.Tensor:
    """x @ weight.T + bias, [rows, width]; what stands for queries of rows whose queries nobody reads is undefined.

    Args:
        x: [rows, hidden].
        weight: [width, hidden], queries first.
        bias: [width] or None.
        query_width: how many of the width are queries.
    """
    ranges = _rows_with_queries(weight, x.shape[0])
    if ranges is None:
        return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    out = _output(x, weight, bias, query_width)
    _linear_into(out[:, query_width:], x, weight[query_width:], None if bias is None else bias[query_width:])
    for begin, end in ranges:
        own_bias = None if bias is None else bias[:query_width]
        _linear_into(out[begin:end, :query_width], x[begin:end], weight[:query_width], own_bias)
    return out


def _linear_into(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _output(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, query_width: int) -> torch.Tensor:
    """Room for the product; all that a compiler sees of it."""
    return x.new_empty(x.shape[0], weight.shape[0])


def _rows_with_queries(weight: torch.Tensor, num_rows: int) -> Sequence[tuple[int, int]] | None:
    connector = compat.active_connector()
    if connector is None or not connector.map_worker.has_work:
        return None
    found: Sequence[tuple[int, int]] | None = None
    try:
        number = _layers.number_of(weight)
        if number is not None:
            found = connector.map_worker.rows_with_queries(number, num_rows)
    except Exception:
        logger.exception("mapflow: all queries of a layer are computed")
    return found


class AdoptedLayers:
    """The layers with our projection, found by where their weights are.

    Weights may move (sleep mode, new weights), and what is freed may become another layer's, so an address counts only
    as long as its layer says the same. Layers that share a weight are not told apart and have all queries computed.
    """

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._by_address: dict[int, weakref.ref[Any] | None] = {}

    def add(self, layer: Any, number: int) -> None:
        """A QKV layer that was just built."""
        self._numbers[layer] = number

    def number_of(self, weight: torch.Tensor) -> int | None:
        """Of the layer whose weight it is; None if it is nobody's or not one layer's alone."""
        address = weight.data_ptr()
        layer = self._at(address)
        if layer is None or layer.weight.data_ptr() != address:
            self._look()
            layer = self._at(address)
        return None if layer is None else self._numbers[layer]

    def _at(self, address: int) -> Any:
        found = self._by_address.get(address)
        return None if found is None else found()

    def _look(self) -> None:
        self._by_address = {}
        for layer in self._numbers:
            address = layer.weight.data_ptr()
            self._by_address[address] = None if address in self._by_address else weakref.ref(layer)


_layers = AdoptedLayers()


class _Projection(UnquantizedLinearMethod):
    """vLLM's own method, its product replaced."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the weight as it is: vLLM's CPU path would pack it."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x @ weight.T + bias, see `qkv_projection`; whatever comes in front of the rows' dimension stays."""
        rows = x.reshape(-1, x.shape[-1])
        width = layer.num_heads * layer.head_size
        out: torch.Tensor = torch.ops.mapflow.qkv_projection(rows, layer.weight, bias, width)
        return out.view(*x.shape[:-1], -1)


def _adopt(layer: Any) -> None:
    """Give a layer the projection above, if a plan of this engine translates it and its weights are plain."""
    config = get_current_vllm_config_or_none()
    number = compat.layer_number(layer.prefix)
    if config is None or number is None or config.lora_config is not None:
        return
    if type(layer.quant_method) is not UnquantizedLinearMethod or number not in _translated(config):
        return
    layer.quant_method = _Projection()
    _layers.add(layer, number)
    if isinstance(config.additional_config, dict):  # part of the name under which compiled code is kept
        config.additional_config["mapflow_query_skip"] = _CODE_VERSION


def _translated(config: VllmConfig) -> frozenset[int]:
    """Receiver layers that a plan of this engine translates."""
    transfer = config.kv_transfer_config
    extra = _own_settings(transfer)
    if extra is None or not transfer.is_kv_consumer:
        return frozenset()
    try:
        settings = ConnectorConfig.from_extra(extra)
        plans = settings.load_plans() if settings.skip_queries else ()
    except ConfigError:  # the connector says so
        return frozenset()
    layers = (enumerate(plan.layers) for plan in plans)
    return frozenset(number for of_plan in layers for number, layer in of_plan if layer.mode is Mode.TRANSLATE)


def _own_settings(transfer: Any) -> Mapping[str, object] | None:
    """Our part of an engine's KV transfer settings, also inside a MultiConnector; None where we have none."""
    if transfer is None:
        return None
    extra = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector == "mapflow":
        return dict(extra)
    for inner in extra.get("connectors", ()):
        if isinstance(inner, Mapping) and inner.get("kv_connector") == "mapflow":
            return dict(inner.get("kv_connector_extra_config") or {})
    return None
