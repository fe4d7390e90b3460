"""Tests the kernels that encode and decode rows, in Triton's interpreter on the CPU, and on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.cuda import needs_cuda
from tests.support.triton_kernels import interpret
from wire.errors import NotFinite
from wire.ring import codec_triton, coding, kernels, product_triton

CPU = torch.device("cpu")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)


@pytest.fixture
def _fresh_self_test() -> Iterator[None]:
    codec_triton.is_usable.cache_clear()
    yield
    codec_triton.is_usable.cache_clear()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")  # rows of NaN, in numpy
def test_the_self_test_accepts_the_kernels() -> None:
    assert codec_triton.passes_self_test(CPU)


def decoded_plus_one(decode: Any) -> Any:
    return lambda reply, *given: decode(reply + 1, *given)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("function", "planted"),
    [
        ("decode", decoded_plus_one),
        ("decode", lambda right: lambda reply, beta, alpha, effect: right(reply, beta, alpha, None)),
        ("decode", lambda right: lambda reply, beta, alpha, effect: right(reply, beta, None, effect)),
        ("encode", lambda right: lambda rows, alpha, *given: right(rows, None, *given)),
        ("encode", lambda right: lambda rows, *given: right(rows.nan_to_num(), *given)),
        ("encode", lambda right: lambda rows, *given: right(rows * 1.0001, *given)),
    ],
    ids=["one more", "no effect", "no scales", "no alpha", "NaN unseen", "other scales"],
)
def test_the_self_test_refuses_a_fault(function: str, planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_triton, function, planted(getattr(codec_triton, function)))
    assert not codec_triton.passes_self_test(CPU)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 1), (3, 130)])
@pytest.mark.parametrize("has_alpha", [False, True])
def test_rows_are_those_of_torchs_operations(
    shape: tuple[int, int], has_alpha: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows whose columns are not contiguous are read right, too."""
    rows = torch.randn(shape[::-1], generator=torch.Generator().manual_seed(1)).t() * 100
    alpha = torch.rand(shape[1]) + 0.5 if has_alpha else None
    monkeypatch.setattr(kernels, "available", lambda: False)
    exact, scales = coding.encode(rows, 1000.0, alpha=alpha)
    found = codec_triton.encode(rows, alpha, coding.largest_norm(shape[1], 1000.0, 0.0, 0.0), coding.SMALLEST_SCALE)
    assert found is not None
    assert (found[0].dtype, found[0].shape, found[1].shape) == (torch.int32, exact.shape, scales.shape)
    assert torch.allclose(found[1], scales, rtol=1e-6)
    assert (found[0] - exact).abs().sum() <= 2
    effect = torch.arange(exact.numel(), dtype=torch.int32).view(shape[::-1]).t() * 77_777_777
    expected = coding.decode(exact, scales, alpha, effect)
    assert torch.equal(codec_triton.decode(exact, scales, alpha, effect), expected)


@pytest.mark.usefixtures("_fresh_self_test")
@pytest.mark.parametrize("answer", [False, ImportError(), RuntimeError("ptxas")])
def test_without_right_kernels_torch_encodes_and_one_line_says_why(
    answer: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def tested(device: torch.device) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(codec_triton, "passes_self_test", tested)
    assert not codec_triton.is_usable(CPU)
    for _ in range(2):
        assert not codec_triton.is_usable(torch.device("cuda", 0))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (0 if isinstance(answer, ImportError) else 1), "a missing extra is no fault"
    assert all(line.startswith("rows are encoded by torch's operations: ") for line in said)


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_encodes_and_decodes_with_the_kernels() -> None:
    gpu = torch.device("cuda", 0)
    if product_triton.is_exact(gpu):
        assert codec_triton.is_usable(gpu)
    rows = torch.randn(70, 300, device=gpu)
    found, scales = coding.encode(rows, 1000.0)
    exact, expected = coding.encode(rows.cpu(), 1000.0)
    assert (found.cpu() - exact).abs().max() <= 2
    assert torch.allclose(scales.cpu(), expected, rtol=1e-6)
    rows[3, 299] = float("nan")
    with pytest.raises(NotFinite):
        coding.encode(rows, 1000.0)
