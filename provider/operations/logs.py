"""Log lines with fields for what they are about: tenant, stream and request; as text or as JSON, one line each."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]
FIELDS = ("tenant", "stream", "request")
"""Fields that are written when they are given as `extra`; no other field of a record is."""


def configure(log_format: LogFormat) -> None:
    """Sends every log line of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def configured() -> LogFormat:
    """Returns the format that this process writes, for the processes that it starts."""
    return "json" if any(isinstance(one.formatter, JsonFormatter) for one in logging.getLogger().handlers) else "text"


def _named(record: logging.LogRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}


class TextFormatter(logging.Formatter):
    """Formats time, level, logger, message, then name=value."""

    def __init__(self) -> None:
        """Takes no settings."""
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record as one line, and a traceback where there is one."""
        line = super().format(record)
        names = " ".join(f"{name}={value}" for name, value in _named(record).items())
        return f"{line} {names}" if names else line


class JsonFormatter(logging.Formatter):
    """Formats each line as one object."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record with the keys time (UTC), level, logger, message, those of `FIELDS`, and error for a
        traceback."""
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_named(record),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=True)
