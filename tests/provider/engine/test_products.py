"""Tests products against slow references, the refusal of bad input, and that nothing is kept between calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from provider.embedded import serve_in_process
from provider.model.served_model import ServedModel
from tests.support.tiny_models import make_tiny
from wire.errors import InvalidTensor, RemoteFault, UnknownLayer
from wire.frame import DTYPES, Arithmetic, Call, Direction, Purpose
from wire.ring import coding
from wire.ring.quantise import digest, quantise
from wire.ring.seeded_rows import Rows, SeededRows

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
RING, FLOAT = Arithmetic.RING, Arithmetic.FLOAT


@pytest.fixture(scope="module", params=[("llama", "int8"), ("gpt2", "int8"), ("gpt2", "native"), ("llama", "native")])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ServedModel, Path]:
    kind, weights = request.param
    folder = tmp_path_factory.mktemp("model") / kind
    make_tiny(kind, folder)
    return serve_in_process(str(folder), weights), folder


def weights_of(served_model: ServedModel, folder: Path, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the checkpoint's W, shape (in, out), and b of one group."""
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    layers = served_model.manifest().groups[group].layers
    parts = [state[f"{layer.name}.weight"] for layer in layers]
    matrices = [part if layer.kind == "conv1d" else part.t() for part, layer in zip(parts, layers, strict=True)]
    biases = [state.get(f"{layer.name}.bias", torch.zeros(layer.out_features)) for layer in layers]
    return torch.cat(matrices, 1), torch.cat(biases)


def random_rows(served_model: ServedModel, call: Call, num_rows: int) -> torch.Tensor:
    info = served_model.manifest().groups[call.group]
    cols = info.in_features if call.direction is FORWARD else info.out_features
    if call.arithmetic is FLOAT:
        return torch.randn(num_rows, cols)
    return torch.randint(-(2**31), 2**31, (num_rows, cols), dtype=torch.int32)


@pytest.mark.parametrize("num_rows", [0, 1, 9])
@pytest.mark.parametrize("direction", list(Direction))
def test_ring_products_equal_64_bit_integers(
    served: tuple[ServedModel, Path], direction: Direction, num_rows: int
) -> None:
    served_model, _ = served
    for group in served_model.served.groups:
        call = Call(group.info.id, direction, RING)
        rows = random_rows(served_model, call, num_rows)
        weight = group.quantised.to(torch.int64)
        exact = rows.to(torch.int64) @ (weight if direction is FORWARD else weight.t())
        for purpose in (Purpose.PRODUCT, Purpose.EFFECT):
            reply = served_model.compute(Call(call.group, direction, RING, purpose), rows)
            assert reply.dtype == torch.int32
            assert reply.shape == exact.shape
            assert not ((reply.to(torch.int64) - exact) % 2**32).any()


def test_weights_are_the_normative_quantisation(served: tuple[ServedModel, Path]) -> None:
    served_model, folder = served
    for group in served_model.served.groups:
        quantised, alpha = quantise(weights_of(served_model, folder, group.info.id)[0])
        assert torch.equal(quantised, group.quantised)
        assert torch.equal(alpha, group.alpha)
        assert digest(quantised, alpha) == group.info.digest
        parts = quantised.split([layer.out_features for layer in group.info.layers], 1)
        scales = alpha.split([layer.out_features for layer in group.info.layers])
        assert [digest(*pair) for pair in zip(parts, scales, strict=True)] == [one.digest for one in group.info.layers]


def test_float_products(served: tuple[ServedModel, Path]) -> None:
    served_model, folder = served
    for group in served_model.served.groups:
        weight, bias = weights_of(served_model, folder, group.info.id)
        if served_model.manifest().weights == "int8":
            weight = group.quantised * group.alpha
        rows = random_rows(served_model, Call(group.info.id, FORWARD, FLOAT), 5)
        reply = served_model.compute(Call(group.info.id, FORWARD, FLOAT), rows)
        torch.testing.assert_close(reply, rows @ weight + bias, rtol=1e-5, atol=1e-6)
        grads = random_rows(served_model, Call(group.info.id, BACKWARD, FLOAT), 5)
        reply = served_model.compute(Call(group.info.id, BACKWARD, FLOAT), grads)
        torch.testing.assert_close(reply, grads @ weight.t(), rtol=1e-5, atol=1e-5)


