"""Tests that attention in chunks equals attention at once for every window and type, also with keys and values on the
host, and tests the limit of a request's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tenant_sdk import TenantClient
from tenant_sdk.serving import long_attention
from tenant_sdk.serving.engine import Engine
from tenant_sdk.serving.kv import DEVICE_ROWS, KV_DTYPES, KvLayout, RequestKv, attention_device, kv_place
from tenant_sdk.serving.long_attention import attend_in_chunks, read_floats, takes_chunks
from tenant_sdk.serving.ragged import attend
from tests.support.engines import TIMEOUT_S
from tests.support.tiny_models import KINDS, PROMPTS, make_model, open_client
from wire.errors import ConfigurationError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HEADS, KV_HEADS, WIDTH = 4, 2, 8


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every request count as long, and makes chunks so short that attention mostly takes several of them."""
    monkeypatch.setattr(long_attention, "LONG_TOKENS", 1)
    monkeypatch.setattr(long_attention, "CHUNK_TOKENS", 5)


def mask_of(num_rows: int, num_tokens: int, window: int | None) -> torch.Tensor:
    """Returns which tokens each of the last `num_rows` tokens attends to, bool, shape (num_rows, num_tokens), computed
    in a slow and obvious way."""
    seen = torch.zeros(num_rows, num_tokens, dtype=torch.bool)
    for row in range(num_rows):
        for token in range(num_tokens):
            place = num_tokens - num_rows + row
            seen[row, token] = token <= place and (window is None or token > place - window)
    return seen


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 7, 30])
@pytest.mark.parametrize("num_rows", [1, 6, 23])
def test_chunks_give_what_torch_gives_at_once(
    short_chunks: None, num_rows: int, window: int | None, softcap: float | None, dtype: str
) -> None:
    torch.manual_seed(0)
    num_tokens = 23
    kv = RequestKv(KvLayout((None,), KV_HEADS, WIDTH, KV_DTYPES[dtype], 64), num_tokens, CPU)
    before = num_tokens - num_rows
    kv.write(0, 0, torch.randn(KV_HEADS, before, WIDTH), torch.randn(KV_HEADS, before, WIDTH))
    query, new = torch.randn(HEADS, num_rows, WIDTH), torch.randn(2, KV_HEADS, num_rows, WIDTH)
    keys, values = kv.update(0, before, new[0], new[1])
    want = attend(query, keys, values, mask_of(num_rows, num_tokens, window), 0.3, softcap)
    got = attend_in_chunks(query, kv, 0, before, window, 0.3, softcap)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_row_that_is_not_finite_stays_so_and_alone(short_chunks: None) -> None:
    kv = RequestKv(KvLayout((None,), KV_HEADS, WIDTH, torch.float32, 64), 12, CPU)
    kv.write(0, 0, torch.randn(KV_HEADS, 12, WIDTH), torch.randn(KV_HEADS, 12, WIDTH))
    query = torch.randn(HEADS, 3, WIDTH)
    query[:, 1] = torch.nan
    found = torch.isfinite(attend_in_chunks(query, kv, 0, 9, None)).all(dim=-1)
    assert found.tolist() == [[True, False, True]] * HEADS


def test_every_number_of_fp8_is_read_as_torch_reads_it() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    kv = RequestKv(KvLayout((None,), 1, 256, torch.float8_e4m3fn, 4), 2, CPU)
    numbers, scales = kv.kept(0, 0, 1) or ()
    numbers.copy_(every.expand_as(numbers))
    scales.fill_(0.5)
    keys, values = read_floats(kv, 0, 0, 1, CPU)
    is_number = ~every.float().isnan()
    assert int(is_number.sum()) == 254
    for each in (keys, values):
        assert torch.equal(each[0, 0][is_number], every.float()[is_number] * 0.5)
    scales.fill_(torch.nan)  # what a vector with NaN has for a scale
    assert read_floats(kv, 0, 0, 1, CPU)[0].isnan().all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_engines_answer_the_same_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, kv_dtype: str
) -> None:
    with open_client(make_model(kind, tmp_path / kind)) as client:
        found = []
        for long_tokens in (1 << 30, 9):
            monkeypatch.setattr(long_attention, "LONG_TOKENS", long_tokens)
            monkeypatch.setattr(long_attention, "CHUNK_TOKENS", 7)
            with Engine(client, step_tokens=16, kv_dtype=kv_dtype) as engine:
                answers = [engine.submit(prompt, max_new_tokens=6, eos_token_id=[]) for prompt in PROMPTS[:3]]
                found.append([answer.result(TIMEOUT_S) for answer in answers])
    assert found[0] == found[1]


