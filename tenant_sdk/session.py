"""This module opens a session. It connects to the providers, and sets up the trusted checkpoint, the ledger (record of
used masks), the mask and the executor, which sends calls.

Guarantees: an impossible arithmetic or `kappa`, a tokenizer that cannot be found, and one provider in place of two are
refused before a provider is contacted. Mask options are checked before the trusted checkpoint is looked for. With
`verify`, no masked row is sent before the manifest and the whole bundle have been compared with the trusted checkpoint.
If a step fails, everything that was opened is closed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import torch

from noise.ledger.ledger import Ledger
from noise.masks.gaussian_pool import NotPrivateWarning
from noise.masks.off import READABLE
from noise.options import RING_ONLY
from noise.registry import Setting, choose_arithmetic, make_scheme, readable
from noise.scheme import MaskScheme, WeightOf
from noise.verify import Verifier
from runtime.command_line import told_if_slow
from tenant_sdk import embedded
from tenant_sdk.identity import issuer_of, tenant_name
from tenant_sdk.keep import Kept, choose_kept
from tenant_sdk.model.build import context_length
from tenant_sdk.model.kept import KeptWeights
from tenant_sdk.model.send import RemoteExecutor
from tenant_sdk.plan import Plan
from tenant_sdk.prepare import settle_hints
from tenant_sdk.report import Report, unseen
from tenant_sdk.session_protocol import CheckOffer
from tenant_sdk.text.source import LocalSource, TenantText, named_text, provider_text, verified_text
from tenant_sdk.trust.bundle import default_cache, fetch_bundle, kept_beginning
from tenant_sdk.trust.compare import check_manifest_config
from tenant_sdk.trust.config_rules import check_rows_are_padded
from tenant_sdk.trust.pins import Pins, canonical_digests, spoken
from tenant_sdk.trust.weights import fetch_weights, weights_digest
from tenant_sdk.usage import OwnUsage
from tenant_sdk.warn import users_line
from wire.errors import ConfigurationError
from wire.limits import Limits
from wire.manifest import Manifest
from wire.transport.address import DEFAULT_PORT
from wire.transport.connection import Connection
from wire.transport.grpc_connection import GrpcConnection
from wire.transport.identity import TlsIdentity, load_identity
from wire.transport.ipc import folder as ipc
from wire.transport.ipc.connection import IpcConnection


class NotVerifiedWarning(UserWarning):
    """Warns that the session does not check replies, so that the privacy claim holds only against an honest-but-curious
    provider."""


class AcceptedChangeWarning(UserWarning):
    """Warns that an unverified provider's bundle has changed, and that the tenant's setting `accept_changes` allows it.

    The changed bundle is the one that later sessions expect.
    """


UNVERIFIED = (
    "replies are not verified: messages stay pseudorandom even to a provider that lies, but it may learn from whatever "
    "its lies visibly change: answers that end early or in an error, their length, timing, and released adapters or "
    "text. finetune, and generate with fixed_length=True (--fixed-length), have no such branches and stay "
    "confidential; otherwise the claim is honest-but-curious. Name a checkpoint that you trust: verify= (--verify)"
)
_WARNING = (
    "replies are not verified: the claim is against an honest-but-curious provider, and one that lies may learn from "
    "what its lies change (`tenant explain` says more). Name a checkpoint that you trust: verify= (--verify)."
)
PROVIDER_DECIDES_ROWS = (
    "Its own tokenizer decides how many rows a text takes, which is visible: name a tokenizer that you trust "
    "(tokenizer=, --tokenizer), or pad to a length just above your longest text (pad_rows=, --pad-rows)."
)


@dataclass(eq=False)
class Session:
    """Holds everything that is open between a client's `connect` and its `close`."""

    connections: tuple[Connection, ...]
    manifest: Manifest
    scheme: MaskScheme
    executor: RemoteExecutor
    verifier: Verifier | None
    tokenizer_source: LocalSource | None = None
    usage: tuple[OwnUsage, ...] = ()
    """The tenant's own counts of what it uses, one for each identity."""
    kept: Kept = field(default_factory=Kept)
    """The groups that the tenant computes itself."""

    @functools.cached_property
    def asked(self) -> Manifest:
        """Returns the manifest with those groups only that the provider is asked for."""
        return self.kept.asked(self.manifest)

    def close(self) -> None:
        """Drops secrets, closes the connections and saves what was used."""
        try:
            self.executor.close()
        finally:
            for each in self.usage:
                each.close()


