"""Tests what is refused before anything is sent, how masks describe themselves, and what they never show."""

from __future__ import annotations

import copy
import json
import os
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from noise.blocks.pool import Block
from noise.masks.gaussian_pool import NotPrivateWarning
from noise.params import LatticeParameters
from noise.polynomial import negacyclic
from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient
from tenant_sdk.session import NotVerifiedWarning
from tenant_sdk.trust.checkpoint import TrustedCheckpoint
from tests.support.lattice import FORWARD, TOY, TOY_OPTIONS
from tests.support.mask_site import Site, specs
from tests.support.parity import adapted, batch
from tests.support.reachable import reachable
from tests.support.training import lora
from wire.errors import (
    ConfigurationError,
    MalformedFrame,
    WeakParameters,
)
from wire.manifest import parse_manifest
from wire.ring.widths import row_bytes

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("urls", "options", "sentence"),
    [
        (1, {"mask": "shares"}, "exactly two provider URLs"),
        (3, {"mask": "shares"}, "exactly two provider URLs"),
        (2, {"mask": "lattice"}, "every other mask one"),
        (2, {}, "every other mask one"),
        (1, {"mask": "lattice", "arithmetic": "float"}, "ring arithmetic only"),
        (1, {"mask": "pad", "arithmetic": "float", "verify": "x"}, "ring arithmetic only"),
        (2, {"mask": "shares", "arithmetic": "float"}, "ring arithmetic only"),
        (1, {"mask": "gaussian-pool", "arithmetic": "ring"}, "float arithmetic only"),
        (1, {"mask": "gaussian-pool", "verify": "x"}, "verify= needs ring arithmetic"),
        (1, {"mask": "off", "arithmetic": "float", "verify": "x"}, "verify= needs ring arithmetic"),
        (1, {"arithmetic": "complex"}, "ring or float"),
    ],
)
def test_pairs_that_do_not_exist_are_refused_before_the_network(
    tmp_path: Path, urls: int, options: dict[str, Any], sentence: str
) -> None:
    """Nothing listens at port 1, so a client that used the network first would fail with another error."""
    enroll(StateDir(tmp_path / "state"), "acme", tmp_path / "acme", "grpcs://127.0.0.1:1")
    given = ["grpcs://127.0.0.1:1"] * urls
    client = TenantClient(given, identity=[tmp_path / "acme"] * urls, progress=False, **options)
    with pytest.raises(ConfigurationError, match=sentence):
        client.connect()
    assert not (tmp_path / "acme" / "ledger").exists()


@pytest.mark.parametrize(
    ("mask_options", "error"),
    [
        ({"parameters": TOY}, WeakParameters),
        ({"parameters": LatticeParameters("own", 512, 2, 3.2, 100, "me")}, WeakParameters),
        ({"parameters": LatticeParameters("own", 512, 3, 1.0, 161, "me")}, WeakParameters),
        ({"parameters": LatticeParameters("own", 512, 3, 3.2, 200, "me")}, WeakParameters),
        ({"parameters": "tiny"}, ConfigurationError),
        ({"sigma": 1.0}, ConfigurationError),
        ({"pool_size": 8}, ConfigurationError),
        ({"hints": "memory"}, ConfigurationError),
        ({"hints": "local"}, ConfigurationError),  # there is no checkpoint to compute them from
        ({"hint_bits": 23}, ConfigurationError),
        ({"hint_bits": 16}, ConfigurationError),
        ({"hint_ram_bytes": -1}, ConfigurationError),
    ],
    ids=str,
)
def test_weak_parameters_and_unknown_options(site: Site, mask_options: dict[str, Any], error: Any) -> None:
    with pytest.raises(error) as failure:
        site.inproc("llama", mask_options=mask_options)
    assert "\n" not in str(failure.value)


