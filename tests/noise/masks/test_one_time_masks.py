"""Tests `pad` and `shares`: results equal those of `off` exactly, messages look uniform, and each key and seed is used
once."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from noise.ledger.ledger import Ledger
from noise.masks import pad as pad_module
from noise.masks.off import Off
from noise.masks.pad import BLOCK_ROWS, Pad
from noise.masks.shares import Shares
from noise.scheme import GroupSpec, Masked, encode_rows
from tests.support.lattice import group_of, weight_of
from tests.support.threads import in_child
from wire.errors import ConfigurationError, InvalidTensor, MaskError, MaskReused
from wire.frame import Arithmetic, Call, Direction, Purpose
from wire.ring import coding
from wire.ring.seeded_rows import SeededRows

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


WEIGHTS = [weight_of(40, 24, 1), weight_of(3, 56, 2)]


GROUPS = [group_of(number, weight) for number, weight in enumerate(WEIGHTS)]


def product(call: Call, rows: torch.Tensor) -> torch.Tensor:
    return coding.product(rows, WEIGHTS[call.group] if call.direction is FORWARD else WEIGHTS[call.group].t())


def answers(masked: Masked) -> list[torch.Tensor]:
    """Returns the replies of honest providers."""
    replies = []
    for message in masked.messages:
        rows, call = message.rows, message.call
        if isinstance(rows, SeededRows):
            assert call.purpose is Purpose.HINT
            rows = rows.expand(GROUPS[call.group].widths(call.direction)[0])
        replies.append(product(call, rows))
    return replies


def rows_of(num_rows: int, features: int, seed: int = 3) -> torch.Tensor:
    rows = torch.randn(num_rows, features, generator=torch.Generator().manual_seed(seed))
    rows[::3] = 0.0
    rows[1::5] *= 1e18
    return rows


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    made = Ledger.open(tmp_path / "ledger", "tenant")
    yield made
    made.close()


@pytest.fixture
def shares(ledger: Ledger) -> Shares:
    return Shares(lambda: ledger.fresh_seed("shares"), ledger.close)


@pytest.fixture
def make_pad(ledger: Ledger) -> Any:
    made: list[Pad] = []

    def run(**options: Any) -> Pad:
        options = {"background": False, **options}
        made.append(Pad(WEIGHTS.__getitem__, lambda: ledger.fresh_seed("pad"), on_close=ledger.close, **options))
        return made[-1]

    yield run
    for scheme in made:
        scheme.close()


@pytest.fixture(params=["pad", "pad ahead", "shares"])
def scheme(request: Any, shares: Shares, make_pad: Any) -> Any:
    if request.param == "shares":
        return shares
    return make_pad(background=request.param == "pad ahead")


# ---- exact ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 129, 700])
def test_bit_for_bit_what_off_gives(scheme: Any, num_rows: int, direction: Direction) -> None:
    for spec in GROUPS:
        rows = rows_of(num_rows, spec.widths(direction)[0])
        plain = Off(Arithmetic.RING).mask(spec, direction, rows)
        masked = scheme.mask(spec, direction, rows)
        assert torch.equal(masked.unmask(answers(masked)), plain.unmask(answers(plain)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_spends_nothing(scheme: Any, ledger: Ledger, bad: float) -> None:
    rows = rows_of(4, 40)
    rows[3, 0] = bad
    with pytest.raises(InvalidTensor, match="nothing was sent"):
        scheme.mask(GROUPS[0], FORWARD, rows)
    assert ledger.audit() == []


def test_messages_are_uniform_and_never_repeat(scheme: Any) -> None:
    """The test is chi-square over the 256 byte values of masked zeros. A value of 450 has a probability below 1e-11
    (see test_lattice_slots.py)."""
    masked = [scheme.mask(GROUPS[0], FORWARD, torch.zeros(512, 40)) for _ in range(3)]
    rows = torch.cat([each.messages[0].rows for each in masked])
    seen = [bytes(row.numpy()) for row in rows]
    assert len(set(seen)) == 3 * 512
    counts = torch.bincount(rows.view(torch.uint8).flatten().to(torch.int64), minlength=256)
    expected = rows.numel() * 4 / 256
    assert float((counts - expected).square().sum() / expected) < 450


def test_eight_threads_never_share_a_row_or_a_seed(scheme: Any) -> None:
    def work(_: int) -> list[bytes]:
        mine: list[bytes] = []
        for direction in itertools.islice(itertools.cycle(Direction), 60):
            spec = GROUPS[0]
            rows = rows_of(5, spec.widths(direction)[0])
            plain, masked = Off(Arithmetic.RING).mask(spec, direction, rows), scheme.mask(spec, direction, rows)
            assert torch.equal(masked.unmask(answers(masked)), plain.unmask(answers(plain)))
            mine += [bytes(row.numpy()) for row in masked.messages[0].rows]
        return mine

    with ThreadPoolExecutor(8) as threads:
        seen = [row for mine in threads.map(work, range(8)) for row in mine]
    assert len(seen) == len(set(seen)) == 8 * 60 * 5


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_no_mask(scheme: Any) -> None:
    scheme.mask(GROUPS[0], FORWARD, rows_of(2, 40))

    def child() -> str:
        with pytest.raises(MaskReused):
            scheme.mask(GROUPS[0], FORWARD, rows_of(2, 40))
        return "refused"

    assert in_child(child) == "refused"
    masked = scheme.mask(GROUPS[0], FORWARD, rows_of(2, 40))
    plain = Off(Arithmetic.RING).mask(GROUPS[0], FORWARD, rows_of(2, 40))
    assert torch.equal(masked.unmask(answers(masked)), plain.unmask(answers(plain)))


def test_after_the_end(scheme: Any) -> None:
    scheme.mask(GROUPS[0], FORWARD, rows_of(2, 40))
    scheme.close()
    scheme.close()
    with pytest.raises(MaskError, match="closed"):
        scheme.mask(GROUPS[0], FORWARD, rows_of(2, 40))


def test_nothing_can_be_pickled_copied_or_printed(scheme: Any) -> None:
    masked = scheme.mask(GROUPS[0], FORWARD, rows_of(2, 40))
    for duplicate in (pickle.dumps, copy.deepcopy):
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            duplicate(scheme)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(masked)
    text = repr((scheme, masked))
    assert "tensor" not in text
    assert "seed=" not in text


# ---- pad ------------------------------------------------------------------------------------------------------------


def test_a_pad_is_the_expanded_key_and_its_own_product(make_pad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[SeededRows] = []

    def spy(*arguments: Any) -> SeededRows:
        keys.append(SeededRows(*arguments))
        return keys[-1]

    monkeypatch.setattr(pad_module, "SeededRows", spy)
    scheme, spec = make_pad(), GROUPS[0]
    rows = rows_of(300, 40)
    masked = scheme.mask(spec, FORWARD, rows)
    (message,) = masked.messages
    pads = torch.cat([key.expand(40) for key in keys])[:300]
    assert torch.equal(message.rows - pads, encode_rows(spec, FORWARD, rows)[0])
    assert len({key.seed for key in keys}) == len(keys) == 2
    assert all(key.num_rows <= BLOCK_ROWS for key in keys)


def test_pads_are_made_ahead_and_bounded(make_pad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row_bytes = 4 * (40 + 24)
    scheme = make_pad(pool_bytes=3 * BLOCK_ROWS * row_bytes)
    scheme.prepare(GROUPS[0], FORWARD, 2 * BLOCK_ROWS)
    assert scheme.pool.ready_bytes == 2 * BLOCK_ROWS * row_bytes
    with monkeypatch.context() as patch:
        patch.setattr(pad_module, "SeededRows", lambda *_: pytest.fail("nothing more is needed"))
        scheme.mask(GROUPS[0], FORWARD, rows_of(2 * BLOCK_ROWS, 40))
    scheme.prepare(GROUPS[0], FORWARD, 100 * BLOCK_ROWS)
    assert scheme.pool.ready_bytes == 0, "as many do not fit"


def test_a_weight_of_another_shape_is_refused(make_pad: Any) -> None:
    spec = GroupSpec(0, 24, 40, 100.0, 100.0, torch.ones(40))
    with pytest.raises(ConfigurationError, match="does not fit"):
        make_pad().mask(spec, FORWARD, rows_of(1, 24))


def test_pads_are_counted_before_use(make_pad: Any, ledger: Ledger) -> None:
    scheme = make_pad()
    scheme.mask(GROUPS[0], FORWARD, rows_of(3 * BLOCK_ROWS, 40))
    (seed,) = ledger.audit()
    assert (seed.parameters, seed.seed) == ("pad", b"")
    assert seed.used >= 3


# ---- shares ---------------------------------------------------------------------------------------------------------


def test_one_provider_gets_a_seed_and_the_other_rows(shares: Shares) -> None:
    rows = rows_of(6, 40)
    encoded, _ = encode_rows(GROUPS[0], FORWARD, rows)
    hidden, seed = shares.mask(GROUPS[0], FORWARD, rows).messages
    assert (hidden.provider, hidden.call.purpose) == (0, Purpose.PRODUCT)
    assert (seed.provider, seed.call.purpose) == (1, Purpose.HINT)
    assert isinstance(hidden.rows, torch.Tensor)
    assert isinstance(seed.rows, SeededRows)
    assert (seed.rows.first_row, seed.rows.num_rows) == (0, 6)
    assert torch.equal(hidden.rows + seed.rows.expand(40), encoded)
    assert not torch.equal(hidden.rows, encoded)


def test_every_call_has_a_seed_of_its_own_counted_before_use(shares: Shares, ledger: Ledger, tmp_path: Path) -> None:
    seeds: list[bytes] = []
    for _ in range(30):
        _, second = shares.mask(GROUPS[0], FORWARD, torch.zeros(2, 40)).messages
        assert isinstance(second.rows, SeededRows)
        seeds.append(second.rows.seed)
    assert len(set(seeds)) == 30
    (counted,) = ledger.audit()
    assert (counted.parameters, counted.seed) == ("shares", b"")
    assert counted.used >= 30
    written = (tmp_path / "ledger").read_bytes()
    assert not any(seed in written for seed in seeds), "a share's seed is secret from provider 1"


def test_replies_in_the_wrong_order_or_alone_are_not_the_product(shares: Shares) -> None:
    """The sum does not depend on the order of the replies. If a share is missing, the result is noise, never data."""
    rows = rows_of(6, 40)
    plain = Off(Arithmetic.RING).mask(GROUPS[0], FORWARD, rows)
    masked = shares.mask(GROUPS[0], FORWARD, rows)
    first, second = answers(masked)
    want = plain.unmask(answers(plain))
    assert torch.equal(masked.unmask([second, first]), want)
    assert not torch.equal(masked.unmask([first, torch.zeros_like(second)]), want)


def test_a_ledger_that_cannot_be_kept_stops_the_next_mask(ledger: Ledger, shares: Shares, tmp_path: Path) -> None:
    (tmp_path / "ledger").unlink()
    with pytest.raises(MaskError):
        shares.mask(GROUPS[0], FORWARD, rows_of(1, 40))


def test_what_they_say(shares: Shares, make_pad: Any) -> None:
    for scheme, words in ((shares, "do not collude"), (make_pad(), "pseudorandom")):
        said = scheme.describe()
        assert words in said["assumption"]
        assert said["bits"] == "256-bit keys"
        assert {"scheme", "secrets"} <= said.keys()
        assert "pool" in said or "storage" in said
