"""Start-up of the plugin in one engine process: settings, plans, identities and the connection to the daemon.

Everything that can be wrong with a configuration is found here, told in one line, and turns the plugin off; the engine
itself always starts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mapflow.connector.client import Client
from mapflow.connector.client_config import ClientConfig
from mapflow.connector.counters import CounterLog, Counters, LimitedLog
from mapflow.connector.events import Connected, Disconnected, Event, PeersChanged
from mapflow.connector.messages import Producer
from mapflow.connector.model_identity import local_directory, model_id
from mapflow.connector.namespace import Namespace
from mapflow.connector.plan import ModelSpec, Plan
from mapflow.connector.reasons import Reason
from mapflow.connector.tokenizer import tokenizer_fingerprint
from mapflow.connector.vllm.config import ConfigError, ConnectorConfig
from mapflow.connector.vllm.facts import EngineFacts
from mapflow.connector.vllm.shards import plan_of_rank, wants_of_rank
from mapflow.connector.wants import LayerWant, interest_of, interest_wants, merge_wants, plan_wants

logger = logging.getLogger(__name__)


class Engine:
    """The plugin's settings and connection in one process of an engine (scheduler or worker)."""

    def __init__(self, facts: EngineFacts, extra: Mapping[str, object], *, is_worker: bool) -> None:
        """Read and check everything, and start to connect.

        Raises:
            ConfigError: one line; the caller logs it and leaves the plugin off.
        """
        if facts.unsupported:
            raise ConfigError(facts.unsupported)
        self.facts = facts
        self.config = ConnectorConfig.from_extra(extra)
        self.counters = Counters()
        self.counter_log = CounterLog(self.counters, logger)
        self._log = LimitedLog(logger)
        try:
            name, revision = model_id(facts.model, facts.revision)
            fingerprint = tokenizer_fingerprint(local_directory(facts.tokenizer, facts.tokenizer_revision))
        except (ValueError, OSError) as error:
            raise ConfigError(str(error)) from error
        self.model = ModelSpec(
            name=name,
            revision=revision,
            num_layers=facts.num_layers,
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
        )
        plans = self.config.load_plans()
        for plan in plans:
            self._check_plan(plan, fingerprint)
        self._ranks = (facts.tp_rank, facts.tp_size) if is_worker else (0, 1)
        own = [plan for plan in plans if self._is_ours(plan.receiver)] if facts.reuses else []
        self.plans = tuple(plan_of_rank(plan, *self._ranks) for plan in own)
        sender_plans = [p for p in plans if self._is_ours(p.sender)] if facts.publishes else []
        self._plan_wants = merge_wants(plan_wants(plan) for plan in sender_plans)
        if facts.reuses and not self.plans and not facts.publishes:
            raise ConfigError("a kv_consumer needs a plan: kv_connector_extra_config={'plan': 'PLAN.safetensors'}")
        self.namespace: Namespace = self.config.namespace(plans, fingerprint)
        producer = Producer.of(self.model.model_id, facts.dtype, facts.tp_rank, facts.tp_size)
        self.producer_id = producer.id
        side = "worker" if is_worker else "scheduler"
        try:
            client_config = ClientConfig(
                endpoint=self.config.endpoint,
                client_name=f"{name}/{side}-{facts.tp_rank}",
                namespace=self.namespace,
                producer=producer if facts.publishes and is_worker else None,
                call_deadline_s=self.config.lookup_deadline_s,
                transfer_deadline_s=self.config.call_deadline_s,
                tls=self.config.tls(),
                device_uuid=facts.device_uuid if facts.reuses and self.config.gpu_tier else "",
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.client = Client(client_config, counters=self.counters, listener=self._on_event)
        if not is_worker:
            self.client.set_interests(interest_of(plan, self.namespace) for plan in self.plans if plan.map_layers)
        self.client.start()

    def _is_ours(self, spec: ModelSpec) -> bool:
        return spec.revision == self.model.revision

    def _check_plan(self, plan: Plan, fingerprint: str) -> None:
        if not self._is_ours(plan.receiver) and not self._is_ours(plan.sender):
            raise ConfigError(
                f"plan {plan.name} is for {plan.sender.model_id} -> {plan.receiver.model_id}, this engine serves "
                f"{self.model.model_id}; calibrate this pair with `mapflow calibrate`"
            )
        if plan.tokenizer_fingerprint != fingerprint:
            raise ConfigError(
                f"plan {plan.name} was made for the tokenizer {plan.tokenizer_fingerprint}, this engine's is "
                f"{fingerprint}; calibrate again with `mapflow calibrate`"
            )

    # --- what a sender publishes -------------------------------------------------------------------------------------

    def wants(self) -> dict[int, LayerWant]:
        """What a plan file here or a receiver's registered interest wants now of this model, or of this rank of it."""
        parts = [self._plan_wants]
        for interest in self.client.peers.interests:
            if self._same_model(interest.model, self.model.model_id) and interest.namespace == self.namespace:
                parts.append(interest_wants(interest, self.model.num_layers, self.model.num_heads))
        return wants_of_rank(merge_wants(parts), *self._ranks, self.model.num_heads)

    @property
    def may_want_tiles(self) -> bool:
        """Whether a plan file here wants tiles of this model, or none says what is wanted, so that receivers may."""
        return not self._plan_wants or any(want.tile_top_p for want in self._plan_wants.values())

    def published_layers(self) -> tuple[str, tuple[int, ...]]:
        """Model id that this engine publishes under, and the layers it would publish now."""
        return self.model.model_id, tuple(sorted(self.wants()))

    # --- whom a receiver reads ---------------------------------------------------------------------------------------

    def sender_id(self, plan: Plan) -> str:
        """Model id under which the plan's sender publishes: its name may differ from calibration's, not its weights."""
        for publisher in self.client.peers.publishers:
            if self._same_model(publisher.producer.model, plan.sender.model_id):
                return publisher.producer.model
        return plan.sender.model_id

    @staticmethod
    def _same_model(left: str, right: str) -> bool:
        """Whether two model ids name the same weights, whatever their directories are called."""
        return left.rpartition("@")[2] == right.rpartition("@")[2]

    # --- disagreements -----------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        match event:
            case Connected():
                logger.info("mapflow: connected to %s as %s", self.config.endpoint, self.client.config.client_name)
            case Disconnected(reason=reason) if reason is not Reason.CLOSED:
                self._log.warning("down", "mapflow: no daemon at %s: %s", self.config.endpoint, reason)
            case PeersChanged():
                self._check_publishers(event)
                self._check_interests(event)

    def _check_publishers(self, event: PeersChanged) -> None:
        """A sender that this engine's plans name but whose maps it can never use."""
        for plan in self.plans:
            for publisher in event.peers.publishers:
                model = publisher.producer.model
                same_name = model.rpartition("@")[0] == plan.sender.name
                if self._same_model(model, plan.sender.model_id):
                    self._complain(f"sender {publisher.producer.id}", publisher.namespace)
                elif same_name:
                    self.counters.add("peer_mismatch", "revision")
                    line = "mapflow: no reuse from %s: plan %s was calibrated with %s; calibrate again"
                    self._log.warning(f"revision {model}", line, model, plan.name, plan.sender.model_id)

    def _check_interests(self, event: PeersChanged) -> None:
        """A receiver that wants this engine's maps but counts prompts or tokens otherwise."""
        if self.facts.publishes:
            for interest in event.peers.interests:
                if self._same_model(interest.model, self.model.model_id):
                    self._complain("a receiver's plan", interest.namespace)

    def _complain(self, who: str, theirs: Namespace) -> None:
        field = self.namespace.difference(theirs)
        if field is None:
            return
        self.counters.add("peer_mismatch", field)
        line = "mapflow: no reuse with %s: its %s is %s, ours is %s; make both sides agree"
        self._log.warning(f"{who} {field}", line, who, field, getattr(theirs, field), getattr(self.namespace, field))
