"""Tests what the provider sees of speculation: every pass of an answer has the same number of rows, whatever the text
and the drafted tokens are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tenant_sdk import Speculation, TenantClient
from tenant_sdk.serving.engine import Engine
from tenant_sdk.serving.requests import Request
from tenant_sdk.testing import Corrupt, ScriptedProvider
from tests.support.engines import TIMEOUT_S
from tests.support.lattice import PLAIN, TOY_MASK
from wire.errors import NotFinite

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")
GROUPS = 9
"""The number of calls of a step: four for each of two layers and one for the head."""
NUM_DRAFTED = 4
NEW_TOKENS = 23
TEXTS = ("abcabcabcabcabcabcab", "copper owl? Nobody..")
"""Two prompts of the same length. The first repeats itself, so that drafts from its own text are often right; the
second does not."""
MASKS: dict[str, dict[str, Any]] = {
    "off": PLAIN,
    "lattice": {"mask": "lattice", "mask_options": TOY_MASK, "verify": False},
}


@pytest.fixture
def provider(folder: Path) -> Iterator[ScriptedProvider]:
    with ScriptedProvider(model=folder) as made:
        yield made


def seen_by(provider: ScriptedProvider) -> list[tuple[int, int]]:
    """Returns the numbers of rows and columns of each product so far."""
    return [(call.num_rows, call.cols) for call in provider.calls if call.purpose == "product"]


def steps_of(
    client: TenantClient, provider: ScriptedProvider, prompt: str, draft: Any = None, **options: Any
) -> list[Any]:
    """Returns what the provider sees of one answer: for each step, the numbers of rows and columns of each call."""
    provider.forget_calls()
    speculation = Speculation(NUM_DRAFTED, draft=draft)
    with Engine(client, step_tokens=32, max_running=2, speculation=speculation) as engine:
        engine.submit(prompt, **{"max_new_tokens": NEW_TOKENS, "eos_token_id": [], **options}).result(TIMEOUT_S)
    seen = seen_by(provider)
    assert len(seen) % GROUPS == 0
    return [seen[at : at + GROUPS] for at in range(0, len(seen), GROUPS)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_the_rows_of_a_pass_are_the_same_for_different_texts(
    provider: ScriptedProvider, folder: Path, draft: str, mask: str
) -> None:
    """The texts differ in how many drafted tokens are accepted, and so in the number of passes, but in nothing else."""
    local = None if draft == "lookup" else AutoModelForCausalLM.from_pretrained(folder).eval()
    with provider.client(**MASKS[mask]) as client:
        seen = [steps_of(client, provider, text, local) for text in TEXTS]
        seen += [steps_of(client, provider, text, local, do_sample=True, seed=1, top_k=0) for text in TEXTS]
    num_passes = [len(steps) for steps in seen]
    assert draft == "itself" or len(set(num_passes)) > 1, "drafts were accepted in one text more than in another"
    for one, other in itertools.pairwise(seen):
        assert one[: len(other)] == other[: len(one)]
    for prompt, *steps in seen:
        assert [num_rows for num_rows, _ in prompt] == [len(TEXTS[0]) + 3] * (GROUPS - 1) + [1]
        for step in steps:
            assert [num_rows for num_rows, _ in step] == [1 + NUM_DRAFTED] * GROUPS


def test_drafts_are_dummies_tokens_and_both(provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the control of the test above: the texts have passes with no, with two and with all tokens drafted."""
    drafted: set[int] = set()
    rows = Request.rows

    def noted(self: Request, segment: Any) -> Any:
        if segment.num_drafted:
            drafted.add(len(self.drafted))
        return rows(self, segment)

    monkeypatch.setattr(Request, "rows", noted)
    with provider.client(**PLAIN) as client:
        for text in TEXTS:
            steps_of(client, provider, text)
            steps_of(client, provider, text, max_new_tokens=4)
    assert drafted >= {0, 2, NUM_DRAFTED}


def test_dummies_and_rejected_tokens_leave_no_trace(
    provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text stays the same, whether the rows for drafted tokens hold padding (dummies), right or wrong tokens."""
    with provider.client(**MASKS["lattice"]) as client:
        texts = set()
        for drafts in ([], [5], [5, 6, 7, 8], [9, 9, 9, 9]):

            class Fixed:
                layout = None

                def draft(self, segments: Any, requests: Any, drafts: list[int] = drafts) -> None:
                    for segment, request in zip(segments, requests, strict=True):
                        request.drafted = drafts[: min(segment.num_drafted, max(request.num_draftable, 0))]

            monkeypatch.setattr("tenant_sdk.serving.engine.make_drafter", lambda *_: Fixed())
            with Engine(client, speculation=Speculation(NUM_DRAFTED)) as engine:
                answer = engine.submit("who?", max_new_tokens=NEW_TOKENS, eos_token_id=[])
                texts.add(answer.result(TIMEOUT_S))
    assert len(texts) == 1


def test_padded_prompts_show_no_length(provider: ScriptedProvider) -> None:
    with provider.client(**PLAIN, pad_rows=24) as client:
        seen = [steps_of(client, provider, text) for text in ("a", "where is it now?")]
    shorter = min(map(len, seen))
    assert seen[0][:shorter] == seen[1][:shorter]
    assert seen[0][0][0][0] == 24


@pytest.mark.parametrize("row", [0, NUM_DRAFTED])
def test_a_value_that_is_not_finite_ends_its_own_request_after_the_step(provider: ScriptedProvider, row: int) -> None:
    """The provider sees the same if the value is in a row of padding (a dummy) as if it is in a token's row, so a wrong
    reply does not show which rows are padding."""

    def spoil(reply: torch.Tensor) -> torch.Tensor:
        reply[row, 0] = math.nan
        return reply

    with provider.client(**PLAIN) as client:
        want = client.generate("why so?", max_new_tokens=NEW_TOKENS)
        provider.forget_calls()
        provider.handler = lambda call: Corrupt(spoil) if call.number == 4 * GROUPS + 2 else None
        with Engine(client, step_tokens=16, max_running=2, speculation=Speculation(NUM_DRAFTED)) as engine:
            with pytest.raises(NotFinite):
                engine.submit("who?", max_new_tokens=NEW_TOKENS, eos_token_id=[]).result(TIMEOUT_S)
            assert len(provider.calls) == 5 * GROUPS
            assert engine.submit("why so?", max_new_tokens=NEW_TOKENS).result(TIMEOUT_S) == want