def test_product_and_effect_differ_by_exactly_the_bias(served: tuple[ServedModel, Path]) -> None:
    served_model, folder = served
    for group in served_model.served.groups:
        rows = random_rows(served_model, Call(group.info.id, FORWARD, FLOAT), 7)
        product = served_model.compute(Call(group.info.id, FORWARD, FLOAT, Purpose.PRODUCT), rows)
        effect = served_model.compute(Call(group.info.id, FORWARD, FLOAT, Purpose.EFFECT), rows)
        assert torch.equal(product, effect + weights_of(served_model, folder, group.info.id)[1])


@pytest.mark.parametrize("num_rows", [0, 1, 9])
@pytest.mark.parametrize("direction", list(Direction))
def test_a_hint_is_the_product_of_the_expanded_rows(
    served: tuple[ServedModel, Path], direction: Direction, num_rows: int
) -> None:
    served_model, _ = served
    seeded = SeededRows(bytes(range(32)), 2**33 - 4, num_rows)
    for info in served_model.manifest().groups:
        cols = info.in_features if direction is FORWARD else info.out_features
        hint = served_model.compute(Call(info.id, direction, RING, Purpose.HINT), seeded)
        assert hint.dtype == torch.int32
        assert torch.equal(hint, served_model.compute(Call(info.id, direction, RING), seeded.expand(cols)))


@pytest.mark.parametrize("scratch_bytes", [1, 10_000, 1 << 16])
@pytest.mark.parametrize("direction", list(Direction))
def test_hints_are_made_in_pieces_of_bounded_size(
    served: tuple[ServedModel, Path], monkeypatch: pytest.MonkeyPatch, direction: Direction, scratch_bytes: int
) -> None:
    served_model, _ = served
    call, seeded = Call(0, direction, RING, Purpose.HINT), SeededRows(bytes(32), 3, 75)
    whole = served_model.compute(call, seeded)
    pieces: list[int] = []
    exact = coding.product

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # This is an upper bound of what a piece holds at once: its numbers, their limbs, and four limbs of sums.
        assert rows.shape[0] == 1 or 8 * rows.numel() + 16 * rows.shape[0] * weight.shape[1] <= scratch_bytes
        pieces.append(rows.shape[0])
        return exact(rows, weight)

    monkeypatch.setattr("provider.engine.products.HINT_SCRATCH_BYTES", scratch_bytes)
    monkeypatch.setattr("provider.engine.products.coding.product", product)
    assert torch.equal(served_model.compute(call, seeded), whole)
    assert sum(pieces) == 75
    assert len(pieces) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_native_weights_keep_the_checkpoints_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    make_tiny("llama", tmp_path).to(dtype).save_pretrained(tmp_path / "half")
    served_model = serve_in_process(str(tmp_path / "half"), "native")
    group = served_model.served.groups[0]
    assert group.native is not None
    assert group.native.dtype == dtype
    rows = torch.randn(3, group.info.in_features)
    assert torch.allclose(served_model.compute(Call(0, FORWARD, FLOAT), rows), rows @ group.native.float(), atol=1e-6)
    grads = torch.randn(3, group.info.out_features)
    assert torch.allclose(
        served_model.compute(Call(0, BACKWARD, FLOAT), grads), grads @ group.native.float().t(), atol=1e-5
    )


