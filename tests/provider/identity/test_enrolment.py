"""Tests the registry of tenants: enrolment, revocation, and the list that is checked for every request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

import provider.identity.authority as identity
import provider.identity.revocations as revocations
from provider.identity.authority import StateDir, peer_identity
from provider.identity.registry import enroll, revoke, tenants
from provider.identity.revocations import RevocationList
from tests.support.identities import ENDPOINT, assert_one_line, certificate_in, serial_of
from tests.support.waiting import WAIT_S

# ---- enrol and revoke -----------------------------------------------------------------------------------------------


def test_enroll_writes_the_identity_and_the_record(state: StateDir, tmp_path: Path) -> None:
    out = tmp_path / "deep/acme"
    record = enroll(state, "acme", out, ENDPOINT)
    assert sorted(path.name for path in out.iterdir()) == ["ca.pem", "cert.pem", "endpoint", "key.pem"]
    assert (out / "ca.pem").read_bytes() == state.ca.pem
    assert (out / "endpoint").read_text().strip() == ENDPOINT
    key = serialization.load_pem_private_key((out / "key.pem").read_bytes(), None)
    assert key.public_key() == certificate_in(out).public_key()
    assert tenants(state) == [record]
    (row,) = json.loads(state.tenants_path.read_bytes())
    assert sorted(row) == ["enrolled_at", "name", "not_after", "revoked_at", "role", "serial"]
    assert (row["name"], row["serial"], row["revoked_at"]) == ("acme", record.serial, None)
    assert b"PRIVATE" not in state.tenants_path.read_bytes()


BAD_NAMES = [
    *("", ".", "..", "../acme", "/etc/passwd", "a/b", "a\\b", "-rf", ".hidden", "_x", "Acme", "acme\n", "a b", "a\0b"),
    *("a" * 64, "ä", "a%2fb", "a?b", "a#b", "a:b", "localhost:1", "\u0430cme"),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_refused_and_touches_nothing(state: StateDir, tmp_path: Path, name: str) -> None:
    with pytest.raises(identity.InvalidTenantName) as caught:
        enroll(state, name, tmp_path / "out", ENDPOINT)
    assert_one_line(caught.value)
    assert not (tmp_path / "out").exists()
    assert tenants(state) == []
    with pytest.raises(identity.UnknownTenant) as unknown:
        revoke(state, name)
    assert_one_line(unknown.value)


def test_a_misspelt_name_gets_the_nearest(state: StateDir, tmp_path: Path) -> None:
    enroll(state, "acme", tmp_path / "out", ENDPOINT)
    with pytest.raises(identity.UnknownTenant, match=r"got 'acm': did you mean acme\? `provider tenants` lists them$"):
        revoke(state, "acm")


@pytest.mark.parametrize("name", ["a", "0", "acme.prod_eu-1", "a" * 63, "a.."])
def test_a_good_name_round_trips_through_the_certificate(state: StateDir, tmp_path: Path, name: str) -> None:
    record = enroll(state, name, tmp_path / "out", ENDPOINT)
    found = peer_identity((tmp_path / "out/cert.pem").read_bytes())
    assert (found.name, found.serial) == (name, int(record.serial, 16))


@pytest.mark.parametrize("endpoint", ["", "http://x:1", "grpcs://", "grpcs://a b", "grpcs://a\nb", "grpcs://h:1/path"])
def test_a_bad_endpoint_is_refused(state: StateDir, tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(identity.InvalidEndpoint) as caught:
        enroll(state, "acme", tmp_path / "acme", endpoint)
    assert_one_line(caught.value)


@pytest.mark.parametrize("days", [-1, 0, 3651, 10**12])
def test_a_bad_lifetime_is_refused(state: StateDir, tmp_path: Path, days: int) -> None:
    with pytest.raises(identity.InvalidLifetime) as caught:
        enroll(state, "acme", tmp_path / "acme", ENDPOINT, days=days)
    assert_one_line(caught.value)


@pytest.mark.parametrize("present", ["key.pem", "cert.pem"])
def test_an_identity_is_never_overwritten(state: StateDir, tmp_path: Path, present: str) -> None:
    out = tmp_path / "acme"
    out.mkdir()
    (out / present).write_text("precious")
    with pytest.raises(identity.IdentityNotWritten) as caught:
        enroll(state, "acme", out, ENDPOINT)
    assert_one_line(caught.value)
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [(present, "precious")]
    assert tenants(state) == []


def test_a_link_in_place_of_the_key_is_not_followed(state: StateDir, tmp_path: Path) -> None:
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme/key.pem").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(identity.IdentityNotWritten):
        enroll(state, "acme", tmp_path / "acme", ENDPOINT)
    assert not (tmp_path / "elsewhere").exists()


def test_an_output_folder_that_cannot_be_is_one_line(state: StateDir, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(identity.IdentityNotWritten) as caught:
            enroll(state, "acme", out, ENDPOINT)
        assert_one_line(caught.value)


def test_a_registry_that_cannot_be_written_leaves_no_identity(
    state: StateDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(identity.StateDamaged, match="No space left"):
        enroll(state, "acme", tmp_path / "acme", ENDPOINT)
    monkeypatch.undo()
    assert list((tmp_path / "acme").iterdir()) == []
    assert tenants(state) == []
    enroll(state, "acme", tmp_path / "acme", ENDPOINT)  # the temporary file that was left is no obstacle


def test_a_live_name_must_be_revoked_first(state: StateDir, tmp_path: Path) -> None:
    first = enroll(state, "acme", tmp_path / "1", ENDPOINT)
    with pytest.raises(identity.AlreadyEnrolled, match="revoke") as caught:
        enroll(state, "acme", tmp_path / "2", ENDPOINT)
    assert_one_line(caught.value)
    assert not (tmp_path / "2").exists()
    assert revoke(state, "acme") == 1
    assert revoke(state, "acme") == 0
    second = enroll(state, "acme", tmp_path / "2", ENDPOINT)
    assert [(record.serial, record.revoked_at is None) for record in tenants(state)] == [
        (first.serial, False),
        (second.serial, True),
    ]


def test_an_expired_name_can_be_enrolled_again(state: StateDir, tmp_path: Path) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=40)
    enroll(state, "acme", tmp_path / "1", ENDPOINT, days=30, now=long_ago)
    enroll(state, "acme", tmp_path / "2", ENDPOINT)
    assert revoke(state, "acme") == 1


def test_concurrent_enrolments_lose_no_record(state: StateDir, tmp_path: Path) -> None:
    def one(index: int) -> str:
        return enroll(StateDir(state.path), f"t{index}", tmp_path / f"t{index}", ENDPOINT).serial

    with ThreadPoolExecutor(8) as pool:
        serials = set(pool.map(one, range(24)))
    assert {record.serial for record in tenants(state)} == serials
    assert len(serials) == 24


def test_of_concurrent_enrolments_of_one_name_one_wins(state: StateDir, tmp_path: Path) -> None:
    def one(index: int) -> bool:
        try:
            enroll(state, "acme", tmp_path / str(index), ENDPOINT)
        except identity.AlreadyEnrolled:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(one, range(8))) == 1


# ---- the list that every request asks -------------------------------------------------------------------------------


def test_a_revocation_is_seen_by_a_list_that_exists_already(state: StateDir, tmp_path: Path) -> None:
    listed = RevocationList(state)
    acme = serial_of(enroll(state, "acme", tmp_path / "acme", ENDPOINT))
    other = serial_of(enroll(state, "other", tmp_path / "other", ENDPOINT))
    assert [listed.is_revoked(acme), listed.is_enrolled(acme)] == [False, True]
    revoke(StateDir(state.path), "acme")
    assert [listed.is_revoked(acme), listed.is_enrolled(acme)] == [True, False]
    assert [listed.is_revoked(other), listed.is_enrolled(other)] == [False, True]
    assert [listed.is_revoked(12345), listed.is_enrolled(12345)] == [False, False]


def test_expiry_is_seen_inside_a_long_connection(state: StateDir, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    acme = serial_of(enroll(state, "acme", tmp_path / "acme", ENDPOINT, days=1, now=now))
    assert RevocationList(state, clock=lambda: now + timedelta(hours=23)).is_enrolled(acme)
    assert not RevocationList(state, clock=lambda: now + timedelta(hours=24)).is_enrolled(acme)


def test_an_unchanged_registry_is_read_once(state: StateDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acme = serial_of(enroll(state, "acme", tmp_path / "acme", ENDPOINT))
    reads: list[int] = []
    parse = revocations.parse_records
    monkeypatch.setattr(revocations, "parse_records", lambda data: reads.append(len(data)) or parse(data))
    listed = RevocationList(state)
    with ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(listed.is_revoked, [acme] * 500))
    assert len(reads) == 1


def test_threads_see_a_revocation_as_soon_as_it_is_reported(state: StateDir, tmp_path: Path) -> None:
    acme = serial_of(enroll(state, "acme", tmp_path / "acme", ENDPOINT))
    listed, reported, stop = RevocationList(state), threading.Event(), threading.Event()
    late_yes: list[int] = []

    def ask() -> None:
        while not stop.is_set():
            was_reported = reported.is_set()
            if not listed.is_revoked(acme) and was_reported:
                late_yes.append(acme)

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        revoke(state, "acme")
        reported.set()
        for index in range(20):  # makes the readers reload the file again
            enroll(state, f"t{index}", tmp_path / f"t{index}", ENDPOINT)
        stop.set()
        for future in asking:
            future.result(WAIT_S)
    assert late_yes == []


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def edit_row(**changes: object) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        (row,) = json.loads(path.read_bytes())
        path.write_text(json.dumps([{**row, **changes}]))

    return edit


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-10]),
        lambda path: path.write_bytes(b"{}"),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.write_text(json.dumps(json.loads(path.read_bytes()) * 2)),
        make_directory,
        edit_row(name="../x"),
        edit_row(serial="XYZ"),
        edit_row(serial="12\n"),
        edit_row(revoked_at="never"),
        edit_row(revoked_at=0),
        edit_row(not_after="2030-01-01T00:00:00"),
        edit_row(surprise=1),
    ],
)
def test_a_damaged_registry_admits_nobody(state: StateDir, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    acme = serial_of(enroll(state, "acme", tmp_path / "acme", ENDPOINT))
    good = state.tenants_path.read_bytes()
    warm, never = RevocationList(state), 12345
    assert warm.is_enrolled(acme)
    damage(state.tenants_path)
    for listed in (warm, RevocationList(state)):
        for serial in (acme, never):
            assert [listed.is_revoked(serial), listed.is_enrolled(serial)] == [True, False]
    for action in (
        lambda: tenants(state),
        lambda: revoke(state, "acme"),
        lambda: enroll(state, "b", tmp_path / "b", ENDPOINT),
    ):
        with pytest.raises(identity.StateDamaged) as caught:
            action()
        assert_one_line(caught.value)
    assert StateDir(state.path).ca.pem == state.ca.pem  # opening does not repair it into an empty one
    assert warm.is_revoked(acme)
    if state.tenants_path.is_dir():
        state.tenants_path.rmdir()
    state.tenants_path.write_bytes(good)
    assert warm.is_enrolled(acme)
