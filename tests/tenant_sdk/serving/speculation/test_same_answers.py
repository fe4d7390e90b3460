"""Tests that answers with speculation are the same as those without, for all kinds of models, drafts, settings and ends
of answers, for prompts in pieces, and at the end of the context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tenant_sdk import Speculation, TenantClient
from tenant_sdk.serving.engine import Engine
from tests.support.engines import TIMEOUT_S
from tests.support.saved_adapters import save_adapter
from tests.support.tiny_models import CONFIGS, PROMPTS, make_model, open_client, save_random
from wire.errors import VeilbaseError

NEW_TOKENS = 14
NUM_DRAFTED = 3
ASKED = PROMPTS[:4]
KINDS = ("llama", "gpt2", "gemma2")
"""The kinds of models. Gemma 2 has a sliding window, which is shorter than the prompts."""
DRAFTS = ("lookup", "itself", "random")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("speculation")
    made = {kind: make_model(kind, parent / kind) for kind in KINDS}
    return made | {f"{kind} random": make_model(kind, parent / f"{kind}-random", seed=9) for kind in KINDS}


@pytest.fixture(scope="module")
def client(folders: dict[str, Path]) -> Iterator[TenantClient]:
    with open_client(folders["llama"]) as opened:
        yield opened


def local(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def drafting(folders: dict[str, Path], draft: str, kind: str = "llama", num_drafted: int = NUM_DRAFTED) -> Speculation:
    if draft == "lookup":
        return Speculation(num_drafted)
    return Speculation(num_drafted, draft=local(folders[kind if draft == "itself" else f"{kind} random"]))


def ask(client: TenantClient, speculation: Speculation | None, *requests: dict[str, Any], **options: Any) -> list[str]:
    """Returns the engine's answers to requests that are submitted at the same time."""
    with Engine(client, speculation=speculation, **{"step_tokens": 24, "max_running": 4, **options}) as engine:
        answers = [engine.submit(**{"max_new_tokens": NEW_TOKENS, **each}) for each in requests]
        return [answer.result(TIMEOUT_S) for answer in answers]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_and_drawn_answers_of_every_kind_and_draft(folders: dict[str, Path], kind: str) -> None:
    """The answers to all requests together must be those to each request alone. Each has its own prompt, length and
    random numbers."""
    requests: list[dict[str, Any]] = [{"prompt": prompt, "eos_token_id": []} for prompt in ASKED]
    requests += [{**each, "do_sample": True, "temperature": 0.8, "seed": 3} for each in requests[:2]]
    with open_client(folders[kind]) as opened:
        want = [opened.generate(max_new_tokens=NEW_TOKENS, **each) for each in requests[:4]]
        for each in requests[4:]:
            torch.manual_seed(each["seed"])
            options = {name: value for name, value in each.items() if name != "seed"}
            want.append(opened.generate(max_new_tokens=NEW_TOKENS, **options))
        for draft in DRAFTS:
            assert ask(opened, drafting(folders, draft, kind), *requests) == want, draft


@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_under_the_lattice_mask(folders: dict[str, Path], draft: str) -> None:
    with open_client(folders["llama"], "lattice") as opened:
        want = [opened.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in ASKED]
        assert ask(opened, drafting(folders, draft), *({"prompt": prompt} for prompt in ASKED)) == want


def test_settings_ends_and_hooks_of_a_request(client: TenantClient, folders: dict[str, Path]) -> None:
    plain = client.generate("who?", max_new_tokens=NEW_TOKENS, eos_token_id=[])
    stop_id = client.tokenizer.convert_tokens_to_ids(plain[5])

    def bans_every_third(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, token_ids.shape[1] % 3 :: 3] = -torch.inf
        return scores

    base = {"prompt": "who?", "eos_token_id": []}
    requests: list[dict[str, Any]] = [
        {**base, "repetition_penalty": 1.5}, {**base, "stop": [plain[6:8], "never"]}, {**base, "eos_token_id": stop_id},
        {**base, "logits_processor": [bans_every_third]}, {**base, "max_new_tokens": 1}, {**base, "max_new_tokens": 2},
        {**base, "do_sample": True, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2,
         "logits_processor": [bans_every_third]},
    ]  # fmt: skip
    want = ask(client, None, *requests)
    assert len(set(want)) == len(want)
    for draft in DRAFTS:
        assert ask(client, drafting(folders, draft), *requests) == want, draft


