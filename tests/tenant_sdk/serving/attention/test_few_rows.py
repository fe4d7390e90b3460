"""Tests that the compiled attention equals torch's for every type of KV, window and head, and writes only to the memory
that it is given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tenant_sdk.serving.attention import kernels
from tenant_sdk.serving.attention.few_rows import FewRows, RequestRows, split
from tenant_sdk.serving.kv import KV_DTYPES, KvLayout, RequestKv
from tenant_sdk.serving.ragged import attend
from tests.support.compiled_kernels import forget
from wire.errors import ConfigurationError

CPU = torch.device("cpu")
STEP_TOKENS, LENGTHS, ROWS = 32, (0, 3, 64, 130, 200), (1, 1, 4, 2, 1)
"""The most tokens that are written at a time, the tokens that each request has before the first step, and the rows of
each request in every step."""

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no compiled attention on this machine")


def filled(layout: KvLayout, length: int, seed: int) -> RequestKv:
    """Returns the KV of a request with `length` random tokens. At most `STEP_TOKENS` tokens are written at a time."""
    made, generator = RequestKv(layout, 300, CPU), torch.Generator().manual_seed(seed)
    shape = (layout.num_kv_heads, length, layout.head_dim)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    for begin in range(0, length, STEP_TOKENS):
        rows = slice(begin, min(begin + STEP_TOKENS, length))
        made.update(0, begin, keys[:, rows], values[:, rows])
    return made


def steps(layout: KvLayout, num_heads: int, count: int) -> Iterator[list[torch.Tensor]]:
    """Yields the random query, keys and values of `count` steps, each of shape (heads, rows, head_dim), with the
    strides that models give them."""
    generator = torch.Generator().manual_seed(9)
    for _ in range(count):
        yield [
            torch.randn(sum(ROWS), heads, layout.head_dim, generator=generator).transpose(0, 1)
            for heads in (num_heads, layout.num_kv_heads, layout.num_kv_heads)
        ]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "window", "softcap"),
    [(9, 3, 64, None, None), (8, 8, 16, 7, 5.0), (4, 1, 256, None, None), (4, 2, 40, 70, None), (2, 2, 8, 1, None)],
)
def test_it_equals_torchs_attention(
    kv_dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None, softcap: float | None
) -> None:
    layout = KvLayout((window,), num_kv_heads, head_dim, KV_DTYPES[kv_dtype], STEP_TOKENS)
    ours, theirs = ([filled(layout, length, seed) for seed, length in enumerate(LENGTHS)] for _ in range(2))
    begins, lengths = [0, *itertools.accumulate(ROWS)][:-1], list(LENGTHS)
    for query, key, value in steps(layout, num_heads, 8):
        out = torch.full((sum(ROWS), num_heads, head_dim), torch.nan)
        parts = [RequestRows(kv, length, rows) for kv, length, rows in zip(ours, lengths, ROWS, strict=True)]
        made = FewRows(list(zip(begins, parts, strict=True)))
        made.attend(0, query, key, value, out, window, head_dim**-0.5, softcap)
        for number, kv in enumerate(theirs):
            rows = slice(begins[number], begins[number] + ROWS[number])
            keys, values = kv.update(0, lengths[number], key[:, rows], value[:, rows])
            columns = torch.arange(keys.shape[1])
            own = columns[-ROWS[number] :, None]
            mask = (columns <= own) if window is None else (columns <= own) & (columns > own - window)
            want = attend(query[:, rows], keys, values, mask, head_dim**-0.5, softcap).transpose(0, 1)
            torch.testing.assert_close(out[rows], want, rtol=1e-5, atol=5e-6)
            lengths[number] += ROWS[number]


def test_what_is_kept_is_what_torch_keeps_and_nothing_else_is_written() -> None:
    for dtype in KV_DTYPES.values():
        layout = KvLayout((None,), 2, 16, dtype, STEP_TOKENS)
        ours, theirs = (RequestKv(layout, 20, CPU) for _ in range(2))
        for kv in (ours, theirs):
            kv.clear()
            kv.update(0, 0, torch.ones(2, 5, 16), torch.ones(2, 5, 16))
        key, value = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
        out = torch.zeros(3, 2, 16)
        FewRows([(0, RequestRows(ours, 5, 3))]).attend(0, key, key, value, out, None, 0.25, None)
        theirs.update(0, 5, key, value)
        for mine, other in zip(ours.update(0, 19, *[torch.zeros(2, 1, 16)] * 2),
                               theirs.update(0, 19, *[torch.zeros(2, 1, 16)] * 2), strict=True):  # fmt: skip
            assert torch.equal(mine, other)


def test_extreme_scores_and_values() -> None:
    """Scores of a thousand do not overflow, and one large score takes all the weight."""
    layout = KvLayout((None,), 1, 8, torch.float32, STEP_TOKENS)
    kv = RequestKv(layout, 100, CPU)
    keys = torch.zeros(1, 70, 8)
    keys[0, 3, 0], keys[0, 66, 0] = 1e3, -1e3
    values = torch.randn(1, 70, 8)
    for begin in range(0, 69, 32):
        rows = slice(begin, min(begin + 32, 69))
        kv.update(0, begin, keys[:, rows], values[:, rows])
    query = torch.zeros(1, 1, 8)
    query[0, 0, 0] = 1.0
    out = torch.zeros(1, 1, 8)
    FewRows([(0, RequestRows(kv, 69, 1))]).attend(0, query, keys[:, 69:], values[:, 69:], out, None, 1.0, None)
    torch.testing.assert_close(out[0, 0], values[0, 3], rtol=0, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("token", [3, 69], ids=["first chunk", "last chunk"])
@pytest.mark.parametrize("wrong", [torch.nan, 3e38], ids=["nan", "overflow"])
def test_a_score_that_is_not_finite_is_not_hidden(wrong: float, token: int, softcap: float | None) -> None:
    """A score that is NaN, or infinite since the product overflows, gives NaN as in torch, so that the request is lost
    and not answered wrongly. With softcap, an infinite score is bounded."""
    layout = KvLayout((None,), 1, 8, torch.float32, STEP_TOKENS)
    kv, keys, values = RequestKv(layout, 100, CPU), torch.zeros(1, 70, 8), torch.ones(1, 70, 8)
    keys[0, token] = wrong
    for begin in range(0, 69, 32):
        rows = slice(begin, min(begin + 32, 69))
        kv.update(0, begin, keys[:, rows], values[:, rows])
    out = torch.zeros(1, 1, 8)
    FewRows([(0, RequestRows(kv, 69, 1))]).attend(
        0, torch.ones(1, 1, 8), keys[:, 69:], values[:, 69:], out, None, 1.0, softcap
    )
    bounded = softcap is not None and wrong == wrong
    torch.testing.assert_close(out, torch.full_like(out, 1.0 if bounded else torch.nan), equal_nan=True)


def test_long_pieces_and_other_rows_are_left_to_torch() -> None:
    layout = KvLayout((None,), 2, 16, torch.float32, STEP_TOKENS)
    odd = KvLayout((None,), 2, 12, torch.float32, STEP_TOKENS)
    parts = [
        RequestRows(RequestKv(layout, 40, CPU), 0, kernels.MOST_ROWS), RequestRows(RequestKv(layout, 40, CPU), 0, 17),
        RequestRows(RequestKv(layout, 40, CPU), 0, 4, num_unseen=4), RequestRows(RequestKv(odd, 40, CPU), 0, 1),
    ]  # fmt: skip
    few, others = split(parts, torch.float32)
    assert few is not None
    assert [begin for begin, _ in others] == [kernels.MOST_ROWS, kernels.MOST_ROWS + 17, kernels.MOST_ROWS + 21]
    assert split(parts, torch.bfloat16)[0] is None
    assert split(parts, None)[0] is None


@pytest.mark.parametrize(
    "change", [{4: 5}, {5: -1}, {5: 5}, {6: -1}, {6: 2}, {7: 0}, {7: 3}], ids=lambda change: str(*change.items())
)
def test_a_piece_that_does_not_fit_is_refused(change: dict[int, int]) -> None:
    kept = torch.zeros(2, 1, 6, 8)
    part = np.array([[kept[0].data_ptr(), kept[1].data_ptr(), 0, 0, 6, 4, 0, 2]], dtype=np.int64)
    new, out = kernels.NewVectors(torch.ones(1, 2, 8)), torch.zeros(2, 1, 8)
    query = torch.ones(1, 2, 8)
    kernels.attend(part, query, new, new, out, window=None, scaling=1.0, softcap=None)
    assert out.any()
    for field, number in change.items():
        part[0, field] = number
    with pytest.raises(ConfigurationError, match="does not fit"):
        kernels.attend(part, query, new, new, out, window=None, scaling=1.0, softcap=None)


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    kept = torch.zeros(2, 1, 6, 8)
    part = np.array([[kept[0].data_ptr(), kept[1].data_ptr(), 0, 0, 6, 4, 0, 2]], dtype=np.int64)
    new, out, query = kernels.NewVectors(torch.ones(1, 2, 8)), torch.zeros(2, 1, 8), torch.ones(1, 2, 8)
    options = {"window": None, "scaling": 1.0, "softcap": None}
    for given in (
        (part, query, new, new, torch.zeros(2, 1, 16)), (part, query.double(), new, new, out),
        (part, query, new, kernels.NewVectors(torch.ones(1, 3, 8)), out), (part[:, :7], query, new, new, out),
        (part, query, kernels.NewVectors(torch.ones(1, 2, 8), torch.ones(1, 2, 1)), new, out),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match="do not fit together"):
            kernels.attend(*given, **options)  # type: ignore[arg-type]


@pytest.fixture
def _loaded_anew() -> Iterator[None]:
    forget(kernels)
    yield
    forget(kernels)


@pytest.mark.usefixtures("_loaded_anew")
def test_without_the_library_torch_computes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VEILBASE_KERNELS", "none")
    assert not kernels.available()
