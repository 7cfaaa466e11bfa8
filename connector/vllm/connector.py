"""The connector that vLLM loads for `"kv_connector": "mapflow"`: its calls, handed to the scheduler's or worker's side.

It moves no KV, so it never claims tokens (`get_num_new_matched_tokens` is 0) and never delays the end of a request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from mapflow.connector.vllm import arrivals, compat, compat_attention
from mapflow.connector.vllm.capture import Capture, StepCapture
from mapflow.connector.vllm.config import ConfigError
from mapflow.connector.vllm.device_arenas import DeviceArenas
from mapflow.connector.vllm.engine import Engine
from mapflow.connector.vllm.map_reader import COPY_WITHIN_S
from mapflow.connector.vllm.messages import RequestStep, ReuseReport
from mapflow.connector.vllm.pinned import PinnedArenas
from mapflow.connector.vllm.publisher import Publisher
from mapflow.connector.vllm.request_state import RequestState
from mapflow.connector.vllm.scheduler import MapScheduler
from mapflow.connector.vllm.worker import MapWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from mapflow.connector.vllm.gpu import GpuReuse
    from mapflow.connector.vllm.gpu_sender import GpuSender

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass
class StepOrders(KVConnectorMetadata):
    """One step's orders, scheduler to workers."""

    steps: tuple[RequestStep, ...] = ()
    ended: tuple[str, ...] = ()


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """What one step reused, workers to scheduler."""

    reports: dict[str, ReuseReport] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Ranks work on the same rows: the first rank's report stands."""
        return self


