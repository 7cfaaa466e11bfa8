"""Why the daemon does not start; refused requests are `core/errors.py`."""

from __future__ import annotations


class StartupError(Exception):
    """The daemon cannot start; the message is one line that names the cause and the way out."""