def test_one_row_of_fp32_is_read_where_it_is() -> None:
    kvs = {name: RequestKv(KvLayout((None,), 2, 8, dtype, 4), 9000, CPU) for name, dtype in KV_DTYPES.items()}
    one, two = torch.zeros(4, 1, 8), torch.zeros(4, 2, 8)
    assert [takes_chunks(one, kv, 8999, None) for kv in kvs.values()] == [False, True, True]
    assert all(takes_chunks(two, kv, 8990, None) for kv in kvs.values())
    for position, window in ((8000, None), (8990, 512)):
        for each in (one, two):
            assert [takes_chunks(each, kv, position, window) for kv in kvs.values()] == [False, False, True]
    assert not any(takes_chunks(one, kv, 500, None) for kv in kvs.values())


# ---- keys and values on the host -------------------------------------------------------------------------------------


def test_attention_of_few_rows_is_where_its_keys_are() -> None:
    assert attention_device(1, GPU, CPU) == CPU
    assert attention_device(DEVICE_ROWS - 1, GPU, CPU) == CPU
    assert attention_device(DEVICE_ROWS, GPU, CPU) == GPU
    assert {attention_device(rows, GPU, GPU) for rows in (1, DEVICE_ROWS)} == {GPU}
    assert {attention_device(rows, CPU, CPU) for rows in (1, DEVICE_ROWS)} == {CPU}


def test_where_keys_and_values_are_kept() -> None:
    assert kv_place(None, GPU) == GPU
    assert kv_place("cpu", GPU) == CPU
    for wrong in ("cuda", "disk", 1):
        with pytest.raises(ConfigurationError, match='kv_device is None, the model\'s device, or "cpu"'):
            kv_place(wrong, CPU)  # type: ignore[arg-type]


def test_an_engine_whose_keys_are_on_another_device(client: TenantClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run without an accelerator, so another name of the CPU stands for the host, which is then another device
    than the model's. Attention of `DEVICE_ROWS` rows or more is then computed on the model's device."""
    with Engine(client, step_tokens=64, kv_device="cpu") as engine:
        want = [engine.submit(prompt, max_new_tokens=6).result(TIMEOUT_S) for prompt in PROMPTS]
    where: list[tuple[bool, int]] = []

    def noted(query: torch.Tensor, kv: RequestKv, *rest: Any) -> bool:
        where.append((query.device == kv.device, query.shape[1]))
        return takes_chunks(query, kv, *rest)

    monkeypatch.setattr("tenant_sdk.serving.ragged.takes_chunks", noted)
    monkeypatch.setattr("tenant_sdk.serving.engine.kv_place", lambda *_: torch.device("cpu", 0))
    with Engine(client, step_tokens=64) as engine:
        assert [engine.submit(prompt, max_new_tokens=6).result(TIMEOUT_S) for prompt in PROMPTS] == want
    assert {is_same for is_same, num_rows in where if num_rows >= DEVICE_ROWS} == {False}


# ---- the most tokens of a request ------------------------------------------------------------------------------------


def test_max_context_bounds_prompt_and_answer(client: TenantClient) -> None:
    with Engine(client, max_context=40) as engine:
        prompt = engine.submit("who?", max_new_tokens=1)
        room = 40 - prompt.num_prompt_tokens
        assert len(engine.submit("who?", max_new_tokens=room, eos_token_id=[]).result(TIMEOUT_S)) > 0
        with pytest.raises(ConfigurationError, match=rf"may have 40 here \(max_context\): ask for at most {room}"):
            engine.submit("who?", max_new_tokens=room + 1)
        with pytest.raises(ConfigurationError, match=r"\(max_context\): shorten the prompt by at least"):
            engine.submit("x" * 50)
        answer = engine.submit("who?", eos_token_id=[])
        answer.result(TIMEOUT_S)
        assert len(answer.token_ids) == room, "without a limit, what the context leaves"
        assert "40 at most, prompt and answer together" in engine.explain()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_context": 129}, "max_context is 129, and this model takes 128 tokens at most"),
        ({"max_context": 1}, "a prompt of 1 tokens leaves no room"),
        ({"max_context": 0}, "max_context must be a positive whole number"),
        ({"kv_device": "cuda"}, "kv_device is None"),
    ],
)
def test_limits_that_cannot_be(client: TenantClient, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Engine(client, **options)
