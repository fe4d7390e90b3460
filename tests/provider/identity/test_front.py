"""Tests a provider's identity without the CA's key: the server certificate, and the signed copy of the registry."""

from __future__ import annotations

import base64
import errno
import fcntl
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from provider.identity.authority import IdentityNotWritten, StateDamaged, StateDir
from provider.identity.front import FrontFiles, FrontIdentity, export_registry, export_server_identity
from provider.identity.registry import enroll, revoke
from provider.identity.revocations import RegistryUnreadable, RevocationList
from provider.net.server import Server
from tests.support.identities import ENDPOINT, assert_one_line, certificate_in
from tests.support.providers import Fault
from tests.support.waiting import WAIT_S

MAX_AGE_S = 3600.0


@pytest.fixture
def files(state: StateDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FrontFiles:
    """Returns the files of a provider on another host, with one tenant in the registry."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # Whoever runs the tests may have a CA of their own.
    enroll(state, "acme", tmp_path / "acme", ENDPOINT)
    front = tmp_path / "front"
    export_server_identity(state, front, "127.0.0.1")
    export_registry(state, front / "registry")
    return FrontFiles(front / "server_cert.pem", front / "server_key.pem", front / "registry", MAX_AGE_S)


def listed(files: FrontFiles, folder: Path, later: timedelta = timedelta()) -> RevocationList:
    front = FrontIdentity(files, folder)
    return RevocationList(front, read=front.read_registry, clock=lambda: datetime.now(UTC) + later)


def test_a_copy_admits_and_revokes_as_the_registry_does(state: StateDir, files: FrontFiles, tmp_path: Path) -> None:
    known, acme = listed(files, tmp_path / "own"), certificate_in(tmp_path / "acme").serial_number
    assert known.is_enrolled(acme)
    assert not known.is_revoked(acme)
    revoke(state, "acme")
    assert known.is_enrolled(acme)  # The copy does not know yet.
    export_registry(state, files.registry)
    assert not known.is_enrolled(acme)
    assert known.is_revoked(acme)


def test_a_copy_counts_for_a_bounded_time(state: StateDir, files: FrontFiles, tmp_path: Path) -> None:
    acme = certificate_in(tmp_path / "acme").serial_number
    young = timedelta(seconds=MAX_AGE_S - 60)
    assert listed(files, tmp_path / "own", young).is_enrolled(acme)
    late = listed(files, tmp_path / "own", timedelta(seconds=MAX_AGE_S))
    for ask in (late.is_enrolled, late.is_revoked, lambda _: late.check_current()):
        with pytest.raises(RegistryUnreadable):  # Tenants wait for a new copy, and do not hear that they are revoked.
            ask(acme)
    export_registry(state, files.registry, now=datetime.now(UTC) - timedelta(seconds=MAX_AGE_S))
    with pytest.raises(StateDamaged, match="older than 3600 s") as caught:
        FrontIdentity(files, tmp_path / "own")
    assert_one_line(caught.value)


def test_the_age_counts_when_the_clock_is_set_back(files: FrontFiles, tmp_path: Path) -> None:
    front, started, seconds = FrontIdentity(files, tmp_path / "own"), datetime.now(UTC), 1000.0
    known = RevocationList(front, read=front.read_registry, clock=lambda: started, monotonic=lambda: seconds)
    acme = certificate_in(tmp_path / "acme").serial_number
    assert known.is_enrolled(acme)
    assert known.seconds_left() == pytest.approx(MAX_AGE_S, abs=WAIT_S)
    seconds += MAX_AGE_S
    assert known.seconds_left() == 0
    with pytest.raises(RegistryUnreadable):
        known.is_enrolled(acme)


def test_a_new_copy_that_cannot_be_read_does_not_make_the_old_one_count(
    files: FrontFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, now = FrontIdentity(files, tmp_path / "own"), datetime.now(UTC)
    known = RevocationList(front, read=front.read_registry, clock=lambda: now, monotonic=lambda: 1000.0)
    acme = certificate_in(tmp_path / "acme").serial_number
    assert known.is_enrolled(acme)
    files.registry.touch()
    Fault(monkeypatch, errno.EMFILE)
    assert known.is_enrolled(acme)  # as with any registry, for a minute at most
    now += timedelta(seconds=MAX_AGE_S)
    with pytest.raises(RegistryUnreadable):
        known.is_enrolled(acme)


def test_an_older_copy_does_not_take_back_a_revocation(state: StateDir, files: FrontFiles, tmp_path: Path) -> None:
    older, acme = files.registry.read_bytes(), certificate_in(tmp_path / "acme").serial_number
    known = listed(files, tmp_path / "own")
    assert known.is_enrolled(acme)
    revoke(state, "acme")
    export_registry(state, files.registry)
    assert known.is_revoked(acme)
    files.registry.write_bytes(older)
    assert known.is_revoked(acme)


def test_no_revocation_comes_between_a_copys_reading_and_its_writing(
    state: StateDir, files: FrontFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise this copy could replace one that was made after the revocation."""
    replace, written = Path.replace, []

    def replace_under_lock(self: Path, target: Path) -> Path:
        with (state.path / "lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        written.append(target)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_under_lock)
    export_registry(state, files.registry)
    assert written == [files.registry]


def test_a_copy_that_is_too_large_admits_nobody(
    files: FrontFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, acme = listed(files, tmp_path / "own"), certificate_in(tmp_path / "acme").serial_number
    monkeypatch.setattr("provider.identity.revocations.MOST_BYTES", files.registry.stat().st_size - 1)
    assert not known.is_enrolled(acme)


def changed(data: bytes) -> bytes:
    return data.replace(b"acme", b"evil")


def without_signature(data: bytes) -> bytes:
    return base64.b64encode(b"") + data[data.index(b"\n") :]


@pytest.mark.parametrize("damage", [changed, without_signature, lambda data: b"", lambda data: data[:-1]])
def test_a_copy_that_the_ca_did_not_sign_admits_nobody(
    files: FrontFiles, tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    known, acme = listed(files, tmp_path / "own"), certificate_in(tmp_path / "acme").serial_number
    assert known.is_enrolled(acme)
    files.registry.write_bytes(damage(files.registry.read_bytes()))  # type: ignore[operator]
    assert not known.is_enrolled(acme)
    assert known.is_revoked(acme)
    assert "evil" not in caplog.text
    with pytest.raises(StateDamaged, match="export-registry") as caught:
        FrontIdentity(files, tmp_path / "own")
    assert_one_line(caught.value)


def test_a_copy_of_another_ca_or_of_the_future_is_refused(files: FrontFiles, state: StateDir, tmp_path: Path) -> None:
    export_registry(StateDir(tmp_path / "other"), files.registry)
    with pytest.raises(StateDamaged, match="export-registry"):
        FrontIdentity(files, tmp_path / "own")
    export_registry(state, files.registry, now=datetime.now(UTC) + timedelta(days=30))
    with pytest.raises(StateDamaged, match="export-registry"):
        FrontIdentity(files, tmp_path / "own")


def test_a_provider_beside_a_ca_key_does_not_start(state: StateDir, files: FrontFiles, tmp_path: Path) -> None:
    for folder in (state.path, tmp_path / "own"):
        if folder != state.path:
            (files.server_key.parent / "ca_key.pem").write_bytes(state.ca_key_path.read_bytes())
        with pytest.raises(StateDamaged, match="on another host") as caught:
            FrontIdentity(files, folder)
        assert_one_line(caught.value)


def test_a_ca_key_behind_a_link_or_in_its_usual_folder_is_found(
    state: StateDir, files: FrontFiles, tmp_path: Path
) -> None:
    FrontIdentity(files, tmp_path / "own")
    files.registry.rename(state.path / "copy")
    files.registry.symlink_to(state.path / "copy")
    with pytest.raises(StateDamaged, match="on another host"):
        FrontIdentity(files, tmp_path / "own")
    files.registry.unlink()
    (state.path / "copy").rename(files.registry)
    usual = tmp_path / "home/.veilbase/provider"
    usual.mkdir(parents=True)
    (usual / "ca_key.pem").write_bytes(state.ca_key_path.read_bytes())
    with pytest.raises(StateDamaged, match="on another host"):
        FrontIdentity(files, tmp_path / "own")


def test_a_cas_key_is_no_servers_key(state: StateDir, files: FrontFiles, tmp_path: Path) -> None:
    files.server_cert.write_bytes(2 * state.ca.pem)
    files.server_key.write_bytes(state.ca_key_path.read_bytes())
    with pytest.raises(StateDamaged, match="is the CA's key") as caught:
        FrontIdentity(files, tmp_path / "own")
    assert_one_line(caught.value)


def test_files_that_do_not_belong_together_are_refused(state: StateDir, files: FrontFiles, tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    export_server_identity(state, other, "127.0.0.1")
    FrontIdentity(files, own)
    with pytest.raises(StateDamaged, match="is not the key of"):
        FrontIdentity(FrontFiles(files.server_cert, other / "server_key.pem", files.registry, MAX_AGE_S), own)
    with pytest.raises(StateDamaged, match="two certificates"):
        FrontIdentity(FrontFiles(files.server_key, files.server_key, files.registry, MAX_AGE_S), own)
    files.server_key.chmod(0o640)
    with pytest.raises(StateDamaged, match="chmod 600"):
        FrontIdentity(files, own)
    files.server_key.unlink()
    with pytest.raises(StateDamaged, match="No such file"):
        FrontIdentity(files, own)


def test_exports_are_private_and_do_not_overwrite_a_key(state: StateDir, files: FrontFiles) -> None:
    assert files.server_key.stat().st_mode & 0o777 == 0o600
    assert files.registry.stat().st_mode & 0o777 == 0o600
    assert os.listdir(files.registry.parent).count("registry") == 1
    with pytest.raises(IdentityNotWritten, match="choose another"):
        export_server_identity(state, files.server_key.parent, "127.0.0.1")
    assert state.ca_key_path.read_bytes() not in files.server_key.read_bytes()


def test_the_server_binds_with_the_given_certificate_and_reads_it_again(
    state: StateDir, files: FrontFiles, tmp_path: Path
) -> None:
    front = FrontIdentity(files, tmp_path / "own")
    server = Server("127.0.0.1", 0, front)
    try:
        assert server.port
        before = front.server_material()
        for path in (files.server_cert, files.server_key):
            path.unlink()
        export_server_identity(state, files.server_cert.parent, "127.0.0.1")
        server.renew_certificate()
        assert front.server_material()[1] != before[1]
        assert front.server_material()[2] == before[2]
    finally:
        server.stop()
