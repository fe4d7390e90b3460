"""Formats log lines as text or as JSON, with fields for the tenant, stream and request that a line is about, and writes
the lines about refusals.

Guarantees of `RefusalLog`: whatever peers do, the log has at most one line of a tenant and a reason every `QUIET_S`
seconds, and what was left out is counted. No line holds anything that a peer sent, besides a request's number and the
name in a certificate that the provider's own authority has signed. Memory is bounded, since only `MOST_KEYS` pairs are
told apart.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

from runtime.logs import StderrHandler
from wire.errors import printable

LogFormat = Literal["text", "json"]
FIELDS = ("tenant", "stream", "request")
"""Names of the fields that a log line shows if the log call passes them as `extra`; other extra fields are ignored."""


def configure(log_format: LogFormat) -> None:
    """Sends this process's log lines of level INFO and above to stderr, in the given format."""
    handler = StderrHandler()
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


QUIET_S = 10.0
"""The seconds for which, after a line about a refusal, further refusals of this tenant for this reason are counted and
not written. So a tenant that is refused all the time makes less than 2 MB of log a day for each reason."""
MOST_KEYS = 1000
_OTHERS = "other tenants"
_LOGGER = logging.getLogger(__name__)


class RefusalLog:
    """Writes a line about each refusal, or about how many were alike. It is safe under threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Makes a log without refusals. Args: clock: returns the present time in seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._alike: dict[tuple[str | None, str], tuple[float, int]] = {}
        """By tenant and reason: when its last line was written, and the number of refusals since."""

    @property
    def num_kept(self) -> int:
        """Returns the number of pairs of a tenant and a reason that are kept."""
        return len(self._alike)

    def add(self, tenant: str | None, reason: str, **named: object) -> None:
        """Writes a line about a refusal, or only counts it if a line of this tenant and reason was written lately.

        Args:
            tenant: the tenant's name; None for a peer without a certificate that shows one. All such peers count as
                one.
            reason: a fixed text, which says why; never a text that depends on what the peer sent.
            named: further fields of the line, by their names in `FIELDS`.
        """
        key = (tenant, reason)
        with self._lock:
            if key not in self._alike and len(self._alike) >= MOST_KEYS:
                key, named = (_OTHERS, reason), {}
            if key in self._alike:
                since, count = self._alike[key]
                self._alike[key] = (since, count + 1)
                return
            self._alike[key] = (self._clock(), 0)
        self._write("refused: %s", (reason,), key[0], named)

    def look(self, is_last: bool = False) -> None:
        """Writes a line about each tenant and reason of which refusals were only counted for `QUIET_S` seconds.
        Callers must call this regularly, and with `is_last` at the end, which waits for nothing."""
        now, lines = self._clock(), []
        with self._lock:
            for key, (since, count) in list(self._alike.items()):
                if now - since < QUIET_S and not is_last:
                    continue
                if count:
                    self._alike[key] = (now, 0)
                    lines.append((key, count, now - since))
                else:
                    del self._alike[key]
        for (tenant, reason), count, seconds in lines:
            self._write("refused: %s (%d more in %.0f s)", (reason, count, seconds), tenant, {})

    @staticmethod
    def _write(text: str, values: tuple[object, ...], tenant: str | None, named: dict[str, object]) -> None:
        fields = named if tenant is None else {"tenant": tenant, **named}
        _LOGGER.warning(text, *values, extra=fields)
