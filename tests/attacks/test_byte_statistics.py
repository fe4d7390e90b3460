"""Tests uniformity and serial correlation of received numbers: faulty masks show, and honest masks give values that
chance explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from attacks.adversaries import byte_statistics as statistics
from attacks.controls import byte_statistics as control
from attacks.controls.lattice import manifest, no_model
from attacks.seen.adversary import StolenFact
from attacks.seen.view import Exchange, View, open_view, write_recording
from attacks.victim import models
from provider.model.load import load, resolve
from provider.model.served_model import ServedModel
from provider.model.weights import serve_model
from provider.operations.recording import Recorder
from tenant_sdk import TenantClient
from tests.support.providers import serving


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)


def seen(folder: Path, messages: Sequence[torch.Tensor], num_groups: int = 1) -> View:
    """Records these messages, which go to the groups in turn, and returns the view."""
    exchanges = [Exchange(place % num_groups, rows, torch.zeros_like(rows)) for place, rows in enumerate(messages)]
    return write_recording(folder / "seen", manifest(*[messages[0].shape[1]] * num_groups), exchanges)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> statistics.Uniformity:
    return statistics.look(control.record(tmp_path_factory.mktemp("cases") / "seen", control.cases()))


@pytest.mark.parametrize("name", list(control.cases()))
def test_faults_are_named_for_what_they_are(name: str, found: statistics.Uniformity) -> None:
    sent = control.cases()
    assert control.is_right(found, list(sent).index(name), sent[name])


@pytest.mark.parametrize("name", ["same mask for two rows", "same mask for two features"])
def test_bytes_alone_would_have_missed_a_mask_that_neighbours_share(name: str, found: statistics.Uniformity) -> None:
    (figures,) = (one for one in found.looked_at if one.group == list(control.cases()).index(name))
    assert "bytes" not in figures.faults(found.bound)
    assert float(figures.serial.nan_to_num(0.0).max()) > 5 * found.bound


def test_correlations_are_those_of_their_definition(tmp_path: Path) -> None:
    """The values are compared with sums of integers over two messages. The border between the messages counts like any
    other pair of rows."""
    rows = uniform(90, 50)
    (figures,) = statistics.look(seen(tmp_path, rows.split(40))).looked_at
    exact = rows.to(torch.int64)
    for part in range(4):
        values = 2 * exact + 1 if part == 0 else 2 * ((exact >> (8 * (part - 1))) & 255) - 255
        numbers = [[int(value) for value in row] for row in values]
        mean_square = sum(value * value for row in numbers for value in row) / rows.numel()
        for place, (down, right) in enumerate(statistics.STEPS.values()):
            products = [
                numbers[row][column] * numbers[row + down][column + right]
                for row in range(90 - down)
                for column in range(50)
                if 0 <= column + right < 50
            ]
            z = sum(products) / len(products) / mean_square * math.sqrt(len(products))
            assert float(figures.serial[part, place]) == pytest.approx(z, abs=1e-3)


def test_chi_square_is_that_of_its_definition(tmp_path: Path) -> None:
    rows = uniform(100, 50)
    (figures,) = statistics.look(seen(tmp_path, rows.split(30))).looked_at
    for byte in range(4):
        values = ((rows.to(torch.int64) >> (8 * byte)) & 255).flatten().tolist()
        chi_square = sum((values.count(value) - 5000 / 256) ** 2 / (5000 / 256) for value in range(256))
        assert float(figures.chi_square[byte]) == pytest.approx((chi_square - 255) / math.sqrt(510))


def test_uniform_numbers_have_normal_correlations(tmp_path: Path) -> None:
    """Over 3,200 correlations, the mean is 0 and the variance 1. The largest is in the interval that
    `largest_correlations` gives for so many."""
    found = statistics.look(seen(tmp_path, [*uniform(200, 64, 80)], num_groups=200))
    serial = torch.stack([one.serial for one in found.looked_at]).flatten()
    assert found.num_serial == serial.numel() == 3200
    assert abs(float(serial.mean())) < 4 / 3200**0.5
    assert float(serial.var()) == pytest.approx(1.0, abs=4 * (2 / 3200) ** 0.5)
    low, high = statistics.largest_correlations(3200)
    assert low < found.worst_serial < high < found.bound
    low, high = statistics.largest_chi_squares(800)
    assert low < found.worst_chi_square < high < 12
    assert found.faults() == []


def test_the_largest_of_so_many() -> None:
    """The interval for the largest of many values contains it as often as stated, which is counted on random samples.
    For a single value, the interval has the usual two-sided bounds."""
    assert statistics.largest_correlations(1) == pytest.approx((0.00627, 2.807), rel=1e-3)
    drawn = torch.randn(4000, 500, generator=torch.Generator().manual_seed(1)).abs().amax(dim=1)
    low, high = statistics.largest_correlations(500)
    assert 0.98 < float(((drawn > low) & (drawn < high)).double().mean()) < 1.0
    normal = torch.randn(2000, 255, 100, generator=torch.Generator().manual_seed(2))
    largest = (normal.square().sum(dim=1).amax(dim=1) - 255) / 510**0.5
    low, high = statistics.largest_chi_squares(100)
    assert 0.975 < float(((largest > low) & (largest < high)).double().mean()) < 1.0


def test_the_bound_grows_with_what_was_looked_at() -> None:
    few, many = (
        statistics.Uniformity((statistics.Figures(0, "forward", 1, torch.zeros(4), torch.zeros(1, count)),), ())
        for count in (1, 100_000)
    )
    assert few.bound == pytest.approx(7.14, abs=0.01)
    assert few.bound < many.bound < 9


def test_groups_with_too_few_numbers_are_counted(tmp_path: Path) -> None:
    short, long = uniform(10, 50), uniform(100, 50)
    view = seen(tmp_path, (short, long, short), num_groups=3)
    (claim,) = statistics.BYTE_STATISTICS.attack(view, no_model(), None)
    assert isinstance(claim, StolenFact)
    assert claim.name == statistics.SUMMARY
    assert "1 groups and directions, 5,000 numbers; 2 skipped for fewer than 4,096 numbers (1,000 together)" in str(
        claim.value
    )


def test_single_rows_are_compared_with_the_next_message(tmp_path: Path) -> None:
    """Single rows, as in decoding, are compared with the next message: a mask that two rows share shows, and a retry
    does not."""
    honest = [*uniform(100, 1, 64)]
    assert statistics.look(seen(tmp_path / "1", honest)).faults() == []
    again = [rows for rows in honest for _ in range(2)]
    assert statistics.look(seen(tmp_path / "2", again)).faults() == []
    shared = [rows + shift for rows in honest for shift in (0, 1000)]
    (fault,) = statistics.look(seen(tmp_path / "3", shared)).faults()
    assert "along columns" in fault


def test_many_messages_are_looked_at_in_runs(tmp_path: Path) -> None:
    (figures,) = statistics.look(seen(tmp_path, [*uniform(300, 1, 64)])).looked_at
    assert figures.num_numbers == 64 * (19 * 8)  # of 38 runs of eight messages, every other one is taken


def test_one_row_has_no_neighbour_below(tmp_path: Path) -> None:
    found = statistics.look(seen(tmp_path, [uniform(1, 5000)]))
    assert found.num_serial == 4
    assert found.looked_at[0].serial.isnan().sum() == 12
    assert found.faults() == []


def test_float_messages_are_none_of_its_business(tmp_path: Path) -> None:
    assert statistics.BYTE_STATISTICS.attack(seen(tmp_path, [torch.randn(100, 50)]), no_model(), None) == []


@pytest.mark.parametrize(("mask", "is_fault"), [("lattice", False), ("pad", False), ("off", True)])
def test_real_training(mask: str, is_fault: bool, tmp_path: Path) -> None:
    """The traffic is that of two steps of the tiny model, by the code of the real tenant and provider."""
    model = models.make("tiny-llama", tmp_path / "model")
    served = serve_model(load(resolve(str(model))), recording=True)
    served_model = ServedModel(served, Recorder(tmp_path / "seen", served.manifest))
    options = {"verify": model, "cache": tmp_path / "cache", "progress": False}
    with (
        serving(served_model) as server,
        TenantClient(f"grpc://127.0.0.1:{server.port}", mask=mask, arithmetic="ring", **options) as client,
    ):
        client.finetune(list(models.FACTS), output_dir=tmp_path / "adapter", max_steps=2, progress=False, resume=False)
    served_model.close()
    found = statistics.look(open_view(tmp_path / "seen"))
    assert len(found.looked_at) > 10
    assert bool(found.faults()) == is_fault
    if is_fault:
        assert len(found.faults()) == len(found.looked_at)
        assert any("along columns" in words for words in found.faults())
