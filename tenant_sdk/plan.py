"""This module checks a client's settings, and keeps them in a `Plan`, which does not change afterwards.

Guarantees: an identity that does not suit its URL, an unknown mask or mask option, and an impossible padding, device,
user id or accepted change are refused here, without the network. The addresses in URLs, `arithmetic`, `kappa`, `verify`
and `tokenizer` are only kept here; they are checked when a session is opened (tenant_sdk/session.py). Before they load
torch, which takes seconds, the commands ask `check_early` for what is wrong with them.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from noise.options import MASKS, RING_ONLY, check_hints, check_num_providers, check_options, check_precision
from noise.params import choose
from runtime.command_line import nearest
from runtime.compiled import unknown_kernels
from tenant_sdk.identity import endpoints_of
from tenant_sdk.keep import KEEP_DTYPES, check_keep_dtype, read_keep
from tenant_sdk.text.rows import bucket_tokens
from tenant_sdk.trust.bundle import check_cache
from tenant_sdk.trust.local_files import check_path, no_such
from tenant_sdk.trust.pins import PARTS
from wire.built_in import BUILT_IN
from wire.errors import ConfigurationError
from wire.model_files import check_hub_answers, existing, is_cached
from wire.transport.address import not_a_url, read_address
from wire.transport.busy_poll import tenants_most_s
from wire.transport.identity import load_identity
from wire.transport.ipc import folder as ipc

if TYPE_CHECKING:
    import torch

INPROC = "inproc:"
"""The scheme of the URL of a provider in the tenant's own process (tenant_sdk/embedded.py)."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,200})?", re.ASCII)