class MapFlowConnector(KVConnectorBase_V1):
    """One per process and role. With a configuration that cannot work, it is there but does nothing."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.map_worker: MapWorker | None = None
        self.map_scheduler: MapScheduler | None = None
        self._engine: Engine | None = None
        self._publisher: Publisher | None = None
        self._gpu: GpuReuse | None = None
        self._gpu_sender: GpuSender | None = None
        self._max_tokens = vllm_config.model_config.max_model_len
        self._reports: dict[str, ReuseReport] = {}
        is_worker = role is KVConnectorRole.WORKER
        facts = compat.engine_facts(vllm_config, kv_cache_config, is_worker=is_worker)
        self.page_size = facts.page_size
        try:
            self._engine = Engine(facts, self._kv_transfer_config.kv_connector_extra_config or {}, is_worker=is_worker)
        except ConfigError as error:
            logger.error("mapflow: %s; this engine runs without reuse", error)
            return
        if is_worker:
            self._start_worker(self._engine)
        else:
            self._start_scheduler(self._engine)

    def _start_worker(self, engine: Engine) -> None:
        device = compat.gpu_device()
        arenas = None if device is None else PinnedArenas(device)
        if device is not None and engine.plans:
            from mapflow.connector.vllm.gpu import GpuReuse  # needs Triton

            self._gpu = GpuReuse(
                engine.plans,
                device,
                engine.config.staging_bytes,
                arenas=arenas,
                copies=DeviceArenas(device, engine.client.device_arena),
                cost_model=engine.config.cost_model,
            )
        capture = self._start_capture(engine, arenas) if engine.facts.publishes else None
        self.map_worker = MapWorker(
            plans=engine.plans,
            client=engine.client,
            counters=engine.counters,
            capture=capture,
            publisher=self._publisher,
            wants=engine.wants,
            gpu=self._gpu,
        )

    def _start_capture(self, engine: Engine, arenas: PinnedArenas | None) -> StepCapture:
        queue = engine.config.publish_queue
        self._publisher = Publisher(engine.client, engine.producer_id, engine.counters, queue)
        if arenas is not None:
            from mapflow.connector.vllm.gpu_sender import GpuSender  # needs Triton

            if GpuSender.can_measure(engine.facts):
                self._gpu_sender = GpuSender(engine, self._publisher, arenas)
                return self._gpu_sender.capture
        return Capture(chunk_tokens=engine.namespace.chunk_tokens, block=engine.namespace.block)

    def _start_scheduler(self, engine: Engine) -> None:
        self.map_scheduler = MapScheduler(
            config=engine.config,
            namespace=engine.namespace,
            plans=engine.plans,
            client=engine.client,
            counters=engine.counters,
            page_size=self.page_size,
            publishes=engine.facts.publishes,
            published_layers=engine.published_layers,
            sender_id=engine.sender_id,
            clock=time.monotonic,
            linger_s=COPY_WITHIN_S if compat.on_gpu() else 0.0,
        )
        arrivals.on_arrival(self._arrive)

    def _safely(self, call: Callable[[], _T], otherwise: _T) -> _T:
        """A bug of ours must never end the engine: it is logged and counted, and vLLM goes on without us."""
        try:
            return call()
        except Exception:
            logger.exception("mapflow: internal error; the request or step runs without reuse")
            if self._engine is not None:
                self._engine.counters.add("internal_error")
            return otherwise

    def _tick(self) -> None:
        if self._engine is not None:
            self._engine.counter_log.tick()

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a map that is not published is a later miss."""
        return False

    # --- scheduler ---------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """A request arrived."""
        scheduler = self.map_scheduler
        if scheduler is None:
            return
        self._safely(lambda: self._take_in(scheduler, request), None)

    def _arrive(self, request: EngineCoreRequest) -> RequestState:
        assert self.map_scheduler is not None
        return self.map_scheduler.arrive(compat.arriving_request(request))

    def _take_in(self, scheduler: MapScheduler, request: Request) -> None:
        new = compat.new_request(request)
        state = arrivals.state_of(request, self._arrive) or scheduler.arrive(new)
        arrivals.set_salt(request, state.salt)
        scheduler.add(new, state)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Never any tokens; None while the look-up of this request's maps is under way."""
        scheduler = self.map_scheduler
        if scheduler is None or self._safely(lambda: scheduler.ready(request.request_id, num_computed_tokens), True):
            return 0, False
        return None, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Nothing to load into blocks."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Orders for the step that was just scheduled."""
        scheduler = self.map_scheduler
        if scheduler is None:
            return StepOrders()
        self._tick()
        nothing: tuple[RequestStep, ...] = ()
        steps = self._safely(lambda: scheduler.plan_step(compat.scheduled_rows(scheduler_output)), nothing)
        return StepOrders(steps=steps, ended=tuple(scheduler_output.finished_req_ids))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Reports of the workers."""
        scheduler, reports = self.map_scheduler, connector_output.kv_connector_worker_meta
        if scheduler is not None and isinstance(reports, StepReports):
            self._safely(lambda: scheduler.take_reports(reports.reports), None)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request ended, or was cancelled; its blocks may be freed at once."""
        scheduler = self.map_scheduler
        if scheduler is None:
            return False, None
        return False, self._safely(lambda: scheduler.finish(request.request_id), None)

    # --- worker ------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The KV cache is there: compile the kernels that will read it, before the engine serves."""
        engine = self._engine
        cache = next((one for name, one in kv_caches.items() if compat.layer_number(name) is not None), None)
        users = [one for one in (self._gpu, self._gpu_sender) if one is not None]
        if not users or engine is None or cache is None:
            return
        kv = compat_attention.flash_paged_kv(cache, engine.facts.head_dim)
        num_heads = engine.facts.num_heads // engine.facts.tp_size
        for one in users:
            self._safely(partial(one.warm_up, kv, num_heads, self._max_tokens), None)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        worker = self.map_worker
        if worker is not None and isinstance(connector_metadata, StepOrders):
            self._safely(lambda: worker.begin_step(connector_metadata.steps, connector_metadata.ended), None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Maps are read by the first attention layer that needs them."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded in the background."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """The attention backend captures; KV is not saved."""

    def wait_for_save(self) -> None:
        """A step ends."""
        worker = self.map_worker
        if worker is not None:
            self._reports = self._safely(worker.end_step, {})
            self._tick()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the step reused."""
        reports, self._reports = self._reports, {}
        return StepReports(reports) if reports else None

    def shutdown(self) -> None:
        """Publish what is queued, within a second, and leave the daemon."""
        if self._publisher is not None:
            self._publisher.close(1.0)
        for one in (self._gpu, self._gpu_sender):
            if one is not None:
                one.close()
        if self._engine is not None:
            self._engine.counter_log.flush()
            self._engine.client.close()
