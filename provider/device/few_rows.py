"""Computes small ring products on a device, such as those of decode steps, by captured graphs.

For a row of one token the product takes less time than starting its kernels one by one. So the copy to the device, the
product and the copy back are captured once for each layer group and direction, and replayed with one call. On torch's
`cpu` device, and where the device cannot capture, the same steps are started one by one.

Guarantees: the numbers are those of `coding.product`, with or without captured graphs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from provider.device.lane import Lane
from wire.frame import Direction
from wire.ring import coding
from wire.ring.buffers import unwritten_tensor

MOST_ROWS = 8
"""The most rows of a small product. The executor may compute products of up to 8 rows in the thread that received
them."""
_HEIGHTS = (1, MOST_ROWS)
"""The numbers of rows of captured products; a product of fewer rows is padded with zeros."""
MOST_GRAPHS = 2048
"""The most graphs that are kept; further products are started step by step. A model of 32 blocks has 512 products."""
_LOGGER = logging.getLogger(__name__)

Place = tuple[int, Direction]
"""A layer group's id and a direction, which stand for one weight."""


class FewRows:
    """Computes products of at most MOST_ROWS rows, one at a time, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        """Makes the object without any graph; each graph is captured when it is first needed."""
        self._lane, self._lock = Lane(device), threading.Lock()
        self.graphs: dict[tuple[Place, int], Callable[[], None]] = {}
        self._may_capture = device.type == "cuda"
        self._pool: Any = None

    def product(self, place: Place, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns the ring product of a few rows.

        Args:
            place: stands for the weight.
            weight: int8, shape (d, m), on the device; always the same tensor for the same place.
            rows: int32, shape (1 to MOST_ROWS, d), CPU.

        Returns:
            int32, shape (num_rows, m), CPU, with memory of its own.
        """
        num_rows = rows.shape[0]
        height = next(one for one in _HEIGHTS if num_rows <= one)
        with self._lock:
            run = self.graphs.get((place, height)) or self._prepared(place, height, weight)
            here = self._lane.rows.view(height, weight.shape[0], torch.int32)
            here[:num_rows].copy_(rows)
            here[num_rows:].zero_()
            with self._lane.current():
                run()
            self._lane.synchronize()
            back = self._lane.reply.view(height, weight.shape[1], torch.int32)
            return unwritten_tensor(num_rows, weight.shape[1], torch.int32).copy_(back[:num_rows])

    def reserve(self, widest: int) -> None:
        """Makes the staging buffers as large as they will ever be, since captured graphs hold their addresses. `widest`
        is the largest number of columns of rows and replies."""
        for staging in (self._lane.rows, self._lane.reply):
            staging.view(MOST_ROWS, widest, torch.int32)

    def drop(self) -> None:
        """Forgets all graphs, after an error of the device."""
        with self._lock:
            self._lane.drop()
            self.graphs.clear()
            self._pool = None

    def _prepared(self, place: Place, height: int, weight: torch.Tensor) -> Callable[[], None]:
        here = self._lane.rows.view(height, weight.shape[0], torch.int32)
        back = self._lane.reply.view(height, weight.shape[1], torch.int32)

        def steps() -> None:
            there = here.to(self._lane.device, non_blocking=True)
            back.copy_(coding.product(there, weight), non_blocking=True)

        run: Callable[[], None] = steps
        if self._may_capture and len(self.graphs) < MOST_GRAPHS:
            run = self._captured(steps)
        if len(self.graphs) < MOST_GRAPHS:
            self.graphs[place, height] = run
        return run

    def _captured(self, steps: Callable[[], None]) -> Callable[[], None]:
        """Captures steps as a graph, and returns a function that replays it; returns the steps themselves if that
        fails."""
        graph = torch.cuda.CUDAGraph()
        with self._lane.current():
            steps()  # Compiles kernels, copies the weight and allocates workspaces, none of which may be captured.
            self._lane.synchronize()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            try:
                # Other threads may allocate memory on the device meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    steps()
                finally:
                    graph.capture_end()
            except RuntimeError as exc:
                self._may_capture = False
                _LOGGER.warning("small products are started step by step: %s", type(exc).__name__)
                return steps
        return graph.replay