def _cpu() -> torch.device:
    import torch

    return torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Holds in one object the options of `TenantClient` that say what a provider is trusted with, so that several
    clients can share them. Beside `trust`, each of the client's own arguments of these names has to be left out, or to
    have the same value. One that has its default counts as left out: `TenantClient(trust=Trust(kappa=64), kappa=40)`
    takes 64.

    Attributes:
        verify: a checkpoint that the tenant trusts (folder, GGUF file, hub id or smollm2-135m). Every reply and the
            whole bundle are checked against it.
        kappa: with verify, a forged reply passes with probability at most 2^-kappa; 40 to 64.
        tokenizer: a tokenizer that the tenant trusts, which has to map tokens as the provider's tokenizer does.
        pad_rows: the number of tokens to which every prompt and training row is padded; True stands for 512, and
            False for no padding.
        accept_changes: parts of an unverified provider's offer that may differ from first use: any of "model",
            "tokenizer", "template", "config" and "weights".
    """

    verify: str | Path | None = None
    kappa: int = 40
    tokenizer: str | Path | None = None
    pad_rows: bool | int = False
    accept_changes: Sequence[str] = ()

    def beside(self, keywords: Trust) -> Trust:
        """Returns these options, after a comparison with those that were given as keyword arguments. A keyword argument
        that has its default counts as one that was not given, and this object's value holds.

        Raises:
            ConfigurationError: a keyword argument has another value than this object, and not its default.
        """
        for each in fields(Trust):
            given, own = getattr(keywords, each.name), getattr(self, each.name)
            if _comparable(each.name, given) not in (
                _comparable(each.name, each.default), _comparable(each.name, own)
            ):  # fmt: skip
                raise ConfigurationError(
                    f"{each.name} is {ascii(given)[:60]} beside trust=, whose own is {ascii(own)[:60]}: set it in "
                    "Trust(...) alone"
                )
        return self


def _comparable(name: str, value: Any) -> tuple[str, Any]:
    """Returns an option's value in a form in which those of one meaning are equal, such as a path and its text, and
    others are not, such as True and 1."""
    if name == "pad_rows":
        return ("tokens", bucket_tokens(value))
    if name == "accept_changes":
        return ("parts", frozenset(_accepted(value)))
    return ("path", str(Path(value))) if isinstance(value, str | Path) else (type(value).__name__, value)


@dataclass(frozen=True)
class Plan:
    """Holds a client's settings, as `make_plan` has checked them.

    Attributes:
        urls, identities: one URL and one identity folder for every provider; an identity is None for inproc: and for
            loopback without TLS.
        mask, arithmetic, mask_options: see `TenantClient`.
        verify: the trusted checkpoint, or None.
        kappa: with `verify`, a forged reply passes with probability at most 2^-kappa.
        weights: for an inproc: provider, `int8` or `native`, the form of its weights; None otherwise.
        cache: folder of bundles and hints, and of the ledger if the client has no identity.
        tokenizer: the tokenizer that the tenant names, or None.
        bucket: number of tokens to which prompts and training rows are padded; None if they are not padded.
        accepted_changes: parts of the provider's bundle whose change the tenant accepts.
        peer_uid: the user id that a provider on this host must have; None takes that of its folder's owner.
        device: the tenant's device.
        mask_device: the device that makes masks; None for the CPU.
        window_device: the device on which masked rows may be in memory that the provider shares; None for none.
        keep: what names the layers that the tenant computes itself, as `tenant_sdk.keep.read_keep` returns it.
        keep_dtype: `int8` or `bf16`, the type of these layers' weights.
    """

    urls: tuple[str, ...]
    identities: tuple[Path | None, ...]
    mask: str
    arithmetic: str | None
    mask_options: Mapping[str, Any] = field(repr=False)
    verify: str | None = None
    kappa: int = 40
    weights: str | None = None
    cache: Path | None = None
    tokenizer: str | None = None
    bucket: int | None = None
    accepted_changes: tuple[str, ...] = ()
    peer_uid: int | None = None
    device: torch.device = field(default_factory=_cpu)
    mask_device: torch.device | None = None
    window_device: torch.device | None = None
    keep: tuple[str, ...] = ()
    keep_dtype: str = KEEP_DTYPES[0]

    @property
    def can_be_steered(self) -> bool:
        """Returns whether a provider that lies could learn hidden data from what the tenant does with its replies.

        It could not if replies are verified, if the mask hides nothing in the first place, or if the provider runs in
        this process (`inproc:`).
        """
        return may_be_steered(self.urls, self.mask, self.verify)


def may_be_steered(urls: Sequence[str], mask: str, verify: str | None) -> bool:
    """Returns what `Plan.can_be_steered` does, for a session with these providers, mask and checkpoint."""
    return verify is None and mask in RING_ONLY and not all(url.startswith(INPROC) for url in urls)


def make_plan(
    *,
    url: str | Sequence[str] | None,
    identity: str | Path | Sequence[str | Path] | None,
    mask: str,
    verify: str | Path | None,
    arithmetic: str | None,
    mask_options: Mapping[str, Any] | None,
    kappa: int,
    weights: str | None,
    cache: str | Path | None,
    tokenizer: str | Path | None,
    pad_rows: bool | int,
    accept_changes: Sequence[str],
    peer_uid: int | None = None,
    device: str | torch.device = "cpu",
    trust_same_gpu: bool = False,
    keep: str | Sequence[str] | None = None,
    keep_dtype: str = KEEP_DTYPES[0],
) -> Plan:
    """Checks the arguments of `TenantClient`, which describes them, and returns them as a plan. The module's docstring
    says which are not checked yet.

    Raises:
        ConfigurationError: a URL, an identity or an option is impossible.
    """
    urls, identities = _providers(url, identity)
    options = _check_mask(mask, {} if mask_options is None else mask_options)
    check_precision(options, verify is not None)
    check_hints(options, verify is not None)
    _check_places(urls, identities, weights)
    _check_peer_uid(urls, peer_uid)
    return Plan(
        urls=urls,
        identities=identities,
        mask=mask,
        arithmetic=arithmetic,
        mask_options=options,
        verify=None if verify is None else str(verify),
        kappa=kappa,
        weights=weights,
        cache=None if cache is None else Path(cache),
        tokenizer=None if tokenizer is None else str(tokenizer),
        accepted_changes=_accepted(accept_changes),
        bucket=bucket_tokens(pad_rows),
        peer_uid=peer_uid,
        device=(chosen := _device(device)),
        mask_device=mask_device_of(chosen, urls, trust_same_gpu),
        window_device=chosen if chosen.type == "cuda" and trust_same_gpu else None,
        keep=(kept := read_keep(keep, _has_weights(urls, verify))),
        keep_dtype=check_keep_dtype(keep_dtype, kept, verify is not None),
    )


def mask_options(parameters: str | None, hints: str | None, pool: str | None, precision: str | None) -> dict[str, Any]:
    """Returns the options of a mask that a command's flags name."""
    given = {"parameters": parameters, "hints": hints, "pool": pool, "precision": precision}
    return {name: value for name, value in given.items() if value is not None}


