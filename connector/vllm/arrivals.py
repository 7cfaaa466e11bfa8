"""Requests before vLLM makes them: their cache salt, and their look-up.

vLLM hashes a prompt's blocks while it makes a request, before any connector hears of it. Hashing them once more, under
the salt that keeps KV of reusing requests apart from exact KV, takes as long as a look-up, and so does the look-up. So
requests are made with their salt, and the look-up of an idle engine is under way while vLLM hashes. Whoever is told of
a request that was made otherwise (several engines in one process, another version of vLLM) makes up for it then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from mapflow.connector.vllm.request_state import RequestState

logger = logging.getLogger(__name__)

Arrive = Callable[[EngineCoreRequest], RequestState]
"""What will be done for a request. Called on any thread."""

_USERS_SALT = "_mapflow_users_salt"
_STATE = "_mapflow_state"
_PATCHED = "_mapflow_wraps"


def on_arrival(arrive: Arrive) -> None:
    """From here on the requests of this process are made with what `arrive` says; another call replaces it."""
    original: Any = Request.from_engine_core_request
    original = getattr(original, _PATCHED, original)

    def from_engine_core_request(request: EngineCoreRequest, block_hasher: Any) -> Request:
        users_salt, state = request.cache_salt, None
        try:
            state = arrive(request)
            request.cache_salt = state.salt
        except Exception:
            logger.exception("mapflow: request %s is looked at later", request.request_id)
        try:
            made: Request = original(request, block_hasher)
        finally:
            request.cache_salt = users_salt
        setattr(made, _USERS_SALT, users_salt)
        setattr(made, _STATE, (arrive, state))
        return made

    setattr(from_engine_core_request, _PATCHED, original)
    Request.from_engine_core_request = from_engine_core_request


def state_of(request: Request, arrive: Arrive) -> RequestState | None:
    """What this `arrive` said of a request; None if it was not asked."""
    said_by, state = getattr(request, _STATE, (None, None))
    return state if said_by == arrive else None


def users_salt(request: Request) -> str | None:
    """The cache salt that the user gave."""
    salt: str | None = getattr(request, _USERS_SALT, request.cache_salt)
    return salt


def set_salt(request: Request, salt: str | None) -> None:
    """File a new request's KV under `salt`; if it was made with another, its block hashes are made anew."""
    if request.cache_salt != salt:
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()
