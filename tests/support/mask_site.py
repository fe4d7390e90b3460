"""Makes providers and clients for tests of masks under a model, and records what the providers receive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from noise.blocks.pool import MaskPool
from noise.options import DEFAULT_MASK, RING_ONLY
from noise.scheme import GroupSpec
from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient, embedded
from tenant_sdk.model.build import group_spec, load_alphas
from tenant_sdk.session import Session
from tests.support.providers import WrappedModel, serving
from tests.support.spies import opened_sessions
from wire.frame import Call, Direction
from wire.ring.seeded_rows import Rows, SeededRows
from wire.transport.inproc import InprocConnection

MODEL_NOISE = 1e-4
"""The largest relative error of a result after nine groups in a row, each 32 wide. The error of one group's result is
β·α·√(‖w‖²·21/2 + (2·1536/3)·2^16/12). The result's size is β·α·‖w‖·‖x̃‖/√32, where ‖x̃‖ is nearly 2^31/‖w‖ and ‖w‖ is
about 400. So the relative error is 1e-5. If the errors of nine groups all added up, and no residual connection reduced
them, the sum would be 1e-4."""


def unrounded(options: dict[str, Any]) -> dict[str, Any]:
    """Returns a client's options, with those of a mask on integers that send all 32 bits, unless they say how many."""
    if options.get("mask", DEFAULT_MASK) not in RING_ONLY:
        return options
    return {**options, "mask_options": {"precision": "exact", **options.get("mask_options", {})}}


class Watched(WrappedModel):
    """Serves a model over either transport, and keeps the rows that it receives."""

    def __init__(self, served_model: ServedModel) -> None:
        super().__init__(served_model)
        self.seen: list[tuple[Call, Rows]] = []
        self.fail: Callable[[Call], None] = lambda call: None

    def compute(self, call: Call, rows: Rows, *others: Any) -> torch.Tensor:
        """Notes the request, calls `fail`, which may raise an error, and returns the product."""
        self.seen.append((call, rows.clone() if isinstance(rows, torch.Tensor) else rows))
        self.fail(call)
        return self.served_model.compute(call, rows, *others)

    def products(self, direction: Direction | None = None) -> list[torch.Tensor]:
        """Returns the masked rows that were received, in one direction or in both."""
        return [
            rows
            for call, rows in self.seen
            if isinstance(rows, torch.Tensor) and direction in (None, call.direction)
        ]  # fmt: skip

    def hints(self) -> list[SeededRows]:
        """Returns the requests for hints that were received."""
        return [rows for _, rows in self.seen if isinstance(rows, SeededRows)]


@dataclass
class Site:
    """Makes clients of watched providers, in process or over mTLS, and closes the clients at the end."""

    folder: Path
    served_models: dict[str, ServedModel]
    monkeypatch: pytest.MonkeyPatch
    open: ExitStack = field(default_factory=ExitStack)
    served: dict[str, Any] = field(default_factory=dict)
    sessions: list[Session] = field(init=False)
    """The sessions of the clients, in the order in which they were made."""

    def __post_init__(self) -> None:
        self.sessions = opened_sessions(self.monkeypatch)

    def inproc(self, *kinds: str, **options: Any) -> tuple[TenantClient, list[Watched]]:
        """Makes one provider in this process for each kind, and returns a client of all these providers, and the
        providers."""
        watched = [Watched(self.served_models[kind]) for kind in kinds]
        waiting = list(watched)
        self.monkeypatch.setattr(
            embedded, "connect_inproc", lambda url, weights: InprocConnection(waiting.pop(0))  # type: ignore[arg-type]
        )  # fmt: skip
        urls: Any = [f"inproc:{kind}" for kind in kinds]
        return self._client(urls if len(urls) > 1 else urls[0], options), watched

    def mtls(self, *kinds: str, **options: Any) -> tuple[TenantClient, list[Watched]]:
        """Makes one provider behind TLS for each kind, and returns a client of all these providers, and the
        providers."""
        urls, identities, watched = [], [], []
        for kind in kinds:
            watched.append(Watched(self.served_models[kind]))
            name = str(len(self.served))
            state = StateDir(self.folder / f"state{name}")
            server = self.open.enter_context(serving(watched[-1], state=state))
            self.served[name] = server, state
            urls.append(f"grpcs://127.0.0.1:{server.port}")
            identities.append(self.folder / f"tenant{name}")
            enroll(state, "acme", identities[-1], urls[-1])
        one = len(kinds) == 1
        options = {"identity": identities[0] if one else identities, **options}
        return self._client(urls[0] if one else urls, options), watched

    def _client(self, url: Any, options: dict[str, Any]) -> TenantClient:
        """Returns a client whose rows go unrounded, unless the options say how, so that results can be compared
        closely."""
        options = unrounded(options)
        client = TenantClient(url, **{"cache": self.folder / "cache", "progress": False, **options})
        return self.open.enter_context(client)


def unmasked(site: Site, kind: str = "llama", **options: Any) -> Any:
    """Returns a model over the same int8 weights without a mask."""
    client, _ = site.inproc(kind, mask="off", arithmetic="ring", **options)
    return client.load_model()


def taken(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Returns a list that records every mask row that a pool hands out from now on."""
    rows: list[bytes] = []
    take = MaskPool.take

    def spy(*arguments: Any) -> Any:
        mask, effect = take(*arguments)
        rows.extend(bytes(row.numpy()) for row in mask)
        return mask, effect

    monkeypatch.setattr(MaskPool, "take", spy)
    return rows


def specs(client: TenantClient) -> dict[int, GroupSpec]:
    """Returns, by group number, the facts about a group that masks need, for all groups of a client's model."""
    manifest = client.connect()
    alphas = load_alphas(client._bundle(), manifest)
    return {info.id: group_spec(info, alphas, torch.device("cpu")) for info in manifest.groups}
