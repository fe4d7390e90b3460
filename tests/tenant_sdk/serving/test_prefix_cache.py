"""Tests the cache of prompts: a kept prompt is found only with its own caller and adapter, and answers are the same as
if it were computed again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tenant_sdk import TenantClient
from tenant_sdk.generate import prompt_ids
from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.engine import Engine
from tenant_sdk.serving.kv import KV_DTYPES, KvLayout, RequestKv
from tenant_sdk.serving.prefix_cache import BLOCK_TOKENS, CallerPrefixes, PrefixCache
from tenant_sdk.serving.requests import Answer
from tests.support.engines import TIMEOUT_S, Gate, Recorder
from tests.support.saved_adapters import save_adapter
from tests.support.tiny_models import KINDS, make_model, open_client
from wire.errors import ConfigurationError, NotFinite, VeilbaseError

CPU = torch.device("cpu")
SYSTEM = "you are an owl of few words, and of copper: "
FIRST, SECOND = SYSTEM + "who?", SYSTEM + "where is it?"
WHOLE = 1 << 20
"""A budget that nothing in these tests fills."""


def blocks_of(num_tokens: int) -> int:
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("prefixes")
    return {kind: make_model(kind, parent / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def client(folders: dict[str, Path]) -> Iterator[TenantClient]:
    with open_client(folders["llama"]) as opened:
        yield opened


@pytest.fixture
def engine(client: TenantClient) -> Iterator[Engine]:
    with Engine(client, step_tokens=64, prefix_bytes=WHOLE) as made:
        yield made


def ask(engine: Engine, prompt: str = FIRST, adapter: str | None = None, **options: Any) -> Answer:
    answer = engine.submit(prompt, adapter, 4, **{"eos_token_id": [], **options})
    answer.result(TIMEOUT_S)
    return answer


def num_reused(engine: Engine, prompt: str = FIRST, adapter: str | None = None, **options: Any) -> int:
    return ask(engine, prompt, adapter, **options).num_reused_tokens


def recorded(engine: Engine, prompt: str, forced: list[int] | None = None) -> tuple[torch.Tensor, Answer]:
    recorder = Recorder(forced)
    answer = ask(engine, prompt, logits_processor=[recorder])
    return recorder.stacked, answer


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "kv_dtype"), [*((kind, "fp32") for kind in KINDS), ("llama", "bf16"), ("gemma2", "fp8")]
)
def test_answers_with_hits_equal_those_without(folders: dict[str, Path], kind: str, kv_dtype: str) -> None:
    with open_client(folders[kind]) as client:
        with Engine(client, step_tokens=96, kv_dtype=kv_dtype) as engine:
            want = [recorded(engine, prompt) for prompt in (FIRST, SECOND)]
            assert [answer.num_reused_tokens for _, answer in want] == [0, 0]
        with Engine(client, step_tokens=96, kv_dtype=kv_dtype, prefix_bytes=WHOLE) as engine:
            got = [
                recorded(engine, prompt, want[at][1].token_ids) for at, prompt in ((0, FIRST), (1, SECOND), (0, FIRST))
            ]
        ids = [prompt_ids(client.tokenizer, prompt) for prompt in (FIRST, SECOND)]
    shared = next(at for at, (one, other) in enumerate(zip(*ids, strict=False)) if one != other)
    assert [answer.num_reused_tokens for _, answer in got] == [0, blocks_of(shared), blocks_of(len(ids[0]) - 1)]
    assert shared > BLOCK_TOKENS
    for (logits, _), (expected, _) in zip(got, (want[0], want[1], want[0]), strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3"])
def test_a_window_that_has_passed_the_prefix_gives_no_hit(folders: dict[str, Path], kind: str) -> None:
    with open_client(folders[kind]) as client:
        with Engine(client, step_tokens=BLOCK_TOKENS) as engine:
            want = recorded(engine, SECOND)
        with Engine(client, step_tokens=BLOCK_TOKENS, prefix_bytes=WHOLE) as engine:
            recorded(engine, FIRST)
            got = recorded(engine, SECOND, want[1].token_ids)
            assert engine.status().kept_bytes > 0
    assert got[1].num_reused_tokens == 0
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)


def test_nothing_is_kept_unless_asked_for(client: TenantClient) -> None:
    with Engine(client, step_tokens=64) as engine:
        assert [num_reused(engine) for _ in range(2)] == [0, 0]
        assert engine.status().kept_bytes == 0


def test_the_whole_of_a_known_prompt_still_computes_one_row(engine: Engine, client: TenantClient) -> None:
    ids = len(prompt_ids(client.tokenizer, FIRST))
    fitting = FIRST + "x" * (-ids % BLOCK_TOKENS)
    first = ask(engine, fitting)
    again = ask(engine, fitting)
    assert first.num_prompt_tokens % BLOCK_TOKENS == 0, "the prompt ends with a block"
    assert again.num_reused_tokens == first.num_prompt_tokens - BLOCK_TOKENS
    assert again.token_ids == first.token_ids


def test_a_request_that_waits_finds_what_ended_before_it_began(client: TenantClient) -> None:
    with Engine(client, step_tokens=64, max_running=1, prefix_bytes=WHOLE) as engine:
        answers = [engine.submit(FIRST, max_new_tokens=3) for _ in range(3)]
        for answer in answers:
            answer.result(TIMEOUT_S)
    assert [bool(answer.num_reused_tokens) for answer in answers] == [False, True, True]


# ---- whose ----------------------------------------------------------------------------------------------------------


def hits_across_callers(client: TenantClient) -> int:
    with Engine(client, step_tokens=64, prefix_bytes=WHOLE) as engine:
        assert num_reused(engine, caller="a") == 0
        assert num_reused(engine, caller="a") > 0
        return num_reused(engine, caller="b")


def test_a_caller_never_hits_another_callers_prompt(client: TenantClient) -> None:
    assert hits_across_callers(client) == 0


def test_a_shared_cache_would_show(client: TenantClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the control of the test above: if all callers shared one cache, the other caller would have hits."""
    monkeypatch.setattr(PrefixCache, "of", lambda cache, caller: CallerPrefixes(cache, "all"))
    assert hits_across_callers(client) > 0


