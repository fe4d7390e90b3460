"""The provider's CA, its certificates in real TLS and gRPC handshakes, and the tenant registry."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

import provider.identity.authority as identity
import provider.identity.registry as registry
from provider.identity.authority import StateDir, issue_server_certificate, peer_identity
from provider.identity.registry import RevocationList, enroll, revoke, tenants
from wire.errors import AccessError, Unauthenticated, WireCode, code_of

ENDPOINT = "grpcs://localhost:8443"
REPOSITORY = Path(__file__).resolve().parents[3]
TIMEOUT_S = 60


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def certificate_in(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())


def assert_one_line(exc: BaseException) -> None:
    assert "\n" not in str(exc)
    assert "PRIVATE" not in str(exc)
    assert isinstance(exc, AccessError)


# ---- state directory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        state = StateDir(tmp_path / "state")
        enroll(state, "acme", tmp_path / "acme", ENDPOINT)
    finally:
        os.umask(before)
    assert mode(state.path) == 0o700
    assert mode(tmp_path / "acme") == 0o700
    for private in (state.ca_key_path, state.tenants_path, state.path / "lock", tmp_path / "acme/key.pem"):
        assert mode(private) == 0o600


def test_keys_are_created_exclusively_and_private_from_the_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: dict[str, tuple[int, int]] = {}
    real_open = os.open

    def watch(path: str | Path, flags: int, mode: int = 0o777, **rest: int) -> int:
        opened[Path(path).name] = (flags, mode)
        return real_open(path, flags, mode, **rest)

    monkeypatch.setattr(os, "open", watch)
    enroll(StateDir(tmp_path / "state"), "acme", tmp_path / "acme", ENDPOINT)
    for name in ("ca_key.pem", "key.pem"):
        flags, created_mode = opened[name]
        assert flags & os.O_EXCL
        assert flags & os.O_CREAT
        assert created_mode == 0o600


def test_ca_certificate_has_the_agreed_extensions(state: StateDir) -> None:
    ca = state.ca.certificate
    assert isinstance(ca.public_key(), ec.EllipticCurvePublicKey)
    constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    usage = ca.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (usage.key_cert_sign, usage.crl_sign, usage.digital_signature) == (True, True, False)
    subject_key = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    assert ca.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier == subject_key
    assert timedelta(days=3649) < ca.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=3650)


def test_a_second_opening_finds_the_same_ca(state: StateDir) -> None:
    assert StateDir(state.path).ca.pem == state.ca.pem == StateDir(state.path, create=False).ca.pem


OPEN_STATE = """
import sys
from provider.identity.authority import StateDir
print("imported", flush=True)
sys.stdin.readline()
sys.stdout.write(StateDir(sys.argv[1]).ca.pem.decode())
"""


def test_processes_that_start_at_once_end_with_one_ca(tmp_path: Path) -> None:
    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", OPEN_STATE, str(tmp_path / "state")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )

    children = [start() for _ in range(2)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "imported\n"
    for child in children:  # both have done their imports: now the race
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    answers = [child.communicate(timeout=TIMEOUT_S)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert answers[0] == answers[1] == StateDir(tmp_path / "state").ca.pem.decode()


def test_threads_that_start_at_once_end_with_one_ca(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def open_state(_: int) -> bytes:
        barrier.wait(TIMEOUT_S)
        return StateDir(tmp_path / "state").ca.pem

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(open_state, range(8)))) == 1


def corrupt_key(state: StateDir) -> None:
    state.ca_key_path.write_bytes(state.ca_key_path.read_bytes()[:80])


def swap_key(state: StateDir) -> None:
    other = StateDir(state.path.parent / "other")
    state.ca_key_path.write_bytes(other.ca_key_path.read_bytes())


def leaf_for_ca(state: StateDir) -> None:
    _, leaf, _ = issue_server_certificate(state, "127.0.0.1")
    state.ca_path.write_bytes(leaf)


def lose_ca(state: StateDir) -> None:
    enroll(state, "acme", state.path.parent / "acme", ENDPOINT)
    state.ca_path.unlink()
    state.ca_key_path.unlink()


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.ca_path.unlink(),
        lambda state: state.ca_key_path.unlink(),
        lambda state: state.ca_path.write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
        lambda state: state.ca_path.write_bytes(b""),
        lambda state: state.ca_key_path.chmod(0o644),
        lambda state: state.path.chmod(0o777),
        corrupt_key,
        swap_key,
        leaf_for_ca,
        lose_ca,
    ],
)
def test_a_damaged_state_is_one_line_and_no_new_ca(state: StateDir, damage: Callable[[StateDir], None]) -> None:
    damage(state)
    files = sorted(path.name for path in state.path.iterdir())
    with pytest.raises(identity.StateDamaged) as caught:
        StateDir(state.path)
    assert_one_line(caught.value)
    assert sorted(path.name for path in state.path.iterdir()) == files


def test_an_expired_ca_is_refused(tmp_path: Path) -> None:
    StateDir(tmp_path / "state", now=datetime.now(UTC) - timedelta(days=3651))
    with pytest.raises(identity.StateDamaged, match="expired"):
        StateDir(tmp_path / "state")


def test_a_reading_command_makes_no_ca(tmp_path: Path) -> None:
    with pytest.raises(identity.StateDamaged, match="--state"):
        StateDir(tmp_path / "typo", create=False)
    assert not (tmp_path / "typo").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(identity.StateDamaged):
        StateDir(tmp_path / "file")


# ---- what stands in the certificates --------------------------------------------------------------------------------


def usages_of(certificate: x509.Certificate) -> list[x509.ObjectIdentifier]:
    return list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def test_server_certificate(state: StateDir) -> None:
    before = sorted(path.name for path in state.path.iterdir())
    _, cert_pem, ca_pem = issue_server_certificate(state, "127.0.0.1", ["gpu7.example.org", "10.1.2.3"])
    certificate = x509.load_pem_x509_certificate(cert_pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"localhost", socket.gethostname(), "gpu7.example.org"} <= set(names.get_values_for_type(x509.DNSName))
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address("127.0.0.1"),
        ipaddress.ip_address("::1"),
        ipaddress.ip_address("10.1.2.3"),
    ]
    assert usages_of(certificate) == [ExtendedKeyUsageOID.SERVER_AUTH]
    now = datetime.now(UTC)
    assert timedelta(minutes=59) < now - certificate.not_valid_before_utc < timedelta(minutes=61)
    assert timedelta(days=396) < certificate.not_valid_after_utc - now <= timedelta(days=397)
    assert ca_pem == state.ca.pem
    assert sorted(path.name for path in state.path.iterdir()) == before  # nothing was saved


@pytest.mark.parametrize("host", ["10.1.2.3", "fe80::1", "[2001:db8::1]"])
def test_server_certificate_for_an_address(state: StateDir, host: str) -> None:
    _, cert_pem, _ = issue_server_certificate(state, host)
    names = x509.load_pem_x509_certificate(cert_pem).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert ipaddress.ip_address(host.strip("[]")) in names.value.get_values_for_type(x509.IPAddress)


def test_server_certificate_never_outlives_the_ca(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state", now=datetime.now(UTC) - timedelta(days=3600))
    _, cert_pem, _ = issue_server_certificate(state, "localhost")
    assert x509.load_pem_x509_certificate(cert_pem).not_valid_after_utc == state.ca.certificate.not_valid_after_utc


@pytest.mark.parametrize("host", ["", "*", "*.example.org", "a b", "host\n", "höst", "x" * 300, "a..b", "h/x", "h:1"])
def test_a_host_that_cannot_be_named_is_refused(state: StateDir, host: str) -> None:
    with pytest.raises(identity.InvalidHost) as caught:
        issue_server_certificate(state, host)
    assert_one_line(caught.value)


def test_tenant_certificate(state: StateDir, tmp_path: Path) -> None:
    record = enroll(state, "acme", tmp_path / "acme", ENDPOINT, days=30)
    certificate = certificate_in(tmp_path / "acme")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.UniformResourceIdentifier("veilbase://tenant/acme")]
    assert usages_of(certificate) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert timedelta(minutes=59) < datetime.now(UTC) - certificate.not_valid_before_utc < timedelta(minutes=61)
    assert certificate.not_valid_after_utc == record.not_after == record.enrolled_at + timedelta(days=30)
    assert int(record.serial, 16) == certificate.serial_number


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
    enroll(state, "acme", tmp_path / "acme", ENDPOINT)  # the left-over temporary file is no obstacle


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


def serial_of(record: registry.TenantRecord) -> int:
    return int(record.serial, 16)


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
    parse = registry._parse
    monkeypatch.setattr(registry, "_parse", lambda data: reads.append(len(data)) or parse(data))
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
        for index in range(20):  # further reloads under the readers
            enroll(state, f"t{index}", tmp_path / f"t{index}", ENDPOINT)
        stop.set()
        for future in asking:
            future.result(TIMEOUT_S)
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
    assert StateDir(state.path).ca.pem == state.ca.pem  # and an opening does not repair it into an empty one
    assert warm.is_revoked(acme)
    if state.tenants_path.is_dir():
        state.tenants_path.rmdir()
    state.tenants_path.write_bytes(good)
    assert warm.is_enrolled(acme)


# ---- whom a certificate names ---------------------------------------------------------------------------------------


def signed(state: StateDir, names: list[x509.GeneralName] | None, usages: list[x509.ObjectIdentifier] | None) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(state.ca.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
    )
    if names is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if usages is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(state.ca.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


ACME = x509.UniformResourceIdentifier("veilbase://tenant/acme")
CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


def uri(text: str) -> list[x509.GeneralName]:
    return [x509.UniformResourceIdentifier(text)]


@pytest.mark.parametrize(
    ("names", "usages"),
    [
        (None, [CLIENT]),
        ([ACME], None),
        ([ACME], [SERVER]),
        ([ACME], [CLIENT, SERVER]),
        ([ACME], [ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE]),
        ([ACME, ACME], [CLIENT]),
        ([ACME, x509.UniformResourceIdentifier("veilbase://tenant/other")], [CLIENT]),
        ([ACME, x509.DNSName("localhost")], [CLIENT]),
        ([x509.DNSName("acme")], [CLIENT]),
        ([x509.RFC822Name("veilbase://tenant/acme")], [CLIENT]),
        (uri("veilbase://tenant/"), [CLIENT]),
        (uri("veilbase://tenant/../x"), [CLIENT]),
        (uri("veilbase://tenant/acme/"), [CLIENT]),
        (uri("veilbase://tenant/acme\n"), [CLIENT]),
        (uri("veilbase://tenant/ACME"), [CLIENT]),
        (uri("VEILBASE://tenant/acme"), [CLIENT]),
        (uri("veilbase://server/acme"), [CLIENT]),
        (uri("acme"), [CLIENT]),
    ],
)
def test_a_certificate_that_names_no_tenant_is_refused(
    state: StateDir, names: list[x509.GeneralName] | None, usages: list[x509.ObjectIdentifier] | None
) -> None:
    with pytest.raises(identity.InvalidPeerCertificate) as caught:
        peer_identity(signed(state, names, usages))
    assert_one_line(caught.value)
    assert code_of(caught.value) is WireCode.UNAUTHENTICATED


def test_a_tenant_certificate_made_by_hand_is_accepted(state: StateDir) -> None:
    assert peer_identity(signed(state, [ACME], [CLIENT])).name == "acme"  # or the refusals above would prove nothing


def test_a_role_is_not_another(state: StateDir, tmp_path: Path) -> None:
    enroll(state, "acme", tmp_path / "acme", ENDPOINT)
    enroll(state, "host", tmp_path / "host", ENDPOINT, role="shard")
    tenant, shard = ((tmp_path / name / "cert.pem").read_bytes() for name in ("acme", "host"))
    assert (peer_identity(tenant).name, peer_identity(shard, "shard").name) == ("acme", "host")
    for certificate, role in ((tenant, "shard"), (shard, "tenant")):
        with pytest.raises(identity.InvalidPeerCertificate, match=f"expected a {role}'s certificate"):
            peer_identity(certificate, role)  # type: ignore[arg-type]


def test_bytes_that_are_no_certificate_are_refused(state: StateDir, tmp_path: Path) -> None:
    enroll(state, "acme", tmp_path / "acme", ENDPOINT)
    pem = (tmp_path / "acme/cert.pem").read_bytes()
    for text in (b"", b"junk", pem[:-40], pem + pem, state.ca.pem, (tmp_path / "acme/key.pem").read_bytes()):
        with pytest.raises(identity.InvalidPeerCertificate):
            peer_identity(text)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_a_flipped_byte_raises_only_the_typed_error(state: StateDir, tmp_path: Path) -> None:
    enroll(state, "acme", tmp_path / "acme", ENDPOINT)
    der = certificate_in(tmp_path / "acme").public_bytes(serialization.Encoding.DER)
    num_refused = 0
    for position in range(len(der)):
        for value in (0x00, 0xFF, der[position] ^ 1):
            changed = der[:position] + bytes([value]) + der[position + 1 :]
            try:
                peer_identity(ssl.DER_cert_to_PEM_cert(changed).encode())
            except Unauthenticated:
                num_refused += 1
    assert num_refused > 0


def test_every_error_is_an_access_error() -> None:
    own = [kind for kind in vars(identity).values() if getattr(kind, "__module__", "") == identity.__name__]
    errors = [kind for kind in own if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(errors) == 9
    assert all(issubclass(kind, AccessError) for kind in errors)


def test_no_key_in_a_repr(state: StateDir) -> None:
    assert "key" not in repr(state.ca).lower()


# ---- TLS over loopback ----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    server_error: OSError | None = None
    client_error: OSError | None = None
    version: str | None = None
    peer_der: bytes | None = None


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> Outcome:
    """One connection; both sides exchange a byte, since TLS 1.3 tells a client of a refusal only when it reads."""
    outcome = Outcome()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            raw, _ = listener.accept()
            raw.settimeout(TIMEOUT_S)
            with raw:
                try:
                    with server.wrap_socket(raw, server_side=True) as secured:
                        outcome.version, outcome.peer_der = secured.version(), secured.getpeercert(binary_form=True)
                        secured.sendall(b"!")
                        secured.recv(1)
                except OSError as exc:
                    outcome.server_error = exc

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), TIMEOUT_S) as raw,
                client.wrap_socket(raw, server_hostname=host) as secured,
            ):
                assert secured.recv(1) == b"!"
                secured.sendall(b"!")
        except OSError as exc:
            outcome.client_error = exc
        thread.join(TIMEOUT_S)
    return outcome


def load_pair(context: ssl.SSLContext, key_pem: bytes, cert_pem: bytes, folder: Path) -> None:
    folder.mkdir(exist_ok=True)  # ssl takes a key from a file only
    (folder / "pair.pem").write_bytes(key_pem + cert_pem)
    context.load_cert_chain(folder / "pair.pem")


def server_context(state: StateDir, folder: Path, host: str = "127.0.0.1") -> ssl.SSLContext:
    key_pem, cert_pem, ca_pem = issue_server_certificate(state, host)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=ca_pem.decode())
    context.verify_mode = ssl.CERT_REQUIRED
    load_pair(context, key_pem, cert_pem, folder / "server-pair")
    return context


def client_context(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "gpu7.example.org"])
def test_a_tenant_is_accepted_over_tls_1_3(state: StateDir, tmp_path: Path, host: str) -> None:
    record = enroll(state, "acme", tmp_path / "acme", ENDPOINT)
    server = server_context(state, tmp_path, "gpu7.example.org")
    outcome = handshake(server, client_context(tmp_path / "acme"), host)
    assert (outcome.server_error, outcome.client_error, outcome.version) == (None, None, "TLSv1.3")
    assert outcome.peer_der is not None
    found = peer_identity(ssl.DER_cert_to_PEM_cert(outcome.peer_der).encode())
    assert (found.name, found.serial) == ("acme", serial_of(record))


def test_the_server_is_refused_under_another_name(state: StateDir, tmp_path: Path) -> None:
    enroll(state, "acme", tmp_path / "acme", ENDPOINT)
    outcome = handshake(server_context(state, tmp_path), client_context(tmp_path / "acme"), "elsewhere.example.org")
    assert "Hostname mismatch" in str(outcome.client_error)


@pytest.mark.parametrize("check_hostname", [True, False])
def test_a_tenant_cannot_act_as_the_server(state: StateDir, tmp_path: Path, check_hostname: bool) -> None:
    enroll(state, "victim", tmp_path / "victim", ENDPOINT)
    enroll(state, "localhost", tmp_path / "localhost", ENDPOINT)  # the name most like a server's
    impostor = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    impostor.load_cert_chain(tmp_path / "localhost/cert.pem", tmp_path / "localhost/key.pem")
    victim = client_context(tmp_path / "victim")
    victim.check_hostname = check_hostname  # off: the extended key usage alone must stop it
    outcome = handshake(impostor, victim)
    assert isinstance(outcome.client_error, ssl.SSLCertVerificationError)
    assert "purpose" in str(outcome.client_error)


def test_the_server_cannot_act_as_a_tenant(state: StateDir, tmp_path: Path) -> None:
    key_pem, cert_pem, ca_pem = issue_server_certificate(state, "localhost")
    client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=ca_pem.decode())
    load_pair(client, key_pem, cert_pem, tmp_path / "client-pair")
    assert "purpose" in str(handshake(server_context(state, tmp_path), client).server_error)


def test_a_client_without_a_certificate_is_refused(state: StateDir, tmp_path: Path) -> None:
    client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=state.ca.pem.decode())
    outcome = handshake(server_context(state, tmp_path), client)
    assert isinstance(outcome.server_error, ssl.SSLError)
    assert outcome.client_error is not None


def test_another_providers_tenant_is_refused(state: StateDir, tmp_path: Path) -> None:
    foreign = StateDir(tmp_path / "foreign")  # its CA has the same subject: only the signature tells them apart
    assert foreign.ca.certificate.subject == state.ca.certificate.subject
    enroll(foreign, "acme", tmp_path / "acme", ENDPOINT)
    (tmp_path / "acme/ca.pem").write_bytes(state.ca.pem)
    outcome = handshake(server_context(state, tmp_path), client_context(tmp_path / "acme"))
    assert isinstance(outcome.server_error, ssl.SSLCertVerificationError)


def test_an_unrelated_cas_client_is_refused(state: StateDir, tmp_path: Path) -> None:
    client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=state.ca.pem.decode())
    trustme.CA().issue_cert("acme").configure_cert(client)
    outcome = handshake(server_context(state, tmp_path), client)
    assert isinstance(outcome.server_error, ssl.SSLCertVerificationError)


def test_a_tenant_cannot_issue_certificates(state: StateDir, tmp_path: Path) -> None:
    enroll(state, "acme", tmp_path / "acme", ENDPOINT)
    key = serialization.load_pem_private_key((tmp_path / "acme/key.pem").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    acme = identity.CertificateAuthority(certificate_in(tmp_path / "acme"), key)
    key_pem, forged = identity.issue_tenant_certificate(acme, "other", 1, datetime.now(UTC))
    client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=state.ca.pem.decode())
    chain = forged.public_bytes(serialization.Encoding.PEM) + (tmp_path / "acme/cert.pem").read_bytes()
    load_pair(client, key_pem, chain, tmp_path / "forged")
    outcome = handshake(server_context(state, tmp_path), client)
    assert isinstance(outcome.server_error, ssl.SSLCertVerificationError)


def test_an_expired_tenant_is_refused(state: StateDir, tmp_path: Path) -> None:
    enroll(state, "acme", tmp_path / "acme", ENDPOINT, days=30, now=datetime.now(UTC) - timedelta(days=31))
    outcome = handshake(server_context(state, tmp_path), client_context(tmp_path / "acme"))
    assert isinstance(outcome.server_error, ssl.SSLCertVerificationError)
    assert "expired" in str(outcome.server_error)


# ---- gRPC, which verifies with BoringSSL and not with OpenSSL -------------------------------------------------------


class WhoAmI(grpc.GenericRpcHandler):
    """Answers with the tenant's name."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
            return peer_identity(context.auth_context()["x509_pem_cert"][0]).name.encode()

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def serve() -> Iterator[Callable[[grpc.ServerCredentials], int]]:
    servers: list[grpc.Server] = []

    def start(credentials: grpc.ServerCredentials) -> int:
        server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(WhoAmI(),))
        servers.append(server)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        return port

    yield start
    for server in servers:
        server.stop(None).wait(TIMEOUT_S)


