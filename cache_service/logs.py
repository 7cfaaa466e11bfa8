"""How log lines look; set up once, by `server.run`.

Elsewhere a module logs an event name and fields, and never keys' token content, prompts or blobs.
"""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor

from mapflow.cache_service.config import LogFormat


def configure(log_format: LogFormat) -> None:
    """Send everything, libraries included, to stderr: one line per event."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[Processor] = (
        [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
        if log_format is LogFormat.JSON
        else [
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=("timestamp", "level", "event"), bool_as_flag=False),
        ]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