def open_session(
    plan: Plan,
    report: Report = unseen,
    say: Callable[[str], object] | None = None,
    check: CheckOffer | None = None,
) -> Session:
    """Connects to the providers and prepares everything but the model.

    Args:
        plan: the client's settings.
        report: told how far the comparison with a trusted checkpoint is.
        say: called with a line about a step that takes seconds; None says nothing.
        check: called with the manifest, and with a function that returns the beginning of a file of the bundle, before
            anything else is done with them.

    Raises:
        VeilbaseError: the session cannot be opened, and nothing stays open; the class is one of wire/errors.py.
    """
    with contextlib.ExitStack() as undo:
        identities = [None if folder is None else load_identity(folder) for folder in plan.identities]
        known = _setting(plan, identities[0])
        _arithmetic(plan, known)  # before the network is used: no provider could make the setting possible
        _check_apart(plan.urls, identities)
        tokenizer_source = None if plan.tokenizer is None else _find_tokenizer(plan.tokenizer)
        if plan.mask == "off":  # gaussian-pool warns when it is made
            warnings.warn(f"{READABLE}: {readable(plan.mask)}", NotPrivateWarning, stacklevel=users_line())
        verifier = None if plan.verify is None else Verifier(plan.kappa)
        with told_if_slow(f"connecting to {' and '.join(plan.urls)}", say):  # inproc: loads the model
            connections = tuple(_connect(plan, url, each) for url, each in zip(plan.urls, identities, strict=True))
            for connection in connections:
                undo.callback(connection.close)
            usage = tuple(_count_usage(plan, identities, connections, undo))
            manifest = _common_manifest([connection.manifest() for connection in connections])
        kept = choose_kept(plan.keep, manifest)
        if check is not None:
            check(manifest, functools.partial(_beginning, plan, connections[0], manifest))
        if kept.shared:
            warnings.warn(f"keep (--keep) leaves to the provider: {kept.not_kept()}", stacklevel=users_line())
        asked = kept.asked(manifest)
        features = sum(each.in_features + each.out_features for each in asked.groups)
        setting = replace(
            known,
            weights=manifest.weights,
            offered=manifest.arithmetic,
            limits=manifest.limits,
            features=features,
        )
        own_weights: dict[int, torch.Tensor] = {}
        if plan.mask == "pad" and plan.verify is not None:
            setting = replace(setting, weight_of=own_weights.__getitem__)
        # This comes before the checkpoint is read, which may take minutes, so that a wrong option or ledger is an error
        # at once.
        scheme = make_scheme(plan.mask, _arithmetic(plan, setting), plan.mask_options, setting)
        undo.callback(scheme.close)
        found: _Compared | None = None
        if verifier is not None:
            found = _compare(plan, connections[0], manifest, report, own_weights, verifier, kept)
        weights = None if found is None else found.kept
        if found is None and kept.groups:
            weights = _fetch_kept(plan, connections[0], manifest, kept, report)
        executor = RemoteExecutor(connections, scheme, manifest.limits, verifier, weights)
        if found is not None:
            report("choosing where hints come from")
            with executor.in_session():
                line = settle_hints(scheme, asked, found.bundle, found.weight_of)
            if line is not None and say is not None:
                say(line)
        undo.pop_all()
    if verifier is None and plan.mask in RING_ONLY:
        warnings.warn(unverified(plan), NotVerifiedWarning, stacklevel=users_line())
    return Session(connections, manifest, scheme, executor, verifier, tokenizer_source, usage, kept)


def beginning_of(plan: Plan, session: Session, name: str) -> bytes:
    """Returns the beginning of a file of a session's bundle, as long as a chunk."""
    return _beginning(plan, session.connections[0], session.manifest, name)


def _beginning(plan: Plan, connection: Connection, manifest: Manifest, name: str) -> bytes:
    return kept_beginning(manifest, name, plan.cache) or next(connection.fetch(name), b"")


def _count_usage(
    plan: Plan,
    identities: Sequence[TlsIdentity | None],
    connections: Sequence[Connection],
    undo: contextlib.ExitStack,
) -> Iterator[OwnUsage]:
    """Lets each connection that has an identity count in the identity's folder."""
    for folder, identity, connection in zip(plan.identities, identities, connections, strict=True):
        if folder is not None and identity is not None:
            own = OwnUsage(folder, identity)
            undo.callback(own.close)
            connection.traffic.usage = own.counter
            yield own


def _find_tokenizer(name: str) -> LocalSource:
    from tenant_sdk.trust.checkpoint import find_tokenizer

    return find_tokenizer(name)