@pytest.fixture
def adapters(client: TenantClient, tmp_path: Path) -> Path:
    for seed, name in enumerate(("one", "two")):
        save_adapter(client.load_model(), tmp_path / name, seed)
    return tmp_path


def test_another_adapter_is_no_hit(client: TenantClient, adapters: Path) -> None:
    with Engine(
        client, lambda model, wake: AdapterStore(model, adapters, on_ready=wake), step_tokens=64, prefix_bytes=WHOLE
    ) as engine:
        assert [num_reused(engine, adapter=name) for name in (None, "one", "two")] == [0, 0, 0]
        assert all(num_reused(engine, adapter=name) > 0 for name in (None, "one", "two"))


def test_an_adapter_that_changed_on_disk_is_no_hit(client: TenantClient, adapters: Path) -> None:
    with Engine(
        client, lambda model, wake: AdapterStore(model, adapters, on_ready=wake), step_tokens=64, prefix_bytes=WHOLE
    ) as engine:
        before = ask(engine, adapter="one").token_ids
        assert num_reused(engine, adapter="one") > 0
        save_adapter(client.load_model(), adapters / "one", seed=7)
        os.utime(adapters / "one" / "adapter_model.safetensors", (1, 1))  # the file system's clock may not have ticked
        changed = ask(engine, adapter="one")
    assert changed.num_reused_tokens == 0
    assert changed.token_ids != before


# ---- what is not kept ------------------------------------------------------------------------------------------------


def fails(*_: Any) -> Any:
    raise RuntimeError


def test_a_request_that_fails_keeps_nothing(engine: Engine) -> None:
    with pytest.raises(VeilbaseError):
        ask(engine, logits_processor=[fails])
    with pytest.raises(VeilbaseError):
        ask(engine, on_text=fails)
    assert engine.status().kept_bytes == 0
    assert num_reused(engine) == 0


