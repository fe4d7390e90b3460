"""Tests a provider's identity without the CA's key: the server certificate, and the signed copy of the registry."""

from __future__ import annotations

import base64
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from provider.identity.authority import IdentityNotWritten, StateDamaged, StateDir
from provider.identity.front import FrontFiles, FrontIdentity, export_registry, export_server_identity
from provider.identity.registry import RevocationList, enroll, revoke
from provider.net.server import Server
from tests.support.identities import ENDPOINT, assert_one_line, certificate_in

MAX_AGE_S = 3600.0


@pytest.fixture
def files(state: StateDir, tmp_path: Path) -> FrontFiles:
    """Returns the files of a provider on another host, with one tenant in the registry."""
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
    assert not listed(files, tmp_path / "own", timedelta(seconds=MAX_AGE_S)).is_enrolled(acme)
    export_registry(state, files.registry, now=datetime.now(UTC) - timedelta(seconds=MAX_AGE_S))
    with pytest.raises(StateDamaged, match="older than 3600 s") as caught:
        FrontIdentity(files, tmp_path / "own")
    assert_one_line(caught.value)


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