def check_early(
    *, urls: Sequence[str], identities: Sequence[Path | None], mask: str, parameters: str | None, hints: str | None,
    pool: str | None, precision: str | None, verify: str | None, tokenizer: str | None, pad_rows: int | None,
    accept_changes: Sequence[str], peer_uid: int | None, keep: Sequence[str] | None = None,
    keep_dtype: str = KEEP_DTYPES[0],
) -> None:  # fmt: skip
    """Checks a command's options as far as that is possible without torch and without a provider, so that a mistake is
    told at once. It says nothing that `make_plan` and a session would not say later.

    Args:
        urls, identities: one URL and one identity, or None, for each provider.
        parameters, hints, pool, precision: the options of the mask that the commands have.
        mask, verify, tokenizer, pad_rows, accept_changes, peer_uid, keep, keep_dtype: see `TenantClient`.

    Raises:
        ConfigurationError, WeakParameters: an option is impossible, or a file that it names is not there.
    """
    given = _check_mask(mask, mask_options(parameters, hints, pool, precision))
    check_precision(given, verify is not None)
    check_hints(given, verify is not None)
    check_num_providers(mask, len(urls))
    if parameters is not None:
        choose(parameters, False)
    _check_places(urls, identities, None)
    for url, identity in zip(urls, identities, strict=True):
        if not url.startswith((INPROC, ipc.SCHEME)):
            read_address(url, identity is not None)
    _check_peer_uid(urls, peer_uid)
    _accepted(accept_changes)
    kept = read_keep(keep, _has_weights(urls, verify))
    check_keep_dtype(keep_dtype, kept, verify is not None)
    check_cache()
    tenants_most_s()
    if reason := unknown_kernels():
        raise ConfigurationError(reason)
    bucket_tokens(False if pad_rows is None else pad_rows)
    for what, name in (("checkpoint", verify), ("tokenizer", tokenizer)):
        if name is not None:
            _check_there(what, name)
    for url in urls:
        if url.startswith(INPROC):
            _check_there("model", url.removeprefix(INPROC).partition("?")[0])


def _has_weights(urls: Sequence[str], verify: str | Path | None) -> bool:
    """Returns whether kept layers can have weights: from the tenant's checkpoint, or from the first provider."""
    return verify is not None or not any(url.startswith(ipc.SCHEME) for url in urls[:1])


def _check_there(what: str, name: str) -> None:
    """Raises ConfigurationError if a name is neither a built-in one nor a path with what is expected there, and cannot
    be a hub id either, or is one that is not cached here and cannot be downloaded: that is forbidden, or there is no
    way to the hub."""
    if name in BUILT_IN:
        BUILT_IN[name].find()
        return
    if (path := existing(name)) is not None:
        check_path(what, path, name)
        return
    if HUB_ID.fullmatch(name) is None:
        raise no_such(what, name)
    from huggingface_hub.constants import is_offline_mode

    if not is_offline_mode():
        check_hub_answers(what, name)
    elif not is_cached(name):
        raise ConfigurationError(not_cached(what, name))


def not_cached(what: str, name: str) -> str:
    """Returns the error text for a hub id that is not cached here while HF_HUB_OFFLINE forbids downloads."""
    return (
        f"the {what} {name[:200]!r} is neither a path nor cached here, and HF_HUB_OFFLINE=1, which the commands set by "
        "default, forbids downloads: name a folder, or set HF_HUB_OFFLINE=0"
    )


def _check_mask(mask: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if mask not in MASKS:
        meant = nearest(mask, MASKS) if isinstance(mask, str) else None
        advice = "" if meant is None else f": did you mean {meant}?"
        raise ConfigurationError(f"mask is one of {', '.join(MASKS)}, got {mask!r}{advice}")
    return check_options(mask, options)


def _device(device: str | torch.device) -> torch.device:
    """Returns the device that the tenant names. Raises ConfigurationError if the name is not a device's, or if this
    machine lacks the CUDA device."""
    import torch

    try:
        chosen = torch.device(device)
    except RuntimeError as exc:
        raise ConfigurationError(f"expected a device such as cpu or cuda:0, got {device!r}") from exc
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device {chosen} needs an NVIDIA GPU, its driver and torch's CUDA build")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"no device {chosen}: this machine has {torch.cuda.device_count()}, counted from 0")
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())  # What is current may change later.
    return chosen