def test_a_request_that_is_cancelled_keeps_nothing(engine: Engine) -> None:
    gate = Gate()
    answer = engine.submit(FIRST, max_new_tokens=40, eos_token_id=[], logits_processor=[gate])
    assert gate.reached.wait(TIMEOUT_S)
    answer.cancel()
    gate.open.set()
    answer.result(TIMEOUT_S)
    assert answer.finish_reason == "cancelled"
    assert num_reused(engine) == 0


def test_a_request_that_was_lost_keeps_nothing(client: TenantClient, monkeypatch: pytest.MonkeyPatch) -> None:
    model, is_wrong = client.load_model(), [True]

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return torch.full_like(output, torch.nan) if is_wrong[0] else None

    model.get_input_embeddings().register_forward_hook(spoil)
    monkeypatch.setattr(client, "load_model", lambda: model)
    with Engine(client, step_tokens=64, prefix_bytes=WHOLE) as engine:
        with pytest.raises(NotFinite):
            ask(engine)
        assert engine.status().kept_bytes == 0
        is_wrong[0] = False
        assert num_reused(engine) == 0
        assert num_reused(engine) > 0


def test_with_fixed_length_nothing_is_kept_or_found(engine: Engine) -> None:
    assert num_reused(engine, fixed_length=True) == 0
    assert engine.status().kept_bytes == 0
    assert num_reused(engine) == 0
    assert num_reused(engine) > 0
    assert num_reused(engine, fixed_length=True) == 0