def open_bundle(plan: Plan, session: Session, report: Report = unseen) -> Path:
    """Returns the folder of the provider's bundle (config, tokenizer, small tensors), which is downloaded unless it is
    cached.

    The bundle of an unverified provider over the network is also compared with the digests that were pinned at first
    use. `report` is told how much was downloaded.

    Raises:
        ProviderChanged: an unverified provider changed what the tenant has used before.
        MalformedFrame: a file does not have the announced digest, or the manifest's copy of the config differs from the
            bundle's.
        ConfigurationError: the bundle or the pins cannot be stored, or padding cannot hide this model's row counts.
    """
    manifest = session.manifest
    folder = fetch_bundle(session.connections[0], manifest, plan.cache, report)
    check_manifest_config(folder, manifest)
    context_length(folder)  # raises an error if the config's context length is impossible
    if plan.bucket is not None:
        names = (layer.name for group in manifest.groups for layer in group.layers)
        check_rows_are_padded(names, manifest.config.get("model_type"))
    if session.verifier is None and not plan.urls[0].startswith(embedded.SCHEME):
        current = canonical_digests(folder, manifest)
        if session.tokenizer_source is not None:  # the unused tokenizer and template may change
            current = {part: current[part] for part in ("model", "config")}
        _check_pins(plan, manifest, current)
    return folder


def _check_pins(plan: Plan, manifest: Manifest, current: Mapping[str, str]) -> None:
    """Compares digests of what an unverified provider over the network offers with those of first use.

    Raises:
        ProviderChanged: a part has changed, which the tenant does not accept.
        ConfigurationError: the pins are damaged or cannot be written.
    """
    provider, pins = _pinned_as(plan), Pins(plan.identities[0] or plan.cache or default_cache())
    # The pins are kept under the URL, too. Under the model's name alone, a provider that renames its model would have
    # no pins.
    keys = (f"{provider} at {_place(plan.urls[0])}", f"{provider} serving {manifest.model_id}")
    changed = {part for key in keys for part in pins.check(key, current, plan.accepted_changes)}
    if changed:
        accepted = f"accepted: the provider's {spoken(sorted(changed))} changed since first use"
        warnings.warn(accepted, AcceptedChangeWarning, stacklevel=users_line())


def _fetch_kept(plan: Plan, connection: Connection, manifest: Manifest, kept: Kept, report: Report) -> KeptWeights:
    """Returns the weights of the groups that the tenant keeps, from a provider that is not verified.

    Raises:
        VeilbaseError: the provider gives none, or other ones than at first use; see `fetch_weights`.
    """
    if not plan.urls[0].startswith(embedded.SCHEME):
        _check_pins(plan, manifest, {"weights": weights_digest(manifest)})
    folder, cache = fetch_bundle(connection, manifest, plan.cache, report), plan.cache or default_cache()
    return KeptWeights(fetch_weights(connection, manifest, folder, kept.groups, cache, report))


def _pinned_as(plan: Plan) -> str:
    """Returns the key under which a provider's pins (digests from first use) are kept: certificate authority and
    tenant, or the URL if there is no identity."""
    folder = plan.identities[0]
    if folder is None:
        return _place(plan.urls[0])
    identity = load_identity(folder)
    return f"{issuer_of(identity).hex()} {tenant_name(identity)}"


def _place(url: str) -> str:
    """Returns scheme, host and port of a URL, or the folder of an ipc: URL, in one canonical spelling."""
    if url.startswith(ipc.SCHEME):
        return f"{ipc.SCHEME}{ipc.folder_of(url)}"
    parts = urlsplit(url)
    return f"{parts.scheme.lower()}://{(parts.hostname or '').lower()}:{parts.port or DEFAULT_PORT}"


def open_text(plan: Plan, session: Session, folder: Path) -> TenantText:
    """Returns the tokenizer of this session: the tenant's own if there is one, else a verified one, else the
    provider's.

    Raises:
        ConfigurationError: the tokenizer cannot be used, or the tenant's own has another vocabulary than the bundle's.
    """
    if session.tokenizer_source is not None:
        return named_text(session.tokenizer_source, folder)
    return verified_text(folder) if session.verifier is not None else provider_text(folder)


def unverified(plan: Plan) -> str:
    """Returns the warning for a session without `verify`, which also says whether the provider decides row counts."""
    if plan.tokenizer is not None or plan.bucket is not None:
        return _WARNING
    return f"{_WARNING} {PROVIDER_DECIDES_ROWS}"


def _check_apart(urls: Sequence[str], identities: Sequence[TlsIdentity | None]) -> None:
    """Raises ConfigurationError if two URLs or their certificate authorities are the same, since one provider would
    then receive both shares of every row."""
    networked = [_spelled(each) for each in urls if not each.startswith(embedded.SCHEME)]
    authorities = [issuer_of(each) for each in identities if each is not None]
    if len(set(networked)) < len(networked) or len(set(authorities)) < len(authorities):
        raise ConfigurationError("two providers were expected, got one twice: each has its own URL and authority")


def _spelled(url: str) -> str:
    return _place(url) if url.startswith(ipc.SCHEME) else url.rstrip("/").lower()


