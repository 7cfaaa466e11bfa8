"""What a client tells its listener. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from mapflow.connector.messages import Peers
from mapflow.connector.reasons import Reason


@dataclass(frozen=True, slots=True)
class Connected:
    """A session is open."""

    boot_id: bytes


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session is over; its leases and reservations are void."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class PeersChanged:
    """Somebody came, went, or wants something else."""

    peers: Peers


Event = Connected | Disconnected | PeersChanged
