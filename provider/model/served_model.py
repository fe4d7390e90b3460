"""Serves a model without a network. The service behind the provider's ports uses this module, and so does a provider
inside a tenant's process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from provider.engine import products
from provider.model.weight_file import WeightFile, group_bytes
from provider.model.weights import PreparedModel, return_freed_memory
from wire.errors import RemoteFault, UnknownLayer, VeilbaseError
from wire.frame import Arithmetic, Call, Direction, Purpose
from wire.manifest import Manifest
from wire.ring.seeded_rows import Rows
from wire.ring.widths import FULL_BITS

if TYPE_CHECKING:
    from provider.engine.replica import RowProduct
    from provider.model.served_group import ServedGroup
    from provider.operations.recording import Recorder

_LOGGER = logging.getLogger(__name__)


class ServedModel:
    """Computes products of one model, and passes requests and replies on to the recorder, if there is one.

    It is safe under threads, and implements `wire.transport.inproc.Handler`.
    """

    can_share = True
    """True, since several threads may compute products at the same time; see `provider.engine.replica.Replica`."""

    def __init__(self, served: PreparedModel, recorder: Recorder | None = None) -> None:
        """Keeps the prepared model and the recorder of tenants' requests and replies. With None as the recorder, which
        is the normal case, nothing is recorded."""
        self.served = served
        self._recorder = recorder
        self.weight_file: WeightFile | None = None
        """The weights for tenants that may fetch them; None reads those of this process."""

    def manifest(self) -> Manifest:
        return self.served.manifest

    def read_file(self, file_name: str) -> Iterator[bytes]:
        return self.served.bundle.read(file_name)

    def read_weights(self, group: int) -> Iterator[bytes]:
        """Returns the chunks of the weight of a group that the manifest has, for a tenant that may fetch it; see
        `provider.model.weight_file`.

        Raises:
            UnknownLayer: the weights are not in this process, and were not written down for tenants.
        """
        if self.weight_file is not None:
            return self.weight_file.read(group)
        if group >= len(self.served.groups):
            raise UnknownLayer("the weights are elsewhere")
        return map(bytes, group_bytes(self.served.groups[group]))

    def check(self, call: Call, cols: int) -> int:
        return products.check_call(self.served, call, cols)

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        """Computes one product; see `provider.engine.products.compute`. It records nothing; callers use `record`.

        Raises:
            VeilbaseError: the request is not valid; or, as a RemoteFault, an unexpected failure, whose type is logged.
        """
        try:
            return products.compute(self.served, call, rows)
        except Exception as exc:  # noqa: BLE001 - out of memory, a broken kernel
            raise _fault_as_error(call, exc) from None  # the cause's text may hold values of a tenant's rows

    def compute_together(self, call: Call, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Computes the products of several requests' rows by one matrix product of all rows. Each reply owns its
        memory. The call must have passed `check`."""
        try:
            return products.products(self.served.groups[call.group], call, parts)
        except Exception as exc:  # noqa: BLE001 - out of memory, a broken kernel
            raise _fault_as_error(call, exc) from None  # as in `compute`

    def row_product(self, call: Call) -> RowProduct | None:
        """Returns a function that computes the product of one row of a checked call in any thread; None if only
        `compute` can compute the call."""
        if call.arithmetic is not Arithmetic.RING or call.direction is not Direction.FORWARD:
            return None
        if call.purpose is Purpose.HINT or call.group >= len(self.served.groups):
            return None
        weight = self.served.groups[call.group].for_one_row
        if weight is None or call.bits == call.reply_bits == FULL_BITS:
            return None if weight is None else weight.multiply
        return lambda row, reply: weight.multiply_packed(row, call.bits, reply, call.reply_bits)

    @property
    def is_recording(self) -> bool:
        return self._recorder is not None

    def record(self, tenant: str, call: Call, rows: Rows, reply: torch.Tensor | None) -> None:
        """Records a request's rows and its reply (None if it failed or was cancelled), if there is a recorder."""
        if self._recorder is not None:
            self._recorder.record(tenant, call, rows, reply)

    @functools.cached_property
    def fingerprints(self) -> dict[int, str]:
        """Returns, by group's id, the SHA-256 of the group's tensors; see `ServedGroup.fingerprint`."""
        return {group.info.id: group.fingerprint() for group in self.served.groups}

    def take_weights(self) -> list[ServedGroup]:
        """Returns the weights, for the caller to compute with, and drops this object's references to them. The
        manifest, the bundle and the fingerprints are kept."""
        groups = list(self.served.groups)
        self.let_weights_go()
        return groups

    def let_weights_go(self) -> None:
        """Drops the weights, which this process does not need if other processes compute. The manifest, the bundle and
        the fingerprints are kept."""
        self.fingerprints  # noqa: B018 - the property is cached before the weights are dropped
        self.served = replace(self.served, groups=())
        return_freed_memory()

    def close(self) -> None:
        if self.weight_file is not None:
            self.weight_file.close()
        if self._recorder is not None:
            self._recorder.close()


def _fault_as_error(call: Call, exc: Exception) -> VeilbaseError:
    """Returns a VeilbaseError unchanged. Logs the type of any other exception, such as a lack of memory, and returns a
    RemoteFault without details."""
    if isinstance(exc, VeilbaseError):
        return exc
    # Only the type is logged: the text of an exception may hold values.
    _LOGGER.error("a product of group %d failed: %s", call.group, type(exc).__name__)
    return RemoteFault("the provider failed while computing")
