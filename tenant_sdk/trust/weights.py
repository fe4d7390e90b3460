"""This module fetches the int8 weights of layers that the tenant keeps (tenant_sdk/keep.py) from a provider that is not
verified, if the provider gives them away.

Guarantees: which groups are fetched, and in which order, depends on the tenant's setting and on the manifest alone. The
sizes are those of the manifest, and are compared with the free memory before anything is asked for. A weight is used
only if its SHA-256 is the manifest's, no number is -128, no norm is above the manifest's, so that products do not wrap,
and its scales are those of the bundle and not above `MOST_SCALE`. Weights that were fetched are kept below the cache
folder in stores (wire/prepared.py), one for each group, by digest; what is read there is checked in the same way.

Not guaranteed: that the weights are good ones. The provider chooses them, as it chooses its replies without `verify`.
So numbers may overflow in a kept layer, which is dealt with as in any other (tenant_sdk/model/run_state.py).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

import torch

from runtime.memory import free_memory
from tenant_sdk.model.build import load_alphas
from tenant_sdk.report import Report, megabytes, unseen
from wire.errors import ConfigurationError, MalformedFrame
from wire.frame import ITEM_BYTES
from wire.manifest import GroupInfo, Manifest
from wire.prepared import PreparedLayer, StoreKey, open_store, writing
from wire.ring.quantise import INT8_MAX, digest, square_sums
from wire.transport.connection import Connection

MOST_SCALE = float(1 << 16)
"""The largest scale of a column of int8 numbers that is taken: 127 times as much is far above any trained weight."""
_KEEPING = "fetching the weights of kept layers"
"""What `fetch_weights` reports."""
_LAYER = "weight"
"""The name of the one layer in the store of a group."""
_LOGGER = logging.getLogger(__name__)


def weights_digest(manifest: Manifest) -> str:
    """Returns the SHA-256, in hex, of all groups' layers, shapes and digests, which is pinned at first use. It does not
    depend on which layers are kept."""
    sha = hashlib.sha256()
    for group in manifest.groups:  # A digest says neither the shape nor which columns are of which layer.
        columns = ",".join(f"{layer.name}={layer.out_features}" for layer in group.layers)
        sha.update(f"{group.name}\t{group.in_features}\t{columns}\t{group.digest}\n".encode())
    return sha.hexdigest()


def fetch_weights(
    connection: Connection,
    manifest: Manifest,
    bundle: Path,
    groups: Iterable[int],
    cache: Path,
    report: Report = unseen,
) -> dict[int, torch.Tensor]:
    """Returns the weights of kept groups, which are fetched unless they are in the cache.

    Args:
        connection: a connection to the provider that gave the manifest.
        manifest: the manifest, whose digest of weights the caller has compared with its pin.
        bundle: the folder of the provider's bundle, which has the scales.
        groups: the numbers of the groups.
        cache: the cache folder.
        report: told how much is there.

    Returns:
        By group's number W̃: int8, shape (in_features, out_features), CPU.

    Raises:
        ConfigurationError: this machine has not enough free memory.
        NotPermitted: the provider gives this tenant no weights.
        QuotaExceeded: the provider gives this tenant no more weights today.
        MalformedFrame: a weight is not the one that the manifest announced, or is one that no checkpoint has.
    """
    wanted = [manifest.groups[number] for number in sorted(groups)]
    total, done = sum(group.weight_bytes for group in wanted), 0
    _check_memory(total)
    report(_KEEPING, 0, megabytes(total), "MB")
    alphas, folder = load_alphas(bundle, manifest), cache / "weights"
    found = {}
    for group in wanted:
        alpha = torch.cat([alphas[layer.name] for layer in group.layers])
        if bool((alpha > MOST_SCALE).any()):
            raise MalformedFrame(f"the provider's scales of {group.name} are above {MOST_SCALE:.0f}")
        weight = _from_store(folder, group, alpha)
        if weight is None:
            weight = _fetched(connection, group, alpha)
            _into_store(folder, group, weight, alpha)
        found[group.id] = weight
        done += group.weight_bytes
        report(_KEEPING, megabytes(done), megabytes(total), "MB")
    return found


def _check_memory(num_bytes: int) -> None:
    free = free_memory()
    if free is not None and num_bytes > free:
        raise ConfigurationError(
            f"the kept layers take {num_bytes / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free: keep fewer "
            "(keep=, --keep)"
        )


def _fetched(connection: Connection, group: GroupInfo, alpha: torch.Tensor) -> torch.Tensor:
    """Fetches a group's weight and checks it."""
    try:
        data = torch.empty(group.weight_bytes, dtype=torch.uint8)
    except RuntimeError:  # Where nothing tells how much memory is free, the size may be beyond any machine.
        raise ConfigurationError(
            f"there is no memory for the {group.weight_bytes / 1e9:.1f} GB of a kept layer: keep fewer (keep=, --keep)"
        ) from None
    view, received = data.numpy().data, 0
    for chunk in connection.fetch_weights(group):
        if received + len(chunk) > len(view):
            break
        view[received : received + len(chunk)] = chunk
        received += len(chunk)
    if received != len(view):
        raise _other_weight(group)
    weight, scales = data.split([len(view) - ITEM_BYTES * group.out_features, ITEM_BYTES * group.out_features])
    if scales.numpy().tobytes() != alpha.numpy().astype("<f4").tobytes():
        raise _other_weight(group)
    return _checked(weight.view(torch.int8).view(group.in_features, group.out_features), group, alpha)


