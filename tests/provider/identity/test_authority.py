"""Tests the provider's certificate authority: its folder, its certificates, and the name that a certificate gives."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

import provider.identity.authority as identity
from provider.identity.authority import StateDir, issue_server_certificate, peer_identity
from provider.identity.registry import enroll
from tests.support.files import mode
from tests.support.identities import ENDPOINT, assert_one_line, certificate_in
from tests.support.repository import ROOT
from tests.support.threads import together
from tests.support.waiting import WAIT_S
from wire.errors import AccessError, Unauthenticated, WireCode, code_of

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
            cwd=ROOT,
        )

    children = [start() for _ in range(2)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "imported\n"
    for child in children:  # both have finished their imports, so the race begins now
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    answers = [child.communicate(timeout=WAIT_S)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert answers[0] == answers[1] == StateDir(tmp_path / "state").ca.pem.decode()


def test_threads_that_start_at_once_end_with_one_ca(tmp_path: Path) -> None:
    assert len(set(together(8, lambda: StateDir(tmp_path / "state").ca.pem))) == 1


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


@pytest.mark.parametrize("missing", ["ca.pem", "ca_key.pem"])
def test_an_authority_that_was_not_written_whole_is_made_anew(tmp_path: Path, missing: str) -> None:
    """A first start that was interrupted, or met a full disk, leaves one of both files."""
    state = StateDir(tmp_path / "state")
    (state.path / missing).unlink()
    with pytest.raises(identity.StateDamaged, match="only one"):
        StateDir(state.path, create=False)
    again = StateDir(state.path)
    assert again.ca.pem != state.ca.pem
    assert StateDir(state.path).ca.pem == again.ca.pem


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
def test_a_damaged_state_is_one_line_and_no_new_ca(
    state: StateDir, tmp_path: Path, damage: Callable[[StateDir], None]
) -> None:
    enroll(state, "globex", tmp_path / "globex", ENDPOINT)
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
    assert sorted(path.name for path in state.path.iterdir()) == before  # no file was added


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
        (uri("veilbase://shard/acme"), [CLIENT]),
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
    assert peer_identity(signed(state, [ACME], [CLIENT])).name == "acme"  # otherwise the refusals show nothing


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