def test_wide_weights_are_converted_in_pieces(
    served: tuple[ServedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    served_model, _ = served
    rows = random_rows(served_model, Call(0, FORWARD, FLOAT), 3)
    grads = random_rows(served_model, Call(0, BACKWARD, FLOAT), 3)
    whole = [served_model.compute(Call(0, FORWARD, FLOAT), rows), served_model.compute(Call(0, BACKWARD, FLOAT), grads)]
    monkeypatch.setattr("provider.engine.products.BLOCK_ELEMENTS", 32 * 10)
    parts = [served_model.compute(Call(0, FORWARD, FLOAT), rows), served_model.compute(Call(0, BACKWARD, FLOAT), grads)]
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "rows", "error"),
    [
        (Call(99, FORWARD, RING), torch.zeros(1, 32, dtype=torch.int32), UnknownLayer),
        (Call(0, FORWARD, RING, Purpose.HINT), torch.zeros(1, 32, dtype=torch.int32), InvalidTensor),
        (Call(0, FORWARD, RING), SeededRows(bytes(32), 0, 1), InvalidTensor),
        (Call(0, FORWARD, RING, Purpose.EFFECT), SeededRows(bytes(32), 0, 1), InvalidTensor),
        (Call(99, FORWARD, RING, Purpose.HINT), SeededRows(bytes(32), 0, 1), UnknownLayer),
        (Call(0, BACKWARD, FLOAT, Purpose.HINT), SeededRows(bytes(32), 0, 0), UnknownLayer),
        (Call(0, FORWARD, FLOAT, Purpose.HINT), torch.zeros(1, 32), InvalidTensor),
        (Call(0, FORWARD, RING), torch.zeros(1, 31, dtype=torch.int32), InvalidTensor),
        (Call(0, BACKWARD, RING), torch.zeros(1, 32, dtype=torch.int32), InvalidTensor),
        (Call(0, FORWARD, RING), torch.zeros(1, 32), InvalidTensor),
        (Call(0, FORWARD, FLOAT), torch.zeros(1, 32, dtype=torch.float64), InvalidTensor),
        (Call(0, FORWARD, RING), torch.zeros(32, dtype=torch.int32), InvalidTensor),
        (Call(0, FORWARD, FLOAT), torch.full((1, 32), float("nan")), InvalidTensor),
        (Call(0, FORWARD, FLOAT), torch.full((1, 32), float("-inf")), InvalidTensor),
    ],
)
def test_bad_requests(served: tuple[ServedModel, Path], call: Call, rows: Rows, error: type[Exception]) -> None:
    with pytest.raises(error):
        served[0].compute(call, rows)


def test_the_header_of_a_hint_is_checked_like_any_other(served: tuple[ServedModel, Path]) -> None:
    served_model = served[0]
    info = served_model.manifest().groups[0]
    assert served_model.check(Call(0, FORWARD, RING, Purpose.HINT), info.in_features) == info.out_features
    assert served_model.check(Call(0, BACKWARD, RING, Purpose.HINT), info.out_features) == info.in_features
    with pytest.raises(InvalidTensor):
        served_model.check(Call(0, FORWARD, RING, Purpose.HINT), info.in_features + 1)
    with pytest.raises(UnknownLayer, match="ring"):
        served_model.check(Call(0, FORWARD, FLOAT, Purpose.HINT), info.in_features)


def test_large_finite_rows_are_not_mistaken_for_infinite(served: tuple[ServedModel, Path]) -> None:
    rows = torch.full((4, 32), 3e38)
    served_model = served[0]
    assert served_model.compute(Call(0, FORWARD, FLOAT), rows).shape[0] == 4


def test_a_result_depends_on_nothing_before_it(served: tuple[ServedModel, Path]) -> None:
    served_model = served[0]
    rows: dict[Call, Rows] = {
        call: random_rows(served_model, call, 4)
        for call in (Call(g, d, a) for g in (0, 1) for d in Direction for a in DTYPES)
    }
    rows |= {Call(g, d, RING, Purpose.HINT): SeededRows(bytes(32), g, 4) for g in (0, 1) for d in Direction}
    first = {call: served_model.compute(call, given) for call, given in rows.items()}
    again = {call: served_model.compute(call, given) for call, given in reversed(rows.items())}
    assert all(torch.equal(first[call], again[call]) for call in rows)


def test_an_unforeseen_failure_names_no_value(
    served: tuple[ServedModel, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("secret 123.456")

    monkeypatch.setattr("provider.model.served_model.products.compute", broken)
    with pytest.raises(RemoteFault) as caught:
        served[0].compute(Call(0, FORWARD, RING), torch.zeros(1, 32, dtype=torch.int32))
    assert "123" not in str(caught.value) + caplog.text
    assert "group 0" in caplog.text
    assert "RuntimeError" in caplog.text