def _checked(weight: torch.Tensor, group: GroupInfo, alpha: torch.Tensor) -> torch.Tensor:
    """Returns a group's weight if it is the one of the manifest, and one that the quantiser can have made."""
    if tuple(weight.shape) != (group.in_features, group.out_features) or digest(weight, alpha) != group.digest:
        raise _other_weight(group)  # The digest does not cover the shape.
    columns, rows = (float(squares.max()) for squares in square_sums(weight))
    if int(weight.min()) < -INT8_MAX:
        raise MalformedFrame(f"the provider's weight of {group.name} holds -128, which the quantiser never makes")
    if columns > group.max_column_norm**2 or rows > group.max_row_norm**2:  # With such norms products would wrap.
        raise MalformedFrame(f"the provider's weight of {group.name} has a larger norm than its manifest says")
    return weight


def _other_weight(group: GroupInfo) -> MalformedFrame:
    return MalformedFrame(f"the weight of {group.name} that came is not the one that the manifest announced")


def _key(group: GroupInfo) -> StoreKey:
    return StoreKey({_LAYER: group.digest}, {})


def _from_store(folder: Path, group: GroupInfo, alpha: torch.Tensor) -> torch.Tensor | None:
    """Returns a copy of a weight that was kept, which nobody can change or remove; None if there is none."""
    try:
        store = open_store(folder, _key(group))
        return None if store is None else _checked(store.layer(_LAYER).weight.clone(), group, alpha)
    except (ConfigurationError, MalformedFrame, KeyError) as exc:
        why = exc if isinstance(exc, ConfigurationError) else "it is another one"
        _LOGGER.warning("the weight of %s in %s is fetched anew: %s", group.name, folder, why)
        return None


def _into_store(folder: Path, group: GroupInfo, weight: torch.Tensor, alpha: torch.Tensor) -> None:
    """Keeps a weight for later sessions. Without room on the disk this session goes on, and the next one fetches."""
    columns, rows = square_sums(weight)
    try:
        with writing(folder, _key(group)) as writer:
            writer.add_layer(_LAYER, PreparedLayer("linear", weight, alpha, group.digest, rows, columns))
    except OSError as exc:
        _LOGGER.warning(
            "the weight of %s is not kept in %s (%s), and the next session fetches it again: free some space, or name "
            "another folder (VEILBASE_CACHE)",
            group.name, folder, exc.strerror or "error",
        )  # fmt: skip
