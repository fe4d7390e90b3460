"""This module keeps the tenant's own count of what it used of a provider, and shows the count (`tenant status`).

The count is in `usage.json` in the identity's folder. It has the form of the provider's own file (wire/usage.py, which
also says what is guaranteed), so a tenant can compare its provider's bill with it: requests, rows, tokens and bytes of
a run are the same on both sides. Here they are split by kind of request and there by class of work.

Not guaranteed: that the two agree about requests that were in flight when a stream broke, when they were cancelled,
when a deadline passed or at midnight, or about the last minute before a process was killed (SIGTERM ends the commands
in order, but not a program that does not handle it). Without an identity nothing is kept: such a provider is in the
same process, or keeps no accounts. The file is no secret, but says when the tenant worked, and how much.
"""

from __future__ import annotations

import atexit
import json
import os
import re
from collections.abc import Sequence
from datetime import UTC, date
from pathlib import Path
from typing import Any

from cryptography import x509

from runtime.command_line import aligned
from tenant_sdk.identity import issuer_of, read_endpoint, tenant_name
from tenant_sdk.warn import warn_and_go_on
from wire.errors import ConfigurationError, Unauthenticated
from wire.transport.identity import TlsIdentity, load_identity
from wire.usage import (
    FILE_NAME,
    KINDS,
    NAME_PATTERN,
    Account,
    Usage,
    UsageBook,
    UsageCounter,
    month_of,
    read_usage_file,
    today,
)


class UsageNotKeptWarning(UserWarning):
    """Warns that the tenant's own count of what it used cannot be written at present; runs go on."""


class OwnUsage(UsageBook):
    """Counts what a tenant uses with one identity, and adds it to the file in the identity's folder."""

    def __init__(self, folder: Path, identity: TlsIdentity) -> None:
        """Checks that the file can be read, and begins to save counts every minute and when the process ends.

        Raises:
            ConfigurationError: the file is damaged or cannot be read.
        """
        path: Path | None = folder / FILE_NAME
        read_usage_file(folder / FILE_NAME)
        if not os.access(folder, os.W_OK):
            _warn(f"{folder} cannot be written to, so what this session uses is not counted there")
            path = None
        super().__init__(path, KINDS, _warn)
        self.counter: UsageCounter = self.of(account_of(identity))
        """The counter of the identity."""
        if path is not None:
            self.keep_saving()
            atexit.register(self.save)

    def close(self) -> None:
        """Saves the counts once more; see `UsageBook.close`."""
        super().close()
        atexit.unregister(self.save)


def _warn(line: str) -> None:
    warn_and_go_on(line, UsageNotKeptWarning)


def account_of(identity: TlsIdentity) -> str:
    """Returns the name under which an identity's usage is kept, since a folder may get another identity: the tenant's
    name, and which provider's authority has given it. Raises ConfigurationError if the certificate names no tenant."""
    key = f"{tenant_name(identity)} of {issuer_of(identity).hex()[:16]}"
    if re.fullmatch(NAME_PATTERN, key) is None:
        raise ConfigurationError("the identity's certificate names no tenant: enrol again")
    return key


def status_of(folder: Path, day: date | None = None) -> dict[str, Any]:
    """Returns what an identity's folder says about its provider, and what was used of it. Sends nothing.

    Args:
        folder: the folder that `provider enroll` made.
        day: the UTC day that counts as today; None for the present one.

    Raises:
        ConfigurationError: the folder is no identity, or the count in it cannot be read.
    """
    try:
        identity = load_identity(folder)
    except Unauthenticated:  # It has expired, which is said below; the count is still of use.
        identity = TlsIdentity.read(folder)
    key, file, day = account_of(identity), read_usage_file(folder / FILE_NAME), day or today()
    account, month = file.tenants.get(key, Account()), month_of(day)
    this_month = account.months.get(month, Usage())
    for each, usage in account.days.items():
        this_month = this_month.plus(usage) if month_of(each) == month else this_month
    try:
        url: str | None = read_endpoint(folder)
    except ConfigurationError:
        url = None
    certificate = x509.load_pem_x509_certificate(identity.cert_pem)
    name, _, authority = key.partition(" of ")
    return {
        "identity": str(folder),
        "provider": url,
        "tenant": name,
        "authority": authority,
        "certificate_until": certificate.not_valid_after_utc.astimezone(UTC).isoformat(),
        "day": day.isoformat(),
        "counted_since": None if not account.days and not account.months else str(file.since),
        "today": _shown(account.days.get(day, Usage())),
        "this_month": _shown(this_month),
        "total": _shown(account.total()),
        "other_identities": sorted(each for each in file.tenants if each != key),
    }


def _shown(usage: Usage) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "requests": sum(usage.requests.values()), "rows": sum(usage.rows.values()),
        "tokens": sum(usage.tokens.values()), "bytes_up": usage.bytes_up, "bytes_down": usage.bytes_down,
        "weight_bytes": usage.weight_bytes,
    }  # fmt: skip
    kinds = {kind: {"requests": usage.requests.get(kind, 0), "rows": usage.rows.get(kind, 0)} for kind in KINDS}
    return {**shown, "by_kind": kinds}


def status_text(known: Sequence[dict[str, Any]], as_json: bool) -> str:
    """Returns what `status_of` gave for each identity, as JSON or as text."""
    if as_json:
        return json.dumps(list(known), indent=1) + "\n"
    return "\n".join(map(_text, known))


def _text(known: dict[str, Any]) -> str:
    day, until = known["day"], known["certificate_until"][:10]
    expired = " (expired: enrol again)" if until < day else ""
    provider = known["provider"] or "not named by the identity: give --url to the other commands"
    lines = [
        f"provider  {provider}",
        f"tenant    {known['tenant']} of authority {known['authority']}, certificate until {until}{expired}",
    ]
    if known["other_identities"]:
        lines.append(f"also      {', '.join(known['other_identities'])}: counted in this folder, and not below")
    if known["counted_since"] is None:
        return "\n".join([*lines, "used      nothing is counted yet; counts are saved once a minute\n"])
    periods = {f"today, {day}": "today", f"month, {day[:7]}": "this_month", "in total": "total"}
    rows = [known[each] for each in periods.values()]
    names = [name for name in rows[0] if name != "by_kind" and (name != "weight_bytes" or known["total"][name])]
    numbers = [(name.replace("_", " "), [f"{row[name]:,}" for row in rows]) for name in names]
    columns = [("used", list(periods)), *numbers]
    return "\n".join([*lines, "", aligned(columns, 1)])