def test_a_hook_is_called_once_for_each_token_in_order(client: TenantClient, folders: dict[str, Path]) -> None:
    seen: list[list[int]] = []

    def hook(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(token_ids[0].tolist())
        return scores

    for draft in DRAFTS:
        seen.clear()
        with Engine(client, speculation=drafting(folders, draft)) as engine:
            answer = engine.submit("who?", max_new_tokens=NEW_TOKENS, eos_token_id=[], logits_processor=[hook])
            answer.result(TIMEOUT_S)
        prompt = answer.num_prompt_tokens
        assert [each[prompt:] for each in seen] == [answer.token_ids[:number] for number in range(NEW_TOKENS)]


def test_a_hook_that_raises_among_accepted_tokens_ends_its_own_request(
    client: TenantClient, folders: dict[str, Path]
) -> None:
    def raises(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if token_ids.shape[1] > answer.num_prompt_tokens + 4:
            raise RuntimeError("secret text")
        return scores

    with Engine(client, speculation=drafting(folders, "itself", num_drafted=7)) as engine:
        other = engine.submit("why so?", max_new_tokens=NEW_TOKENS)
        answer = engine.submit("who?", max_new_tokens=NEW_TOKENS, eos_token_id=[], logits_processor=[raises])
        with pytest.raises(VeilbaseError, match=r"failed \(RuntimeError\)"):
            answer.result(TIMEOUT_S)
        assert len(answer.token_ids) == 5
        assert other.result(TIMEOUT_S) == client.generate("why so?", max_new_tokens=NEW_TOKENS)


def test_settings_that_cannot_draw_from_the_drafts_logits_only_draft_nothing(
    client: TenantClient, folders: dict[str, Path]
) -> None:
    """Divided by this temperature, logits are infinite unless a hook makes them all 0. Drafts call no hook."""

    def nothing(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(scores)

    cold: dict[str, Any] = {"do_sample": True, "seed": 3, "temperature": 1e-39, "logits_processor": [nothing]}
    requests = ({"prompt": "who?", **cold}, {"prompt": "why so?"})
    want = ask(client, None, *requests)
    assert ask(client, drafting(folders, "itself"), *requests) == want


@pytest.mark.parametrize(("kind", "draft"), [("gpt2", "lookup"), ("gpt2", "random"), ("gemma2", "itself")])
def test_an_answer_up_to_the_end_of_the_context(folders: dict[str, Path], kind: str, draft: str) -> None:
    """The model has no positions after its context, so no row may be computed for a token that is drafted there."""
    prompt = "count: one two three four five six seven eight nine ten eleven twelve, and so on and so on"
    with open_client(folders[kind]) as opened:
        with Engine(opened) as engine:
            room = opened.context_length - engine.submit(prompt, max_new_tokens=1).num_prompt_tokens
        request = {"prompt": prompt, "max_new_tokens": room, "eos_token_id": []}
        assert ask(opened, drafting(folders, draft, kind, 7), request, step_tokens=32) == ask(opened, None, request)


def test_padded_prompts_and_adapters(folders: dict[str, Path], tmp_path: Path) -> None:
    from tenant_sdk.serving.adapters import AdapterStore

    with open_client(folders["llama"], pad_rows=24) as opened:
        model = opened.load_model()
        names = [save_adapter(model, tmp_path / "adapters" / name, seed).name for seed, name in enumerate("ab")]
        requests = [{"prompt": prompt, "adapter": name} for prompt in ("who?", "why so?") for name in (None, *names)]
        options: dict[str, Any] = {
            "make_slots": lambda model, wake: AdapterStore(
                model, tmp_path / "adapters", on_ready=wake, dtype=torch.float32
            )
        }
        want = ask(opened, None, *requests, **options)
        assert len(set(want)) == len(want)
        for draft in DRAFTS[:2]:
            assert ask(opened, drafting(folders, draft), *requests, **options) == want, draft


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_other_types_of_kv(client: TenantClient, folders: dict[str, Path], kv_dtype: str) -> None:
    requests = [{"prompt": prompt} for prompt in ASKED]
    want = ask(client, None, *requests, kv_dtype=kv_dtype)
    assert ask(client, drafting(folders, "itself"), *requests, kv_dtype=kv_dtype) == want


def test_many_at_once_through_generate_many(client: TenantClient, folders: dict[str, Path]) -> None:
    want = [client.generate(prompt, max_new_tokens=6) for prompt in PROMPTS]
    speculation = drafting(folders, "itself")
    assert client.generate_many(PROMPTS, max_new_tokens=6, progress=False, speculation=speculation) == want


def test_a_draft_of_another_kind_size_and_number_of_logits(
    client: TenantClient, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Both models use one tokenizer, but the draft model has fewer or more embeddings than the remote model."""
    want = ask(client, None, *({"prompt": prompt, "do_sample": True, "seed": 1, "top_k": 0} for prompt in ASKED))
    for vocab_size in (110, 160):
        config = CONFIGS["gpt2"].__class__(**{**CONFIGS["gpt2"].to_dict(), "vocab_size": vocab_size})
        save_random(config, tmp_path / str(vocab_size))
        speculation = Speculation(3, draft=local(tmp_path / str(vocab_size)), draft_tokenizer=client.tokenizer)
        got = ask(
            client, speculation, *({"prompt": prompt, "do_sample": True, "seed": 1, "top_k": 0} for prompt in ASKED)
        )
        assert got == want
