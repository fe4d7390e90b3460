"""Tests a model whose rows the masks `pad` and `shares` hide."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tenant_sdk import TenantClient
from tests.support.mask_site import Site, taken, unmasked
from tests.support.parity import adapted, batch, grads
from tests.support.providers import make_served_model
from tests.support.tiny_models import make_chat_model
from tests.support.training import lora
from wire.errors import (
    ConfigurationError,
    Unauthenticated,
    Unavailable,
)
from wire.frame import Purpose
from wire.ring.seeded_rows import SeededRows

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")


# ---- pad and shares -------------------------------------------------------------------------------------------------


def both_ways(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    peft_model = adapted(model, lora())
    with torch.no_grad():
        logits = peft_model(batch()).logits
    return logits, grads(peft_model, batch())


def assert_same_bits(got: Any, want: Any) -> None:
    assert torch.equal(got[0], want[0])
    assert got[1].keys() == want[1].keys()
    assert all(torch.equal(got[1][name], want[1][name]) for name in want[1])


def test_pad_is_off_bit_for_bit(connect: Any, site: Site, folders: dict[str, Path], monkeypatch: Any) -> None:
    client, (watched,) = connect("llama", mask="pad", verify=folders["llama"])
    client.prepare(64, backward=True)
    scheme: Any = site.sessions[-1].scheme
    made = scheme.pool.ready_bytes
    features = sum(info.in_features + info.out_features for info in client.connect().groups)
    assert made == 2 * 64 * features * 4
    model, rows = client.load_model(), taken(monkeypatch)
    assert_same_bits(both_ways(model), both_ways(unmasked(site)))
    assert watched.hints() == []
    sent = [bytes(row.numpy()) for tensor in watched.products() for row in tensor]
    assert len(set(sent)) == len(sent) == len(rows) == len(set(rows))


def test_pad_needs_the_weights(site: Site) -> None:
    with pytest.raises(ConfigurationError, match="verify="):
        site.inproc("llama", mask="pad")


def test_shares_are_off_bit_for_bit_and_split_as_promised(connect: Any, site: Site) -> None:
    client, (first, second) = connect("llama", "llama", mask="shares")
    assert_same_bits(both_ways(client.load_model()), both_ways(unmasked(site)))
    assert first.seen
    assert all(isinstance(rows, torch.Tensor) for _, rows in first.seen), "the first never sees a seed"
    assert all(isinstance(rows, SeededRows) for _, rows in second.seen), "the second never sees rows"
    assert {call.purpose for call, _ in first.seen} == {Purpose.PRODUCT}
    assert len(first.seen) == len(second.seen)
    seeds = [rows.seed for rows in second.hints()]
    assert len(set(seeds)) == len(seeds)
    sent = [bytes(row.numpy()) for tensor in first.products() for row in tensor]
    assert len(set(sent)) == len(sent)


def test_shares_verified(site: Site, folders: dict[str, Path]) -> None:
    client, _ = site.inproc("llama", "llama", mask="shares", verify=folders["llama"])
    assert_same_bits(both_ways(client.load_model()), both_ways(unmasked(site)))


def test_shares_of_two_models_are_refused(site: Site, tmp_path: Path) -> None:
    make_chat_model(tmp_path / "twin", seed=1)
    site.served_models = {**site.served_models, "twin": make_served_model(tmp_path / "twin", "int8")}
    for kinds in (("llama", "twin"), ("llama", "gpt2")):
        with pytest.raises(ConfigurationError, match="same weights"):
            site.mtls(*kinds, mask="shares")


def places(site: Site) -> tuple[list[str], list[Path]]:
    """Returns the URLs of the providers of `Site.mtls`, and the client's identities with them."""
    urls = [f"grpcs://127.0.0.1:{server.port}" for server, _ in site.served.values()]
    return urls, [site.folder / f"tenant{name}" for name in site.served]


def test_each_provider_of_shares_has_its_own_identity(site: Site) -> None:
    client, _ = site.mtls("llama", "llama", mask="shares")
    client.close()
    urls, identities = places(site)
    for given, error in (
        (identities[::-1], Unauthenticated),
        ([identities[0]] * 2, ConfigurationError),
        (identities[:1], ConfigurationError),
    ):
        with pytest.raises(error), TenantClient(urls, identity=list(given), mask="shares", progress=False):
            pass


def test_one_provider_is_not_two_providers_of_shares(site: Site, tmp_path: Path) -> None:
    """A single provider would get both shares of each row, and so the row itself. It is recognised by its address or
    its authority, also if the identity is in another folder or has another name."""
    client, (first, second) = site.mtls("llama", "llama", mask="shares")
    client.close()
    (a, b), (acme, other) = places(site)
    copied = Path(shutil.copytree(acme, tmp_path / "copied"))
    (copied / "ca.pem").write_bytes(b"a comment, as some tools write it\n" + (acme / "ca.pem").read_bytes())
    for urls, given in (([a, a], [acme, acme]), ([a, f"{a.upper()}/"], [acme, other]), ([a, b], [acme, copied])):
        with pytest.raises(ConfigurationError, match="one twice"):
            TenantClient(urls, identity=given, mask="shares", progress=False).connect()
    assert first.seen == second.seen == []


def test_one_broken_provider_of_shares_is_one_error(site: Site) -> None:
    client, _ = site.mtls("llama", "llama", mask="shares")
    model = client.load_model()
    with torch.no_grad():
        model(batch())
        site.served["1"][0].stop()
        with pytest.raises(Unavailable):
            model(batch())
