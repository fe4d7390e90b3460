"""Tests a model whose rows the lattice mask hides: exhausted seeds, hints, and the ledger."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from noise.disk import private_files
from noise.hints import local
from noise.hints.file import HEADER_BYTES
from noise.ledger.ledger import Ledger, Seed, seed_record
from noise.params import LatticeParameters
from provider.identity.registry import enroll
from tenant_sdk import TenantClient
from tests.support.mask_site import MODEL_NOISE, Site, Watched, unmasked
from tests.support.parity import adapted, batch, grads, relative
from tests.support.providers import make_served_model
from tests.support.spies import mask_makers
from tests.support.tiny_models import make_chat_model, make_model
from tests.support.training import QUICK, ROWS, lora
from tests.support.waiting import end
from wire.errors import (
    ConfigurationError,
    MaskError,
    VerificationFailed,
)
from wire.frame import Direction

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


def test_no_hint_is_asked_for_where_the_disk_has_no_room_for_all(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client, (watched,) = site.inproc("llama")
    with monkeypatch.context() as patch:
        patch.setattr(private_files.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
        with pytest.raises(ConfigurationError, match=r"hints take .* MB in .*, where 0 MB are free; free some space"):
            client.fetch_hints(backward=True)
    assert watched.hints() == []
    client.fetch_hints(backward=True)
    assert len(watched.hints()) == 18


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
        with torch.no_grad(), pytest.raises(MaskError, match="delete it, and it will be made again") as failure:
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


# ---- hints that the tenant computes ----------------------------------------------------------------------------------

Connect = Callable[..., tuple[TenantClient, list[Watched]]]


def hint_files(where: Path) -> list[Path]:
    return sorted((where / "hints").glob("*/*.safetensors"))


def numbers_of(where: Path) -> dict[str, bytes]:
    """Returns the checksums and numbers of the hints in a cache folder, by group and direction."""
    return {path.name.rpartition("-")[0]: path.read_bytes()[HEADER_BYTES:] for path in hint_files(where)}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_tenant_with_weights_computes_its_hints(
    site: Site, folders: dict[str, Path], connect: Connect, kind: str
) -> None:
    client, (watched,) = connect(kind, verify=folders[kind])
    got = client.load_model()
    with torch.no_grad():
        assert relative(got(batch()).logits, unmasked(site, kind)(batch()).logits) < MODEL_NOISE
    grads(adapted(got, lora()), batch())
    assert watched.hints() == [], "no provider sees a hint, or the seed of A"
    assert watched.products(Direction.BACKWARD)
    scheme: Any = site.sessions[0].scheme
    seed = scheme.seed
    assert all(seed not in rows.numpy().tobytes() for rows in watched.products())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])  # an untied head, a tied one, and Conv1D
@pytest.mark.parametrize("hint_bits", [32, 24, 20])
def test_hints_are_those_that_the_provider_computes(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, hint_bits: int
) -> None:
    folder = make_model(kind, tmp_path / kind) if kind == "qwen2" else make_chat_model(tmp_path / kind, kind)
    site.served_models = {kind: make_served_model(folder, "int8")}

    def draw(self: Ledger, parameters: str, budget: int | None) -> Seed:
        seed = Seed(bytes(range(32)), parameters, parameters, budget)  # the same bytes for both
        self._append(seed_record(seed))
        return seed

    monkeypatch.setattr(Ledger, "_draw", draw)
    found = []
    for hints in ("local", "fetched"):
        where = tmp_path / hints
        options = {"hints": hints, "hint_bits": hint_bits, "background": False}
        client, (watched,) = site.inproc(kind, verify=folder, mask_options=options, cache=where)
        client.fetch_hints(backward=True)
        assert bool(watched.hints()) == (hints == "fetched")
        found.append(numbers_of(where))
    assert found[0] == found[1]
    assert len(found[0]) == 2 * len(client.connect().groups)


def test_no_seed_of_a_computed_hint_is_shown_to_a_provider(site: Site, folders: dict[str, Path]) -> None:
    shown: set[bytes] = set()
    for hints in ("local", "fetched", "local", "fetched"):
        options: dict[str, Any] = {"hints": hints, "background": False}
        client, (watched,) = site.inproc("llama", verify=folders["llama"], mask_options=options)
        with torch.no_grad():
            client.load_model()(batch())
        shown |= {rows.seed for rows in watched.hints()}
        client.close()
    seeds = {seed.parameters: seed for seed in audited(site.folder / "cache" / "ledger")}
    assert {seeds["default"].seed} == shown
    assert set(seeds) == {"default", "default (hints computed here)"}
    assert all(seed.used for seed in seeds.values())
    for path in [site.folder / "cache" / "ledger", *hint_files(site.folder / "cache")]:
        assert path.stat().st_mode & 0o777 == 0o600
        assert path == site.folder / "cache" / "ledger" or path.parent.stat().st_mode & 0o777 == 0o700


def test_a_computation_that_was_interrupted_goes_on(
    site: Site, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    multiply = local.product

    def interrupted(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        computed.append(weight.numel())
        if len(computed) == 5:
            raise KeyboardInterrupt
        return multiply(rows, weight)

    monkeypatch.setattr(local, "product", interrupted)
    options: dict[str, Any] = {"verify": folders["llama"], "mask_options": {"background": False}}
    first, _ = site.inproc("llama", **options)
    with pytest.raises(KeyboardInterrupt):
        first.fetch_hints(backward=True)
    first.close()
    done = {path: path.stat().st_mtime_ns for path in hint_files(site.folder / "cache")}
    assert len(done) == 4
    second, (watched,) = site.inproc("llama", **options)
    second.fetch_hints(backward=True)
    assert len(computed) == 5 + 14
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert len(hint_files(site.folder / "cache")) == 18
    assert not list((site.folder / "cache" / "hints").glob("*/*.part"))
    assert watched.hints() == []


def prepared(where: Path) -> Path:
    (store,) = (where / "prepared").glob("*.prepared")
    return store


def test_prepared_weights_that_change_under_a_session_make_no_hint(site: Site, folders: dict[str, Path]) -> None:
    client, (watched,) = site.inproc("llama", verify=folders["llama"])
    store = prepared(site.folder / "cache")
    with store.open("r+b") as opened:
        weights = opened.read(store.stat().st_size // 2)
        opened.seek(0)
        opened.write(bytes(each ^ 1 for each in weights))
    with pytest.raises(ConfigurationError, match="were changed while in use: start again") as failure:
        client.fetch_hints(backward=True)
    assert "\n" not in str(failure.value)
    assert watched.seen == []
    client.close()
    again, (watched,) = site.inproc("llama", verify=folders["llama"])
    with torch.no_grad():
        assert relative(again.load_model()(batch()).logits, unmasked(site)(batch()).logits) < MODEL_NOISE
    assert watched.hints() == []


def test_a_damaged_computed_hint_stops_the_call(site: Site, folders: dict[str, Path]) -> None:
    first, _ = site.inproc("llama", verify=folders["llama"])
    first.fetch_hints()
    first.close()
    for path in hint_files(site.folder / "cache"):
        spoilt = bytearray(path.read_bytes())
        spoilt[-1] ^= 0x40
        path.write_bytes(spoilt)
    client, (watched,) = site.inproc("llama", verify=folders["llama"])
    with torch.no_grad(), pytest.raises(MaskError, match="delete it, and it will be made again") as failure:
        client.load_model()(batch())
    assert "\n" not in str(failure.value)
    assert watched.seen == []
    client.close()
    shutil.rmtree(site.folder / "cache" / "hints")
    again, _ = site.inproc("llama", verify=folders["llama"])
    with torch.no_grad():
        assert relative(again.load_model()(batch()).logits, unmasked(site)(batch()).logits) < MODEL_NOISE


def test_hints_that_were_fetched_and_checked_stay_in_use(site: Site, folders: dict[str, Path]) -> None:
    for hints, count in (("fetched", 9), (None, 0), ("local", 0), (None, 0)):
        given: dict[str, Any] = {"hints": hints, "background": False}
        client, (watched,) = site.inproc("llama", verify=folders["llama"], mask_options=given)
        client.fetch_hints()
        assert len(watched.hints()) == count
        scheme: Any = site.sessions[-1].scheme
        assert scheme.computes_hints == ("local" in {hints} or len(hint_files(site.folder / "cache")) == 18)
        client.close()


def test_hints_that_were_stored_unchecked_are_not_a_reason_to_fetch(site: Site, folders: dict[str, Path]) -> None:
    first, _ = site.inproc("llama")
    first.fetch_hints()
    first.close()
    client, (watched,) = site.inproc("llama", verify=folders["llama"])
    client.fetch_hints()
    assert watched.hints() == []


def test_a_seed_whose_hints_are_computed_is_renewed_with_them(site: Site, folders: dict[str, Path]) -> None:
    few = Few("few", 16, 2, 3.2, 0, "a test", toy=True)
    options = {"parameters": few, "allow_toy": True, "background": False}
    client, (watched,) = site.inproc("llama", verify=folders["llama"], mask_options=options)
    model, want = client.load_model(), unmasked(site)
    with torch.no_grad():
        for _ in range(5):
            assert relative(model(batch()).logits, want(batch()).logits) < MODEL_NOISE
    client.close()
    seeds = audited(site.folder / "cache" / "ledger")
    assert len(seeds) >= 2
    assert {seed.parameters for seed in seeds} == {"few (hints computed here)"}
    assert watched.hints() == []


@pytest.mark.parametrize("hints", [None, "local"])
def test_without_prepared_weights_hints_are_fetched_unless_you_chose_otherwise(
    site: Site, folders: dict[str, Path], hints: str | None
) -> None:
    (site.folder / "cache").mkdir()
    (site.folder / "cache" / "prepared").write_text("in the way")
    given: dict[str, Any] = {"verify": folders["llama"], "mask_options": {"hints": hints, "background": False}}
    if hints == "local":
        with pytest.raises(ConfigurationError, match="needs prepared weights") as failure:
            site.inproc("llama", **given)
        assert "\n" not in str(failure.value)
        return
    client, (watched,) = site.inproc("llama", **given)
    client.fetch_hints()
    assert len(watched.hints()) == 9
    assert "since there are no prepared weights" in client.explain()


def test_where_hints_come_from_is_said(
    site: Site, folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(**options: Any) -> tuple[str, str]:
        client, _ = site.inproc("llama", **options, **({} if "verify" in options else {"verify": folders["llama"]}))
        shown = next(line for line in client.explain().splitlines() if line.startswith("hints"))
        client.close()
        return capsys.readouterr().err, shown

    err, shown = said(progress=True)
    assert "hints of the mask are computed here, since they are small" in err.splitlines()
    assert "computed here, since they are small; the provider sees neither them nor the seed of A" in shown
    monkeypatch.setattr(local, "SMALL_BYTES", 0)
    err, shown = said(progress=True)
    assert "estimated, against" in err
    err, shown = said(mask_options={"hints": "local"})
    assert err == ""
    assert "computed here, as you chose" in shown
    assert "fetched from the provider" in said(mask_options={"hints": "fetched"})[1]
    assert "fetched from the provider" in said(verify=None)[1]


def test_a_provider_that_lies_while_the_link_is_measured(
    site: Site, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "SMALL_BYTES", 0)
    honest = site.served_models["llama"]
    monkeypatch.setattr(Watched, "compute", lambda self, *given: honest.compute(*given) + 1)
    with pytest.raises(VerificationFailed, match="session is over"):
        site.inproc("llama", verify=folders["llama"])
    assert not hint_files(site.folder / "cache")
