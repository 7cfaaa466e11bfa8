"""What the operator writes under `kv_connector_extra_config`, read once at start-up and checked.

A mistake here never stops an engine: the caller logs the one line of `ConfigError` and runs as plain vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mapflow.connector.namespace import KeyHash, Namespace
from mapflow.connector.plan import Plan, PlanError, load_plan
from mapflow.connector.tls import ClientTls

DEFAULT_ENDPOINT = "unix:///run/mapflow/mapflow.sock"


class ConfigError(ValueError):
    """A setting that cannot be used; one line with the value and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """Settings of one engine.

    Attributes:
        endpoint: where the daemon listens, `unix:///path` or `host:port`.
        plans: paths of plan files; the first is the default of requests that name none.
        tls_ca, tls_cert, tls_key, tls_server_name: of an endpoint with mutual TLS, see `ClientTls`.
        tenant: tenant whose maps are shared; empty for the default tenant.
        key_hash: hash of the chunk keys.
        chunk_tokens: tokens per chunk of a producer without a plan file.
        block: tokens per block of a producer without a plan file.
        lookup_deadline_s: longest time that a request waits for the daemon before it is computed in full.
        call_deadline_s: longest time for calls off the scheduler's path.
        lease_s: life of the lease on looked-up maps.
        publish_queue: chunks that may wait to be published; more are dropped and counted.
        staging_bytes: GPU memory that maps are copied into ahead of their layers; 0 for what the plans need as a rule
            (256 MiB for guide, 2 GiB with translate). It comes on top of vLLM's `gpu_memory_utilization`.
        skip_queries: whether rows that `translate` reuses go without their Q projection.
        cost_model: whether a GPU computes layers whose maps would come too late, and steps that reuse makes slower.
        gpu_tier: whether maps that the daemon has copied to this GPU are read in place.
        row_stride: a sender on a GPU measures every so-manieth row's masses; a divisor of the block.
        capture_bytes: GPU memory in which a sender's maps wait to be copied to the host, on top likewise; 0 for what
            the plans need as a rule (256 MiB for plans without translate, else a 32nd of the GPU's memory).
    """

    endpoint: str = DEFAULT_ENDPOINT
    plans: tuple[Path, ...] = ()
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_server_name: str = ""
    tenant: str = ""
    key_hash: KeyHash = KeyHash.XXH3_128
    chunk_tokens: int = 512
    block: int = 64
    lookup_deadline_s: float = 0.02
    call_deadline_s: float = 1.0
    lease_s: float = 60.0
    publish_queue: int = 1024
    staging_bytes: int = 0
    skip_queries: bool = True
    cost_model: bool = True
    gpu_tier: bool = True
    row_stride: int = 4
    capture_bytes: int = 0

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: the first value out of range.
        """
        for name in ("lookup_deadline_s", "call_deadline_s", "lease_s", "publish_queue", "chunk_tokens"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"mapflow setting {name} must be positive, got {getattr(self, name)}")
        for name in ("staging_bytes", "capture_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"mapflow setting {name} must be 0 or more, got {getattr(self, name)}")
        if self.row_stride not in (1, 2, 4, 8, 16, 32, 64):
            raise ConfigError(f"mapflow setting row_stride must be a power of two up to 64, got {self.row_stride}")
        if self.block not in (64, 128) or self.chunk_tokens % self.block:
            raise ConfigError(
                f"mapflow settings block={self.block} and chunk_tokens={self.chunk_tokens}: "
                "the block is 64 or 128 and divides the chunk"
            )

    @classmethod
    def from_extra(cls, extra: Mapping[str, object]) -> ConnectorConfig:
        """Read the operator's dictionary.

        Raises:
            ConfigError: an unknown key, or a value of the wrong kind.
        """
        readers: dict[str, Callable[[Any], object]] = {
            "endpoint": str,
            "tls_ca": str,
            "tls_cert": str,
            "tls_key": str,
            "tls_server_name": str,
            "tenant": str,
            "key_hash": KeyHash,
            "chunk_tokens": int,
            "block": int,
            "lookup_deadline_s": float,
            "call_deadline_s": float,
            "lease_s": float,
            "publish_queue": int,
            "staging_bytes": int,
            "skip_queries": _boolean,
            "cost_model": _boolean,
            "gpu_tier": _boolean,
            "row_stride": int,
            "capture_bytes": int,
        }
        values: dict[str, object] = {}
        for key, value in extra.items():
            if key == "plan":
                paths = [value] if isinstance(value, str) else value
                if not isinstance(paths, list | tuple) or not all(isinstance(path, str) for path in paths):
                    raise ConfigError(f"mapflow setting plan must be a path or a list of paths, got {value!r}")
                values["plans"] = tuple(Path(path) for path in paths)
            elif key in readers:
                try:
                    values[key] = readers[key](value)
                except (TypeError, ValueError) as error:
                    raise ConfigError(f"mapflow setting {key}: {value!r} is not usable ({error})") from error
            else:
                known = ", ".join(sorted([*readers, "plan"]))
                raise ConfigError(f"unknown mapflow setting {key!r} in kv_connector_extra_config; known are {known}")
        return cls(**values)  # type: ignore[arg-type]

    def tls(self) -> ClientTls | None:
        """Of the endpoint.

        Raises:
            ConfigError: a file is missing in the settings.
        """
        try:
            return ClientTls.parse(self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name)
        except ValueError as error:
            raise ConfigError(f"mapflow settings: {error}") from error

    def load_plans(self) -> tuple[Plan, ...]:
        """Read the plan files.

        Raises:
            ConfigError: a file that is no plan, two plans of one name, or plans that cut prompts differently.
        """
        try:
            plans = tuple(load_plan(path) for path in self.plans)
        except PlanError as error:
            raise ConfigError(str(error)) from error
        if len({plan.name for plan in plans}) != len(plans):
            raise ConfigError(f"two plan files share a name: {', '.join(plan.name for plan in plans)}; rename one")
        shapes = {(plan.chunk_tokens, plan.block, plan.tokenizer_fingerprint) for plan in plans}
        if len(shapes) > 1:
            raise ConfigError(f"plans of one engine must agree on chunk, block and tokenizer, got {sorted(shapes)}")
        return plans

    def namespace(self, plans: tuple[Plan, ...], tokenizer_fingerprint: str) -> Namespace:
        """Namespace of this engine: cut as the plans say, or as configured where there are none."""
        base = Namespace(
            tokenizer_fingerprint=tokenizer_fingerprint,
            chunk_tokens=self.chunk_tokens,
            block=self.block,
            tenant=self.tenant,
            key_hash=self.key_hash,
        )
        return replace(base, chunk_tokens=plans[0].chunk_tokens, block=plans[0].block) if plans else base


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value
