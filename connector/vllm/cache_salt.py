"""The salts that keep KV of reusing requests apart from exact KV in vLLM's prefix cache.

vLLM hashes a prompt's blocks while it makes the request, before any connector hears of it, and hashing them once more
under a salt takes as long as a look-up. So requests are made with their salt. Whoever is told of a request that was not
(several engines in one process, another version of vLLM) sets its salt then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.request import Request

logger = logging.getLogger(__name__)

SaltOf = Callable[[Any], str | None]
"""The salt of an `EngineCoreRequest`, None for the one that it came with. Called on any thread."""

_USERS = "_mapflow_users_salt"
_PATCHED = "_mapflow_wraps"


def make_requests_with(salt_of: SaltOf) -> None:
    """From here on the requests of this process are made with their salts; another call replaces `salt_of`."""
    original: Any = Request.from_engine_core_request
    original = getattr(original, _PATCHED, original)

    def from_engine_core_request(request: Any, block_hasher: Any) -> Request:
        users = request.cache_salt
        try:
            salt = salt_of(request)
        except Exception:
            logger.exception("mapflow: request %s is given its cache salt later", request.request_id)
            salt = None
        if salt is not None:
            request.cache_salt = salt
        made: Request = original(request, block_hasher)
        setattr(made, _USERS, users)
        return made

    setattr(from_engine_core_request, _PATCHED, original)
    Request.from_engine_core_request = from_engine_core_request


def users_salt(request: Request) -> str | None:
    """The salt that the user gave a request."""
    salt: str | None = getattr(request, _USERS, request.cache_salt)
    return salt


def set_salt(request: Request, salt: str | None) -> None:
    """File a new request's KV under `salt`; if it was made with another, its block hashes are made anew."""
    if request.cache_salt != salt:
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()
