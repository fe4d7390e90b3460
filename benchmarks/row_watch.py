"""Follows the masked rows of this process from the mask pools in which they are made to the connections that send them.

A row is lost if it was made, and was then neither sent, nor burnt by a call that failed, nor is it still ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from noise.blocks.pool import MaskPool


@dataclass(frozen=True)
class RowBalance:
    """Says what became of the mask rows of a process.

    Attributes:
        made: the rows that the mask pools made.
        sent: the rows that connections took and sent.
        refused: the rows of calls for which there was no connection, so that nothing was sent.
        burnt: the rows that pools burnt for calls that failed before they had all their rows.
        ready: the rows that are still in the pools.
        twice: of the rows that were sent or refused, those that equal an earlier one.
    """

    made: int = 0
    sent: int = 0
    refused: int = 0
    burnt: int = 0
    ready: int = 0
    twice: int = 0

    @property
    def lost(self) -> int:
        """Returns the number of rows that were made and that no other count has. It is negative if more rows
        were sent than pools made."""
        return self.made - self.sent - self.refused - self.burnt - self.ready


class SentRows:
    """Keeps a fingerprint of each masked row that is sent: its first eight bytes, which are as good as random."""

    def __init__(self) -> None:
        """Watches the rows that all gRPC and tensor-port connections of this process send from now on."""
        from wire.frame import Purpose
        from wire.transport.grpc_connection import GrpcConnection

        self._parts: list[np.ndarray[Any, Any]] = []
        self.num_refused = 0
        """The number of rows that a connection refused with an error, since the provider was away."""
        submit = GrpcConnection.submit

        def watched(connection: Any, call: Any, payload: Any, reply_cols: int) -> Any:
            if call.purpose is Purpose.HINT:  # Such a call has a seed, and no rows of its own.
                return submit(connection, call, payload, reply_cols)
            self._parts.append(payload.rows(call)[:, :2].contiguous().numpy().copy())
            try:
                return submit(connection, call, payload, reply_cols)
            except Exception:
                self.num_refused += len(self._parts[-1])
                raise

        GrpcConnection.submit = watched  # type: ignore[assignment, method-assign]

    def counts(self) -> tuple[int, int]:
        """Returns the number of rows, and how many of them have the fingerprint of an earlier row."""
        import numpy as np

        rows = np.concatenate(self._parts)
        return len(rows), len(rows) - len(np.unique(rows, axis=0))


class WatchedRows:
    """Watches the mask pools and the connections of this process."""

    def __init__(self) -> None:
        """Watches all mask pools that are made from now on, and all rows that are sent from now on."""
        from noise.blocks.pool import MaskPool

        self._sent = SentRows()
        self._pools: list[MaskPool] = []
        make = MaskPool.__init__

        def watched(pool: MaskPool, *args: Any, **options: Any) -> None:
            make(pool, *args, **options)
            self._pools.append(pool)

        MaskPool.__init__ = watched  # type: ignore[assignment, method-assign]

    def balance(self) -> RowBalance:
        """Returns what became of all rows. Callers must call this while no call is under way and before the pools are
        closed, since a closed pool has dropped its rows."""
        num_rows, twice = self._sent.counts()
        pools = [pool.row_counts() for pool in self._pools]
        refused = self._sent.num_refused
        return RowBalance(
            made=sum(each.made for each in pools),
            sent=num_rows - refused,
            refused=refused,
            burnt=sum(each.burnt for each in pools),
            ready=sum(each.ready for each in pools),
            twice=twice,
        )
