"""Tests what a tenant checks of weights that it fetches: sizes before anything is asked for or allocated, the digest,
numbers that no quantiser makes, norms, and scales; and how it keeps them."""

from __future__ import annotations

import errno
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tenant_sdk.trust.weights import MOST_SCALE, fetch_weights, weights_digest
from wire.errors import ConfigurationError, MalformedFrame
from wire.manifest import GroupInfo
from wire.ring.quantise import digest, max_norms

WEIGHT = torch.tensor([[1, -127, 3], [127, 5, -6]], dtype=torch.int8)
ALPHA = torch.tensor([0.5, 0.25, 2.0])


def group_of(weight: torch.Tensor, alpha: torch.Tensor, **changes: Any) -> GroupInfo:
    """Returns the group of one layer with this weight, as its provider announces it."""
    column, row = max_norms(weight)
    shape = {
        "in_features": weight.shape[0], "out_features": weight.shape[1], "max_column_norm": column,
        "max_row_norm": row, "digest": digest(weight, alpha), **changes,
    }  # fmt: skip
    layer = {"name": "a.q_proj", "kind": "linear", "bias": False, **shape}
    return GroupInfo.model_validate({"id": 0, "name": "a.q", "layers": [layer], **shape})


class Giver:
    """Stands for a connection to a provider that gives these bytes."""

    def __init__(self, *chunks: bytes) -> None:
        self.chunks, self.asked = chunks, 0

    def fetch_weights(self, group: GroupInfo) -> Iterator[bytes]:
        self.asked += 1
        yield from self.chunks


def bytes_of(weight: torch.Tensor, alpha: torch.Tensor) -> bytes:
    return weight.numpy().tobytes() + alpha.numpy().tobytes()


class Announced:
    """Stands for a manifest with these groups."""

    def __init__(self, groups: Sequence[GroupInfo]) -> None:
        self.groups = groups


def fetch(folder: Path, giver: Giver, group: GroupInfo, alpha: torch.Tensor = ALPHA) -> torch.Tensor:
    bundle = folder / "bundle"
    bundle.mkdir(exist_ok=True)
    save_file({"a.q_proj": alpha}, bundle / "scales.safetensors")
    found = fetch_weights(giver, Announced([group]), bundle, {0}, folder / "cache")  # type: ignore[arg-type]
    return found[0]


def test_a_weight_is_fetched_once_and_read_from_the_cache_later(tmp_path: Path) -> None:
    data, group = bytes_of(WEIGHT, ALPHA), group_of(WEIGHT, ALPHA)
    giver = Giver(data[:1], data[1:5], data[5:])
    for _ in range(2):
        assert torch.equal(fetch(tmp_path, giver, group), WEIGHT)
    assert giver.asked == 1


def test_how_much_of_the_weights_is_there_is_told(tmp_path: Path) -> None:
    group, told = group_of(WEIGHT, ALPHA), list[tuple[Any, ...]]()
    save_file({"a.q_proj": ALPHA}, tmp_path / "scales.safetensors")
    giver, announced = Giver(bytes_of(WEIGHT, ALPHA)), Announced([group])
    fetch_weights(giver, announced, tmp_path, {0}, tmp_path, lambda *each: told.append(each))  # type: ignore[arg-type]
    assert told == [("fetching the weights of kept layers", done, 1, "MB") for done in (0, 1)]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=12), max_size=6), st.integers(0, 18), st.booleans())
def test_whatever_comes_is_the_weight_or_a_malformed_frame(parts: list[bytes], cut: int, is_whole: bool) -> None:
    data = bytes_of(WEIGHT, ALPHA)
    chunks = [data[:cut], data[cut:]] if is_whole else parts
    with tempfile.TemporaryDirectory() as folder:
        if is_whole:
            assert torch.equal(fetch(Path(folder), Giver(*chunks), group_of(WEIGHT, ALPHA)), WEIGHT)
        else:
            with pytest.raises(MalformedFrame):
                fetch(Path(folder), Giver(*chunks), group_of(WEIGHT, ALPHA))


def test_a_cached_weight_that_was_changed_is_fetched_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    giver, group = Giver(bytes_of(WEIGHT, ALPHA)), group_of(WEIGHT, ALPHA)
    fetch(tmp_path, giver, group)
    (store,) = (tmp_path / "cache" / "weights").iterdir()
    store.write_bytes(store.read_bytes().replace(WEIGHT.numpy().tobytes(), b"\1" * 6))
    assert torch.equal(fetch(tmp_path, giver, group), WEIGHT)
    assert giver.asked == 2
    assert "fetched anew: its bytes are damaged" in caplog.text


def test_the_largest_numbers_and_scales_are_taken(tmp_path: Path) -> None:
    weight, alpha = torch.tensor([[127, -127]], dtype=torch.int8), torch.full((2,), MOST_SCALE)
    assert torch.equal(fetch(tmp_path, Giver(bytes_of(weight, alpha)), group_of(weight, alpha), alpha), weight)


def larger(scale: float) -> torch.Tensor:
    return torch.tensor([0.5, scale, 2.0])


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (larger(MOST_SCALE * 2), "scales of a.q are above 65536"),
        (larger(3e38), "scales of a.q are above 65536"),
        (larger(float("nan")), "not positive numbers"),
        (larger(float("inf")), "not positive numbers"),
        (larger(0.0), "not positive numbers"),
        (larger(-1.0), "not positive numbers"),
    ],
)
def test_scales_that_no_weight_has_are_refused_before_anything_is_asked_for(
    tmp_path: Path, alpha: torch.Tensor, expected: str
) -> None:
    giver = Giver(bytes_of(WEIGHT, alpha))
    with pytest.raises(MalformedFrame, match=expected) as caught:
        fetch(tmp_path, giver, group_of(WEIGHT, alpha), alpha)
    assert "\n" not in str(caught.value)
    assert giver.asked == 0


