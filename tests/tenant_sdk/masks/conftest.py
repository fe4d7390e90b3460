"""Provides tiny models, and a `Site` (tests/support/mask_site.py), whose providers serve them to clients with any
mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient
from tests.support.mask_site import Site, Watched
from tests.support.providers import make_served_model
from tests.support.tiny_models import make_chat_model


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("masks")
    return {kind: make_chat_model(parent / kind, kind) for kind in ("llama", "gpt2")}


@pytest.fixture(scope="package")
def served_models(folders: dict[str, Path]) -> dict[str, ServedModel]:
    return {kind: make_served_model(folder, "int8") for kind, folder in folders.items()}


@pytest.fixture
def site(tmp_path: Path, served_models: dict[str, ServedModel], monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path, served_models, monkeypatch)
    with made.open:
        yield made


@pytest.fixture(params=["inproc", "mtls"])
def connect(request: Any, site: Site) -> Callable[..., tuple[TenantClient, list[Watched]]]:
    made: Callable[..., tuple[TenantClient, list[Watched]]] = getattr(site, request.param)
    return made
