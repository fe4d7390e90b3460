"""Tests a registry that cannot be read: what counts meanwhile, for how long, and what the log says."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from provider.identity.authority import StateDir
from provider.identity.registry import enroll, revoke
from provider.identity.revocations import HELD_OVER_S, RegistryUnreadable, RevocationList
from provider.net.admission import AccessCheck
from tests.support.files import exhausted
from tests.support.providers import Fault
from tests.support.waiting import WAIT_S
from wire.errors import NotPermitted, WireCode, code_of

ENDPOINT = "grpcs://localhost:8443"
PASSING = [errno.EMFILE, errno.ENFILE, errno.EIO]


class Site:
    """Holds a provider's state directory with one enrolled tenant, the registry that was read from it, and a clock."""

    def __init__(self, tmp_path: Path) -> None:
        self.state, self.now = StateDir(tmp_path / "state"), 1000.0
        self.acme = int(enroll(self.state, "acme", tmp_path / "acme", ENDPOINT).serial, 16)
        self.pem = (tmp_path / "acme/cert.pem").read_bytes()
        self.listed = RevocationList(self.state, monotonic=lambda: self.now)

    def answers(self) -> list[bool]:
        return [self.listed.is_enrolled(self.acme), self.listed.is_revoked(self.acme)]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize("number", PASSING)
def test_what_was_read_last_counts_for_a_minute_and_not_longer(
    site: Site, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    assert site.answers() == [True, False]
    site.now += 1000  # there was no check for long, and then the file was current
    assert site.answers() == [True, False]
    fault = Fault(monkeypatch, number)
    for seconds in (0.0, 30.0, 29.9):
        site.now += seconds
        assert site.answers() == [True, False]
        with pytest.raises(RegistryUnreadable):  # a new caller is not admitted
            site.listed.check_current()
    site.now += 0.1
    assert HELD_OVER_S == 60.0
    for ask in (site.listed.is_enrolled, site.listed.is_revoked):
        with pytest.raises(RegistryUnreadable) as caught:
            ask(site.acme)
        assert code_of(caught.value) is WireCode.UNAVAILABLE  # the code must never be NOT_PERMITTED
        assert caught.value.retry_s > 0
    fault.is_over = True
    site.listed.check_current()
    assert site.answers() == [True, False]


@pytest.mark.parametrize("number", PASSING)
def test_what_was_never_read_counts_for_nothing(site: Site, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    Fault(monkeypatch, number)
    with pytest.raises(RegistryUnreadable):
        site.answers()


def test_the_gate_lets_nobody_new_in_and_keeps_who_is_in(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    access_check = AccessCheck(site.listed)
    access = access_check.admit(site.pem)
    fault = Fault(monkeypatch, errno.EMFILE)
    with pytest.raises(RegistryUnreadable):
        access_check.admit(site.pem)
    assert access.refusal() is None
    site.now += HELD_OVER_S
    with pytest.raises(RegistryUnreadable):
        access.refusal()
    fault.is_over = True
    assert access.refusal() is None
    revoke(site.state, "acme")
    assert access.refusal() is WireCode.NOT_PERMITTED
    with pytest.raises(NotPermitted):
        access_check.admit(site.pem)


@pytest.mark.parametrize("damage", ["missing", "malformed", "not readable"])
def test_another_fault_admits_nobody_and_is_not_forgotten(
    site: Site, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """If the registry is missing, malformed or not readable, nobody is admitted, without a grace period. If the process
    then also runs out of file descriptors, this does not restore the earlier admissions."""
    assert site.answers() == [True, False]
    if damage == "missing":
        site.state.tenants_path.unlink()
    elif damage == "malformed":
        site.state.tenants_path.write_bytes(b"{")
    else:
        Fault(monkeypatch, errno.EACCES)
    assert site.answers() == [False, True]
    site.listed.check_current()  # the records of all tenants are known again
    Fault(monkeypatch, errno.EMFILE)
    assert site.answers() == [False, True]
    site.now += HELD_OVER_S
    if damage == "missing":  # a missing file can still be noticed
        assert site.answers() == [False, True]
    else:
        with pytest.raises(RegistryUnreadable):
            site.answers()


def in_another_process(site: Site, *command: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "provider", *command, "--state", str(site.state.path)],
        check=True, capture_output=True, timeout=WAIT_S,
    )  # fmt: skip


def test_a_revocation_is_seen_when_no_descriptor_is_left(site: Site) -> None:
    assert site.answers() == [True, False]
    in_another_process(site, "revoke", "acme")
    with exhausted():
        assert site.answers() == [False, True]
        site.listed.check_current()


def test_a_change_is_not_taken_for_a_revocation_of_everybody_when_not_even_the_spare_is_left(
    site: Site, tmp_path: Path
) -> None:
    assert site.answers() == [True, False]
    enroll(site.state, "other", tmp_path / "other", ENDPOINT)
    site.listed._spare.close()  # another thread has used the spare
    with exhausted():
        assert site.answers() == [True, False]
        with pytest.raises(RegistryUnreadable):
            site.listed.check_current()
        site.now += HELD_OVER_S
        with pytest.raises(RegistryUnreadable):
            site.answers()
    assert site.answers() == [True, False]
    in_another_process(site, "revoke", "acme")
    with exhausted():
        assert site.answers() == [False, True]  # the spare descriptor is open again


def test_the_log_says_each_thing_once(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "provider.identity.revocations")
    site.answers()
    assert caplog.messages == []
    fault = Fault(monkeypatch, errno.EMFILE)
    for _ in range(3):
        site.answers()
        with pytest.raises(RegistryUnreadable):
            site.listed.check_current()
    (line,) = caplog.messages
    assert "cannot be read (Too many open files)" in line
    assert "60 s" in line
    assert "ulimit -n" in line
    site.now += HELD_OVER_S
    for _ in range(3):
        for ask in (site.listed.check_current, site.answers):
            with pytest.raises(RegistryUnreadable):
                ask()
    assert len(caplog.messages) == 2
    assert "every request is refused" in caplog.messages[1]
    fault.is_over = True
    for _ in range(3):
        site.answers()
    assert caplog.messages[2:] == ["tenants.json can be read again"]
    site.state.tenants_path.write_bytes(b"{")
    for _ in range(3):
        site.answers()
    assert len(caplog.messages) == 4
    assert "restore it from a backup" in caplog.messages[3]
    assert all("\n" not in one and "acme" not in one for one in caplog.messages)
