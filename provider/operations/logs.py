"""Formats log lines as text or as JSON, with fields for the tenant, stream and request that a line is about."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

from wire.errors import printable

LogFormat = Literal["text", "json"]
FIELDS = ("tenant", "stream", "request")
"""Names of the fields that a log line shows if the log call passes them as `extra`; other extra fields are ignored."""


def configure(log_format: LogFormat) -> None:
    """Sends this process's log lines of level INFO and above to stderr, in the given format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def configured() -> LogFormat:
    """Returns the name of this process's log format, which can be passed to the processes that this process starts."""
    return "json" if any(isinstance(one.formatter, JsonFormatter) for one in logging.getLogger().handlers) else "text"


def _named(record: logging.LogRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}


class TextFormatter(logging.Formatter):
    """Formats a log record as text: time, level, logger, message, then name=value for each field in `FIELDS` that the
    record has."""

    def __init__(self) -> None:
        """Sets the format of the line."""
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Returns a record as one line. If the record has a traceback, this follows on further lines, and the fields
        come after the traceback. No control character of a record reaches a terminal that shows the log."""
        line = super().format(record)
        names = " ".join(f"{name}={value}" for name, value in _named(record).items())
        return printable(f"{line} {names}" if names else line)


class JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object on a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns a record as a JSON object. Its keys are time (UTC), level, logger and message, the names in `FIELDS`
        that the record has, and error, which holds the traceback if there is one."""
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