def test_a_wrong_option_is_said_before_the_checkpoint_is_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a large checkpoint takes minutes, so the option must be checked before."""
    monkeypatch.setattr(TrustedCheckpoint, "open", lambda name: pytest.fail("the checkpoint was opened"))
    with pytest.raises(WeakParameters):
        site.inproc("llama", verify="some/where", mask_options={"parameters": TOY})


@pytest.mark.parametrize("change", [{"max_column_norm": 1e9}, {"max_row_norm": 0.0}, {"max_column_norm": float("nan")}])
def test_norms_out_of_range_are_refused(site: Site, change: dict[str, float]) -> None:
    parsed = json.loads(site.served_models["llama"].manifest().to_bytes())
    parsed["groups"][0].update(change)
    with pytest.raises(MalformedFrame, match="not valid"):
        parse_manifest(json.dumps(parsed).encode())


# ---- words ----------------------------------------------------------------------------------------------------------


def explained(client: TenantClient) -> dict[str, str]:
    lines = client.explain(everything=True).splitlines()
    return {name.strip(): text for name, _, text in (line.partition("  ") for line in lines)}


def test_explain_lattice(site: Site, capsys: pytest.CaptureFixture[str], folders: dict[str, Path]) -> None:
    client, _ = site.inproc("llama")
    client.fetch_hints(backward=True)
    said = explained(client)
    assert capsys.readouterr().out.strip(), "explain prints"
    groups = client.connect().groups
    up, down = 4 * sum(info.in_features for info in groups), 4 * sum(info.out_features for info in groups)
    assert "lattice" in said["scheme"]
    assert "Module-LWE" in said["assumption"]
    assert "3x512" in said["parameters"]
    assert "sigma=3.2" in said["parameters"]
    assert "161 estimated" in said["bits"]
    assert f"of {2**33}" in said["secrets"]
    assert "token counts" in said["visible"]
    assert "who you are" in said["visible"]
    assert "its rank in each layer group" in said["DoRA"]
    assert f"forward {up / 1e3:.1f} kB up, {down / 1e3:.1f} kB down" in said["bytes per token"]
    assert f"backward {down / 1e3:.1f} kB up, {up / 1e3:.1f} kB down" in said["bytes per token"]
    stored = sum(path.stat().st_size for path in (site.folder / "cache" / "hints").rglob("*") if path.is_file())
    assert said["hints"].strip().startswith(f"{stored / 1e6:.0f} MB on disk, of all models and seeds, at 24 bits")
    assert "in memory only" in said["pool"]
    assert "not verified" in said["verification"]
    assert "honest-but-curious" in said["verification"]
    assert "not been audited" in said["status"]
    assert "unbreakable" not in " ".join(said.values())
    verified, _ = site.inproc("llama", verify=folders["llama"], kappa=50)
    assert "2^-50" in explained(verified)["verification"]
    assert str(folders["llama"]) in explained(verified)["verification"]
    streamed, _ = site.inproc("llama", mask_options={"hints": "stream"})
    assert "streamed" in explained(streamed)["hints"]


@pytest.mark.parametrize(("precision", "reply_bits"), [("balanced", 24), ("short", 16)])
def test_explain_how_many_bits_cross(site: Site, precision: str, reply_bits: int) -> None:
    client, _ = site.inproc("llama", mask_options={"precision": precision})
    said, groups = explained(client), client.connect().groups
    assert said["precision"].strip().startswith(f"{precision}: 24 bits of each masked number cross, and ")
    assert ("16 of its product" in said["precision"]) == (reply_bits == 16)
    assert "rounding comes after masking" in said["precision"]
    up = sum(row_bytes(info.in_features, 24) for info in groups)
    down = sum(row_bytes(info.out_features, reply_bits) for info in groups)
    assert f"forward {up / 1e3:.1f} kB up, {down / 1e3:.1f} kB down" in said["bytes per token"]


@pytest.mark.parametrize("mask", ["lattice", "shares"])
def test_short_replies_cannot_be_verified(site: Site, folders: dict[str, Path], mask: str) -> None:
    kinds = ("llama",) * (2 if mask == "shares" else 1)
    options = {"mask": mask, "mask_options": {"precision": "short"}, "verify": folders["llama"]}
    with pytest.raises(ConfigurationError, match="precision='short' cannot be used with verify") as caught:
        site.inproc(*kinds, **options)
    assert "\n" not in str(caught.value)


def test_explain_the_others(site: Site, folders: dict[str, Path]) -> None:
    groups = site.served_models["llama"].manifest().groups
    up, down = 4 * sum(info.in_features for info in groups), 4 * sum(info.out_features for info in groups)
    pad = explained(site.inproc("llama", mask="pad", verify=folders["llama"])[0])
    assert "pseudorandom" in pad["assumption"]
    assert "in memory only" in pad["pool"]
    shares = explained(site.inproc("llama", "llama", mask="shares")[0])
    assert "do not collude" in shares["assumption"]
    assert f"{up / 1e3:.1f} kB up, {2 * down / 1e3:.1f} kB down" in shares["bytes per token"]
    for said in (pad, shares):
        assert said["bits"].strip() == "256-bit keys"
        assert {"secrets", "visible", "verification", "protected", "bytes per token"} <= said.keys()
    off = explained(site.inproc("llama", mask="off")[0])
    assert off["protected"].strip() == "nothing"
    assert "trusted" in off["assumption"]
    with pytest.warns(UserWarning, match="not private"):
        gaussian, _ = site.inproc("llama", mask="gaussian-pool")
    said = explained(gaussian)
    assert said["protected"].strip() == "nothing"
    assert "none holds" in said["assumption"]


def test_what_the_second_provider_announces_counts_too(site: Site) -> None:
    served_model = site.served_models["llama"]
    manifest = served_model.manifest().model_copy(update={"recording": True})
    site.served_models = {**site.served_models, "records": ServedModel(replace(served_model.served, manifest=manifest))}
    assert "recording" in explained(site.inproc("llama", "records", mask="shares")[0])
    assert "recording" not in explained(site.inproc("llama", "llama", mask="shares")[0])
    manifest = served_model.manifest().model_copy(update={"arithmetic": ("float",)})
    site.served_models = {**site.served_models, "float": ServedModel(replace(served_model.served, manifest=manifest))}
    with pytest.raises(ConfigurationError, match="does not offer ring"):
        site.inproc("llama", "float", mask="shares")


@pytest.mark.filterwarnings("default::tenant_sdk.session.NotVerifiedWarning")
def test_one_warning_without_verify_and_none_with(site: Site, folders: dict[str, Path]) -> None:
    for mask, kinds in (("lattice", ("llama",)), ("shares", ("llama", "llama"))):
        for verify, expected in ((None, 1), (folders["llama"], 0)):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                client, _ = site.inproc(*kinds, mask=mask, verify=verify)
                client.connect()
                client.load_model()
                client.explain()
            about = [each for each in seen if issubclass(each.category, NotVerifiedWarning)]
            assert len(about) == expected
            if about:
                assert "honest-but-curious" in str(about[0].message)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        site.inproc("llama", mask="off")
    assert not [each for each in seen if issubclass(each.category, NotVerifiedWarning)]


@pytest.mark.parametrize(
    ("mask", "kinds", "is_readable"),
    [("off", 1, True), ("gaussian-pool", 1, True), ("lattice", 1, False), ("shares", 2, False)],
)
def test_one_loud_line_says_that_rows_go_readable(site: Site, mask: str, kinds: int, is_readable: bool) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        client, _ = site.inproc(*["llama"] * kinds, mask=mask)
        client.connect()
        client.load_model()
        text = client.explain()
    said = [str(each.message) for each in seen if issubclass(each.category, NotPrivateWarning)]
    assert len(said) == int(is_readable)
    assert text.startswith("ROWS GO READABLE  ") is is_readable
    for line in said:
        assert line.startswith(f"ROWS GO READABLE: mask={mask!r} ")
        assert "lattice (the default)" in line
        assert line.isprintable(), "one line"


def test_nothing_secret_is_pickled_copied_or_printed(site: Site, folders: dict[str, Path]) -> None:
    client, _ = site.inproc("llama", verify=folders["llama"])
    model = client.load_model()
    with torch.no_grad():
        model(batch())
    session = site.sessions[-1]
    scheme: Any = session.scheme
    ready = reachable(scheme.pool, Block)
    block = ready[0]
    for secret in (client, session, scheme, scheme.pool, block, session.verifier, session.executor, model):
        with pytest.raises((TypeError, pickle.PicklingError, AttributeError)):
            pickle.dumps(secret)
    for secret in (scheme, scheme.pool, block, session.verifier):
        with pytest.raises(TypeError):
            copy.deepcopy(secret)
    assert copy.deepcopy(session.executor) is session.executor
    last = [number for each in ready for number in (*each.mask[-1].tolist(), *each.effect[-1].tolist())]
    numbers = [str(number) for number in last if abs(number) > 10**5]
    assert numbers
    seed = scheme.seed
    for text in map(repr, (client, session, scheme, scheme.pool, block, session.verifier, session.executor)):
        assert not any(number in text for number in numbers)
        assert seed.hex() not in text
        assert repr(seed) not in text


def test_where_ready_masks_wait_on_disk_is_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = site.inproc("llama", mask_options={"pool": "disk", "pool_bytes": 60_000_000, "background": False})
    client.prepare(512)
    folder = site.folder / "cache" / "masks"
    row_bytes = sum(4 * info.in_features + 3 * info.out_features for info in client.connect().groups)
    said = explained(client)["pool"]
    assert f"{512 * row_bytes / 1e6:.0f} of 60 MB of masks and effects ready, encrypted in a file without" in said
    assert f"in {folder}, 0 of them in memory (read ahead: at most 134 MB): at least 512 rows" in said
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(negacyclic, "combine", lambda *arguments: pytest.fail("masks were to be ready"))
    pool = site.sessions[-1].scheme.pool  # type: ignore[attr-defined]
    for spec in specs(client).values():
        for _ in range(20):
            pool.take(spec, FORWARD, 1)
    assert 0 < pool.held_bytes <= 16 * row_bytes
    client.close()
    assert pool.file.is_closed


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs a tmpfs at /dev/shm")
def test_masks_on_disk_are_not_in_memory(site: Site) -> None:
    site.folder = Path("/dev/shm/veilbase-nothing-here")
    with pytest.raises(ConfigurationError, match=r"is memory \(tmpfs\): name a cache on a disk"):
        site.inproc("llama", mask_options={"pool": "disk"})


def test_prepared_tokens_are_found_ready(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = site.inproc("llama", mask_options={"background": False})
    client.prepare(100, backward=True)
    scheme: Any = site.sessions[-1].scheme
    assert scheme.pool.ready_bytes == 512 * (4 + 3) * sum(
        info.in_features + info.out_features for info in client.connect().groups
    )
    monkeypatch.setattr(negacyclic, "combine", lambda *arguments: pytest.fail("masks were to be ready"))
    model = adapted(client.load_model(), lora())
    model(batch(), labels=batch()).loss.backward()


def test_more_tokens_than_the_budget_holds_are_shared_fairly(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prepare` is asked for more tokens than the budget has room for. Every layer then gets masks for the same number
    of rows, 48."""
    groups = site.served_models["llama"].manifest().groups
    row_bytes = sum(4 * info.in_features + 3 * info.out_features for info in groups)
    client, _ = site.inproc("llama", mask_options={"background": False, "pool_bytes": 3 * 16 * row_bytes} | TOY_OPTIONS)
    client.prepare(10_000)
    scheme: Any = site.sessions[-1].scheme
    assert scheme.pool.ready_bytes == 48 * row_bytes
    monkeypatch.setattr(negacyclic, "combine", lambda *arguments: pytest.fail("48 rows of each layer were to be ready"))
    for spec in specs(client).values():
        scheme.pool.take(spec, FORWARD, 48)