def mask_device_of(device: torch.device, urls: Sequence[str], trust_same_gpu: bool) -> torch.device | None:
    """Returns the device that makes masks, or None for the CPU. A provider on this host may compute on the same GPU, so
    secrets come there only if the user trusts that provider with it."""
    if device.type != "cuda":
        return None
    is_apart = all(each.startswith("grpcs://") and not _is_this_host(each) for each in urls)
    return device if is_apart or trust_same_gpu else None


def is_on_this_host(urls: Sequence[str]) -> bool:
    """Returns whether one of these providers is on this machine, by its URL, and shares its cores."""
    return any(each.startswith((INPROC, ipc.SCHEME)) or _is_this_host(each) for each in urls)


def _is_this_host(url: str) -> bool:
    """Returns whether a URL's host is this machine by its name or address. A name that only resolves to this machine is
    not recognised."""
    host = (urlsplit(url).hostname or "").lower()
    try:
        return ipaddress.ip_address(host).is_loopback or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host in ("localhost", socket.gethostname().lower(), socket.getfqdn().lower())


def _providers(
    url: str | Sequence[str] | None, identity: str | Path | Sequence[str | Path] | None
) -> tuple[tuple[str, ...], tuple[Path | None, ...]]:
    """Returns the providers' URLs, and for each provider the folder of the identity to use with that provider, or None.
    Without a URL, those are the endpoints that the identities name."""
    if url is None:
        named = identity if isinstance(identity, list | tuple) else (identity,)
        identity = [str(each) for each in named if each is not None]
        if not identity or len(identity) < len(named):
            raise ConfigurationError("give a provider's URL, or identity=, a folder made by `provider enroll`")
        url = endpoints_of(identity)
    urls = (url,) if isinstance(url, str) else tuple(url or ())
    if not urls or not all(isinstance(each, str) for each in urls):
        raise ConfigurationError(f"expected a provider's URL, or two for mask='shares', got {url!r}")
    given = identity if isinstance(identity, list | tuple) else [identity] * len(urls)
    if len(given) != len(urls):
        raise ConfigurationError(f"expected one identity for each of {len(urls)} URLs, got {len(given)}")
    return urls, tuple(None if each is None else Path(str(each)) for each in given)


def _check_places(urls: Sequence[str], identities: Sequence[Path | None], weights: str | None) -> None:
    """Raises ConfigurationError if an identity or `weights` is given for a provider that takes none, or if a folder
    holds no identity."""
    for each, folder in zip(urls, identities, strict=True):
        inproc = each.startswith(INPROC)
        if inproc and folder is not None:
            raise ConfigurationError("an inproc: provider takes no identity")
        if each.startswith(f"{INPROC}//"):
            raise ConfigurationError(not_a_url(each))
        if not inproc and weights is not None:
            raise ConfigurationError("weights is for inproc: only: a networked provider chooses for itself")
        if each.startswith(ipc.SCHEME):
            ipc.folder_of(each)
            if folder is None:
                raise ConfigurationError("an ipc: URL needs an identity, the folder that `provider enroll` made")
        if folder is not None:
            load_identity(folder)


def _check_peer_uid(urls: Sequence[str], peer_uid: int | None) -> None:
    if peer_uid is None:
        return
    if isinstance(peer_uid, bool) or not isinstance(peer_uid, int) or not 0 <= peer_uid < 1 << 32:
        raise ConfigurationError(f"peer_uid is a user id from 0, got {peer_uid!r}")
    if not any(each.startswith(ipc.SCHEME) for each in urls):
        raise ConfigurationError("peer_uid is for ipc: only: elsewhere the certificate says who the provider is")


def _accepted(accept_changes: Sequence[str]) -> tuple[str, ...]:
    """Checks `accept_changes` and returns the parts of a provider's offer that may differ from first use."""
    if not isinstance(accept_changes, str | list | tuple | set | frozenset):
        raise ConfigurationError(
            f"accept_changes takes a list of {', '.join(PARTS)}, got {type(accept_changes).__name__}"
        )
    given = (accept_changes,) if isinstance(accept_changes, str) else tuple(accept_changes)
    for part in given:
        if part not in PARTS:
            raise ConfigurationError(
                f"accept_changes (--accept-change, once for each) takes {', '.join(PARTS)}, got {ascii(part)[:40]}"
            )
    return given