def who_am_i(port: int, folder: Path) -> bytes:
    parts = [(folder / name).read_bytes() for name in ("ca.pem", "key.pem", "cert.pem")]
    with grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(*parts)) as channel:
        answer: bytes = channel.unary_unary("/veilbase/WhoAmI")(b"", timeout=TIMEOUT_S)
        return answer


def test_grpc_names_the_tenant(state: StateDir, tmp_path: Path, serve: Callable[[grpc.ServerCredentials], int]) -> None:
    key_pem, cert_pem, ca_pem = issue_server_certificate(state, "127.0.0.1")
    port = serve(grpc.ssl_server_credentials([(key_pem, cert_pem)], ca_pem, require_client_auth=True))
    enroll(state, "acme", tmp_path / "acme", ENDPOINT)
    assert who_am_i(port, tmp_path / "acme") == b"acme"
    enroll(state, "old", tmp_path / "old", ENDPOINT, days=30, now=datetime.now(UTC) - timedelta(days=31))
    enroll(StateDir(tmp_path / "foreign"), "acme", tmp_path / "foreigner", ENDPOINT)
    (tmp_path / "foreigner/ca.pem").write_bytes(ca_pem)
    for folder in ("old", "foreigner"):
        with pytest.raises(grpc.RpcError) as caught:
            who_am_i(port, tmp_path / folder)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_grpc_refuses_a_tenant_as_the_server(
    state: StateDir, tmp_path: Path, serve: Callable[[grpc.ServerCredentials], int]
) -> None:
    enroll(state, "localhost", tmp_path / "impostor", ENDPOINT)
    enroll(state, "victim", tmp_path / "victim", ENDPOINT)
    key_pem, cert_pem = ((tmp_path / "impostor" / name).read_bytes() for name in ("key.pem", "cert.pem"))
    port = serve(grpc.ssl_server_credentials([(key_pem, cert_pem)], state.ca.pem, require_client_auth=True))
    with pytest.raises(grpc.RpcError) as caught:
        who_am_i(port, tmp_path / "victim")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
