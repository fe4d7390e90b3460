"""Tests a model whose rows the lattice mask hides: exhausted seeds, hints, and the ledger."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from noise.ledger.ledger import Ledger, Seed
from noise.params import LatticeParameters
from provider.identity.registry import enroll
from tenant_sdk import TenantClient
from tests.support.mask_site import MODEL_NOISE, Site, unmasked
from tests.support.parity import batch, relative
from tests.support.providers import make_served_model
from tests.support.spies import mask_makers
from tests.support.tiny_models import make_chat_model
from tests.support.training import QUICK, ROWS, lora
from tests.support.waiting import end
from wire.errors import (
    ConfigurationError,
    MaskError,
)

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")


# ---- lattice: seeds, hints, ledger -----------------------------------------------------------------------------------


def audited(ledger: Path, identity: Path | None = None) -> list[Seed]:
    """Returns the seeds in a ledger, each with how much of it was used: those of the tenant `acme` with this identity,
    or without an identity those of clients that have none."""
    name = "local"
    if identity is not None:
        name = f"acme of {hashlib.sha256((identity / 'ca.pem').read_bytes()).hexdigest()[:16]}"
    opened = Ledger.open(ledger, name)
    seeds = opened.audit()
    opened.close()
    return seeds


class Few(LatticeParameters):
    @property
    def max_secrets(self) -> int:
        return 50


def test_an_exhausted_seed_is_renewed_in_the_middle_of_a_run(site: Site, tmp_path: Path) -> None:
    others = mask_makers()
    few = Few("few", 16, 2, 3.2, 0, "a test", toy=True)
    client, (watched,) = site.mtls("llama", mask_options={"parameters": few, "allow_toy": True})
    model, want = client.load_model(), unmasked(site)
    with torch.no_grad():
        for _ in range(5):
            assert relative(model(batch()).logits, want(batch()).logits) < MODEL_NOISE
    # The pool reserves ahead: its worker may have drawn a seed and not yet have the hint. It ends its turn with it.
    scheme: Any = site.sessions[0].scheme
    scheme.pool.close()
    end(mask_makers() - others)
    client.close()
    seeds = audited(tmp_path / "tenant0" / "ledger", tmp_path / "tenant0")
    assert all(seed.used <= 50 for seed in seeds)
    assert {rows.seed for rows in watched.hints()} == {seed.seed for seed in seeds}
    assert len(seeds) >= 2
    (kept,) = (tmp_path / "cache" / "hints").iterdir()
    assert kept.name.startswith(seeds[-1].seed_id)


def test_a_run_says_how_much_of_its_traffic_was_hints(site: Site, tmp_path: Path) -> None:
    client, (watched,) = site.inproc("llama")
    options = {**QUICK, "max_steps": 1}
    fetched = client.finetune(ROWS, lora(), tmp_path / "first", **options)
    assert len(watched.hints()) == 18
    found = client.finetune(ROWS, lora(), tmp_path / "second", **options)
    assert 0 == found.hint_bytes < fetched.hint_bytes < fetched.bytes_down


def test_hints_are_fetched_once_and_found_again(site: Site) -> None:
    client, (watched,) = site.inproc("llama")
    client.fetch_hints(backward=True)
    assert len(watched.hints()) == 18
    client.fetch_hints(backward=True)
    assert len(watched.hints()) == 18
    again, (other,) = site.inproc("llama")
    again.fetch_hints(backward=True)
    model = again.load_model()
    with torch.no_grad():
        model(batch())
    assert other.hints() == []
    assert all(isinstance(rows, torch.Tensor) for _, rows in other.seen)


def test_models_share_a_cache_and_never_a_hint(site: Site, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    make_chat_model(twin, seed=1)  # the same shapes, other weights
    site.served_models = {**site.served_models, "twin": make_served_model(twin, "int8")}
    for kind in ("llama", "twin", "llama"):
        client, _ = site.inproc(kind)
        with torch.no_grad():
            assert relative(client.load_model()(batch()).logits, unmasked(site, kind)(batch()).logits) < MODEL_NOISE


def test_damaged_and_foreign_hint_files_stop_the_call(site: Site, tmp_path: Path) -> None:
    client, _ = site.inproc("llama")
    client.fetch_hints()
    client.close()
    files = sorted((tmp_path / "cache" / "hints").glob("*/*.safetensors"), key=lambda path: path.stat().st_size)
    spoilt = bytearray(files[0].read_bytes())
    spoilt[-1] ^= 0x40
    for data in (bytes(spoilt), files[-1].read_bytes(), b"", b"x" * 100):
        for file in files:
            file.write_bytes(data)
        client, (watched,) = site.inproc("llama")
        with torch.no_grad(), pytest.raises(MaskError, match="delete it, and it will be fetched again") as failure:
            client.load_model()(batch())
        assert "\n" not in str(failure.value)
        assert watched.seen == []


def test_a_ledger_that_is_damaged_or_anothers(site: Site, tmp_path: Path) -> None:
    client, (watched,) = site.mtls("llama")
    ledger, url = tmp_path / "tenant0" / "ledger", client.url
    with torch.no_grad():
        client.load_model()(batch())
    client.close()
    sent, good = len(watched.seen), ledger.read_bytes()
    _, state = site.served["0"]
    enroll(state, "umbrella", tmp_path / "umbrella", url)
    shutil.copy(ledger, tmp_path / "umbrella" / "ledger")
    with pytest.raises(ConfigurationError, match="another identity"):
        TenantClient(url, identity=tmp_path / "umbrella", progress=False).connect()
    for data in (b"", b"garbage\n", good[:-20] + b"x" + good[-19:], good.replace(b'"used":0', b'"used":1', 1)):
        if data == good:
            continue
        ledger.write_bytes(data)
        with pytest.raises(ConfigurationError, match=r"damaged at record \d+") as failure:
            TenantClient(url, identity=tmp_path / "tenant0", progress=False).connect()
        assert "\n" not in str(failure.value)
    assert len(watched.seen) == sent


def test_each_identity_has_its_own_ledger_and_the_key_stays_private(site: Site, tmp_path: Path) -> None:
    client, _ = site.mtls("llama")
    client.fetch_hints()
    ledger = tmp_path / "tenant0" / "ledger"
    assert ledger.stat().st_mode & 0o077 == 0
    assert not (tmp_path / "cache" / "ledger").exists()
    inproc, _ = site.inproc("llama")
    inproc.connect()
    inproc.fetch_hints(backward=True)
    (seed,) = audited(tmp_path / "cache" / "ledger")
    assert inproc.load_model()(batch()).logits.isfinite().all()
    (used,) = audited(tmp_path / "cache" / "ledger")
    assert (seed.used, used.used > 0) == (0, True)