def _setting(plan: Plan, identity: TlsIdentity | None) -> Setting:
    """Returns the facts that making a mask needs (`Setting`), as far as they are known before the network is used.

    Until the manifest of a networked provider is known, its weights count as int8 and both arithmetics as offered.
    """
    return Setting(
        weights=plan.weights or "int8",
        offered=("ring", "float"),
        open_ledger=lambda: _open_ledger(plan, identity),
        hints_folder=(plan.cache or default_cache()) / "hints",
        pool_folder=(plan.cache or default_cache()) / "masks",
        num_providers=len(plan.urls),
        verified=plan.verify is not None,
        mask_device=plan.mask_device,
    )


def _arithmetic(plan: Plan, setting: Setting) -> str:
    """Returns `ring` or `float`, the arithmetic of a plan.

    Raises:
        ConfigurationError: the plan asks for an arithmetic that is impossible.
    """
    chosen = choose_arithmetic(plan.mask, plan.arithmetic, setting)
    if plan.verify is not None and chosen == "float":
        raise ConfigurationError("verify= needs ring arithmetic: floating-point replies cannot be checked exactly")
    if plan.keep and chosen == "float":
        raise ConfigurationError(
            "keep= (--keep) needs ring arithmetic, in which layers are computed here: choose arithmetic='ring', or "
            "another mask than gaussian-pool"
        )
    return chosen


def _connect(plan: Plan, url: str, identity: TlsIdentity | None) -> Connection:
    if url.startswith(embedded.SCHEME):
        return embedded.connect_inproc(url, plan.weights)
    if url.startswith(ipc.SCHEME):
        return IpcConnection(url, identity, plan.peer_uid, plan.window_device)
    return GrpcConnection(url, identity)


def _common_manifest(manifests: Sequence[Manifest]) -> Manifest:
    """Returns the first manifest, changed so that limits and arithmetics are those that all providers support, and that
    a recording is announced if any provider announces one.

    Raises:
        ConfigurationError: the providers do not serve the same weights.
    """
    first = manifests[0]
    if any(other.groups != first.groups for other in manifests[1:]):
        raise ConfigurationError("the two providers do not serve the same weights: their manifests differ")
    limits = Limits(**{name: min(getattr(each.limits, name) for each in manifests) for name in Limits.model_fields})
    arithmetic = tuple(each for each in first.arithmetic if all(each in other.arithmetic for other in manifests))
    recording = any(each.recording for each in manifests)
    return first.model_copy(update={"limits": limits, "arithmetic": arithmetic, "recording": recording})


def _open_ledger(plan: Plan, identity: TlsIdentity | None) -> Ledger:
    """Opens the ledger (the record of used seeds and blocks of masks) in the identity's folder; all clients without an
    identity share one ledger in the cache."""
    folder = plan.identities[0]
    if folder is None or identity is None:
        return Ledger.open((plan.cache or default_cache()) / "ledger", "local")
    authority = hashlib.sha256(identity.ca_pem).hexdigest()[:16]
    return Ledger.open(folder / "ledger", f"{tenant_name(identity)} of {authority}")


@dataclass(frozen=True)
class _Compared:
    """Holds what a comparison with the trusted checkpoint gives.

    Attributes:
        bundle: the folder of the provider's bundle.
        weight_of: what `TrustedCheckpoint.check_provider` returns.
        kept: the weights of the groups that the tenant keeps.
    """

    bundle: Path
    weight_of: WeightOf | None
    kept: KeptWeights


def _compare(
    plan: Plan,
    connection: Connection,
    manifest: Manifest,
    report: Report,
    own_weights: dict[int, torch.Tensor],
    verifier: Verifier,
    kept: Kept,
) -> _Compared:
    """Compares the provider with the trusted checkpoint, and gives the verifier the checkpoint's weights of all groups
    that the tenant does not keep. For mask='pad' these weights are put into `own_weights`, too, by group number.

    Raises:
        ConfigurationError: there is no such checkpoint.
        VerificationFailed: the provider offers something else than the checkpoint.
    """
    from tenant_sdk.trust.checkpoint import TrustedCheckpoint

    checkpoint = TrustedCheckpoint.open(str(plan.verify))
    folder = fetch_bundle(connection, manifest, plan.cache, report)
    cache = plan.cache or default_cache()
    kept_weights: dict[int, torch.Tensor] = {}

    def keep(group: int, weight: torch.Tensor) -> None:
        if group in kept.groups:
            if plan.keep_dtype == "int8":
                kept_weights[group] = weight.clone()  # not in the store's file, which may be removed
        elif plan.mask == "pad":
            own_weights[group] = weight

    weight_of = checkpoint.check_provider(manifest, folder, verifier, report, keep, cache, kept.groups)
    if plan.keep_dtype == "bf16":
        kept_weights = checkpoint.own_weights([manifest.groups[group] for group in sorted(kept.groups)], report)
    return _Compared(folder, weight_of, KeptWeights(kept_weights))