def test_closing_drops_everything(client: TenantClient) -> None:
    engine = Engine(client, step_tokens=64, prefix_bytes=WHOLE)
    ask(engine)
    assert engine.status().kept_bytes > 0
    engine.close()
    assert engine.status().kept_bytes == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefix_bytes": 1000}, "16 tokens take 5120: nothing could be kept"),
        ({"prefix_bytes": -1}, "prefix_bytes must be a positive whole number"),
        ({"prefix_bytes": True}, "prefix_bytes must be a positive whole number"),
    ],
)
def test_settings_that_cannot_be(client: TenantClient, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Engine(client, **options)


def test_explain_says_who_sees_a_hit(client: TenantClient, engine: Engine) -> None:
    text = engine.explain()
    assert "kept prompts" in text
    assert "to the provider, a request whose prompt begins like an earlier one" in text
    assert "shows as a shorter prompt, in steps of 16 tokens" in text
    assert "fixed_length=True neither uses nor leaves" in text
    with Engine(client) as plain:
        assert "kept prompts" not in plain.explain()


def test_padded_prompts_are_refused(folders: dict[str, Path]) -> None:
    with (
        open_client(folders["llama"], pad_rows=64) as client,
        pytest.raises(ConfigurationError, match="prefix_bytes and pad_rows exclude each other"),
    ):
        Engine(client, prefix_bytes=WHOLE)


# ---- the budget ------------------------------------------------------------------------------------------------------

LAYOUT = KvLayout((None, None), num_kv_heads=2, head_dim=8, dtype=torch.float32, step_tokens=BLOCK_TOKENS)
BLOCK_BYTES = LAYOUT.bytes_for(BLOCK_TOKENS) + 1024
Keep = Callable[[str, list[int]], None]


def filled(layout: KvLayout, num_tokens: int) -> RequestKv:
    kv = RequestKv(layout, num_tokens, CPU)
    for layer in range(len(layout.windows)):
        for start in range(0, num_tokens, layout.step_tokens):
            numbers = torch.randn(2, min(layout.step_tokens, num_tokens - start), 8)
            kv.update(layer, start, numbers, -numbers)
    return kv


def prompt_of(*blocks: int) -> list[int]:
    """Returns a prompt of several blocks. Blocks with equal numbers have equal tokens, and others have no token in
    common."""
    return [block * 100 + token for block in blocks for token in range(BLOCK_TOKENS)]


def keeping(cache: PrefixCache) -> Keep:
    return lambda caller, prompt: cache.of(caller).keep("", prompt, filled(LAYOUT, len(prompt)))


def found(cache: PrefixCache, caller: str, prompt: list[int]) -> int:
    hit = cache.of(caller).find("", [*prompt, 0])
    return 0 if hit is None else hit.num_tokens // BLOCK_TOKENS


def test_what_was_used_longest_ago_is_dropped_first() -> None:
    cache = PrefixCache(LAYOUT, 4 * BLOCK_BYTES)
    keep = keeping(cache)
    keep("a", prompt_of(1, 2))
    keep("a", prompt_of(1, 3))
    assert cache.num_bytes == 3 * BLOCK_BYTES, "the first block is shared"
    keep("a", prompt_of(4, 5))
    assert cache.num_bytes == 4 * BLOCK_BYTES
    got = [found(cache, "a", prompt) for prompt in (prompt_of(1, 2), prompt_of(1, 3), prompt_of(4, 5))]
    assert got == [1, 2, 2]


def test_a_prompt_larger_than_the_budget_keeps_its_beginning() -> None:
    cache = PrefixCache(LAYOUT, 3 * BLOCK_BYTES + 5)
    keep = keeping(cache)
    keep("a", prompt_of(9))
    keep("a", prompt_of(1, 2, 3, 4, 5))
    assert cache.num_bytes == 3 * BLOCK_BYTES
    assert found(cache, "a", prompt_of(1, 2, 3, 4, 5)) == 3
    assert found(cache, "a", prompt_of(9)) == 0


def test_a_caller_with_many_prompts_does_not_drop_those_of_others() -> None:
    cache = PrefixCache(LAYOUT, 6 * BLOCK_BYTES)
    keep = keeping(cache)
    keep("quiet", prompt_of(1, 2))
    for number in range(3, 40):
        keep("busy", prompt_of(number))
        assert cache.num_bytes <= 6 * BLOCK_BYTES
    assert found(cache, "quiet", prompt_of(1, 2)) == 2
    for caller in map(str, range(20)):
        keep(caller, prompt_of(1, 2))
    assert found(cache, "busy", prompt_of(39)) == 0, "a budget that all want is shared"
    assert cache.num_bytes <= 6 * BLOCK_BYTES


def test_without_memory_for_a_copy_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, stack, calls = PrefixCache(LAYOUT, 9 * BLOCK_BYTES), torch.stack, []

    def second_fails(*args: Any) -> torch.Tensor:
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError
        return stack(*args)

    monkeypatch.setattr(torch, "stack", second_fails)
    keeping(cache)("a", prompt_of(1, 2, 3))
    assert cache.num_bytes == BLOCK_BYTES
    assert found(cache, "a", prompt_of(1, 2, 3)) == 1


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("window", [None, 5, 16, 20, 40])
def test_every_cut_that_is_given_is_complete(window: int | None, dtype: str) -> None:
    """The cache may return the beginning of a prompt. For prompts of many lengths, this beginning has exactly the keys
    and values that the first request had, and none that a later token attends to is missing."""
    layout = KvLayout((window, None), 2, 8, KV_DTYPES[dtype], step_tokens=BLOCK_TOKENS)
    num_hits = 0
    for num_tokens in range(BLOCK_TOKENS, 4 * BLOCK_TOKENS):
        cache = PrefixCache(layout, WHOLE).of("a")
        prompt, kv = list(range(num_tokens)), filled(layout, num_tokens)
        cache.keep("", prompt, kv)
        hit = cache.find("", [*prompt, 0])
        if hit is None:
            continue
        num_hits += 1
        copy, new = RequestKv(layout, num_tokens + 30, CPU), torch.randn(2, 1, 8)
        hit.copy_to(copy)
        for layer in range(2):
            first = max(hit.num_tokens - window + 1, 0) if window is not None and layer == 0 else 0
            for mine, theirs in zip(
                copy.kept(layer, first, hit.num_tokens) or (), kv.kept(layer, first, hit.num_tokens) or (), strict=True
            ):
                assert torch.equal(mine.float(), theirs.float())
            seen, _ = copy.update(layer, hit.num_tokens, new, new)
            assert seen.shape[1] == hit.num_tokens - first + 1
    assert num_hits == 3 * BLOCK_TOKENS if window is None else num_hits > 0