def test_layers_that_change_their_places_change_what_is_pinned() -> None:
    """A group's digest stays the same if its layers are named in another order, and each has another's weight then."""
    weight = torch.ones(2, 4, dtype=torch.int8)
    group = group_of(weight, torch.ones(4))
    parts = [group.layers[0].model_copy(update={"name": name, "out_features": 2}) for name in ("a.k", "a.v")]
    orders = [group.model_copy(update={"layers": tuple(layers)}) for layers in (parts, parts[::-1])]
    one, other = (weights_digest(Announced([each])) for each in orders)  # type: ignore[arg-type]
    assert one != other
    assert one == weights_digest(Announced([orders[0].model_copy(update={"max_row_norm": 3.0})]))  # type: ignore[arg-type]


def test_other_scales_than_the_bundle_has_are_refused(tmp_path: Path) -> None:
    other = larger(0.125)
    with pytest.raises(MalformedFrame, match="not the one that the manifest announced"):
        fetch(tmp_path, Giver(bytes_of(WEIGHT, other)), group_of(WEIGHT, other), ALPHA)


def test_a_number_that_the_quantiser_does_not_make_is_refused(tmp_path: Path) -> None:
    weight = WEIGHT.clone()
    weight[0, 1] = -128
    with pytest.raises(MalformedFrame, match="holds -128, which the quantiser never makes"):
        fetch(tmp_path, Giver(bytes_of(weight, ALPHA)), group_of(weight, ALPHA, max_column_norm=150.0))


@pytest.mark.parametrize("norm", ["max_column_norm", "max_row_norm"])
def test_norms_with_which_products_would_wrap_are_refused(tmp_path: Path, norm: str) -> None:
    exact = getattr(group_of(WEIGHT, ALPHA), norm)
    group = group_of(WEIGHT, ALPHA, **{norm: exact * (1 - 1e-9)})
    with pytest.raises(MalformedFrame, match="a larger norm than its manifest says"):
        fetch(tmp_path, Giver(bytes_of(WEIGHT, ALPHA)), group)
    assert not (tmp_path / "cache" / "weights").exists()
    assert torch.equal(fetch(tmp_path, Giver(bytes_of(WEIGHT, ALPHA)), group_of(WEIGHT, ALPHA)), WEIGHT)


def test_the_bytes_of_a_weight_of_another_shape_are_not_taken_from_the_cache(tmp_path: Path) -> None:
    """The digest does not cover the shape: 4 rows of 3 numbers and 3 scales may be the bytes of 2 rows of 4 numbers and
    4 scales."""
    tall, wide = torch.ones(4, 3, dtype=torch.int8), torch.ones(2, 4, dtype=torch.int8)
    scales = torch.frombuffer(bytearray(b"\1" * 16), dtype=torch.float32)
    assert bytes_of(tall, scales[:3]) == bytes_of(wide, scales)
    fetch(tmp_path, Giver(bytes_of(tall, scales[:3])), group_of(tall, scales[:3]), scales[:3].clone())
    giver = Giver(bytes_of(wide, scales))
    assert torch.equal(fetch(tmp_path, giver, group_of(wide, scales), scales.clone()), wide)
    assert giver.asked == 1


def test_a_machine_that_does_not_tell_its_memory_gets_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenant_sdk.trust.weights.free_memory", lambda: None)
    features = 1 << 22
    group = group_of(WEIGHT, ALPHA, in_features=features, out_features=features)
    with pytest.raises(MalformedFrame, match="do not fit the manifest"):  # the bundle would have to hold as many scales
        fetch(tmp_path, Giver(), group)
    scales, empty = torch.ones(features), torch.empty

    def small(size: Any, *others: Any, **options: Any) -> torch.Tensor:
        if isinstance(size, int) and size > 1 << 40:
            raise RuntimeError("this machine has less memory")
        return empty(size, *others, **options)

    monkeypatch.setattr(torch, "empty", small)
    with pytest.raises(ConfigurationError, match="no memory for the 17592"):
        fetch(tmp_path, Giver(), group, scales)


@pytest.mark.parametrize("sizes", [(1 << 22, 1 << 22), (1 << 22, 1 << 12)])
def test_sizes_beyond_this_machine_are_refused_before_memory_is_taken(
    tmp_path: Path, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenant_sdk.trust.weights.free_memory", lambda: 16 << 30)
    group = group_of(WEIGHT, ALPHA, in_features=sizes[0], out_features=sizes[1])
    giver = Giver()
    with pytest.raises(ConfigurationError, match=r"GB of memory, and 17\.2 GB are free: keep fewer") as caught:
        fetch(tmp_path, giver, group)
    assert "\n" not in str(caught.value)
    assert giver.asked == 0


def test_a_full_disk_is_one_line_and_the_session_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("wire.prepared.os.fsync", full)
    assert torch.equal(fetch(tmp_path, Giver(bytes_of(WEIGHT, ALPHA)), group_of(WEIGHT, ALPHA)), WEIGHT)
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert list((tmp_path / "cache" / "weights").iterdir()) == []
