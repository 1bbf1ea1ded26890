"""Logs: structlog on stderr, for people on a terminal, JSON elsewhere. Never the text of a prompt."""

import logging
import os
import sys

import structlog


def configure_logging(process: str) -> None:
    """Call once, first thing in a process. TANDEM_LOG_LEVEL (default INFO) and TANDEM_LOG_FORMAT (console or json)."""
    level = logging.getLevelNamesMapping().get(os.environ.get("TANDEM_LOG_LEVEL", "INFO").upper(), logging.INFO)
    style = os.environ.get("TANDEM_LOG_FORMAT") or ("console" if sys.stderr.isatty() else "json")
    render = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if style == "console"
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(process=process)
