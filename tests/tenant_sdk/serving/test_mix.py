"""Tests a random mix of requests that join, end, are cancelled and lose their provider: every answer is correct or an
error."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tenant_sdk import TenantClient, embedded
from tenant_sdk.serving.engine import Engine
from tenant_sdk.serving.loop import EngineStatus
from tenant_sdk.serving.requests import Answer
from tests.support.engines import TIMEOUT_S, alone
from tests.support.lattice import TOY_OPTIONS
from tests.support.mask_site import Watched
from tests.support.providers import make_served_model
from tests.support.tiny_models import PROMPTS, make_model
from wire.errors import Unavailable
from wire.frame import Call
from wire.transport.inproc import InprocConnection

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")
NUM_REQUESTS = 80
GONE_AT = 301
"""The provider is lost at every multiple of this number of calls, which is in the middle of a step of nine calls."""
CLEAR = 1e-2
"""A margin between the top two logits that the mask's error cannot bridge, since that error is below 1e-3
(test_equal_alone.py)."""


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    made = Watched(make_served_model(make_model("llama", tmp_path / "llama"), "int8"))
    monkeypatch.setattr(embedded, "connect_inproc", lambda *_: InprocConnection(made))
    return made


@pytest.fixture
def client(provider: Watched, tmp_path: Path) -> Iterator[TenantClient]:
    options = {**TOY_OPTIONS, "hints": "stream", "background": False}
    with TenantClient("inproc:x", mask_options=options, cache=tmp_path / "cache", progress=False) as opened:
        yield opened


def clear_answers(client: TenantClient) -> dict[str, list[int]]:
    """Returns, for each prompt, the tokens of its answer before the first token whose choice is not clear."""
    answers = {}
    for prompt in PROMPTS:
        top = alone(client, prompt, 12).topk(2)
        unclear = (top.values[:, 0] - top.values[:, 1] < CLEAR).tolist()
        length = unclear.index(True) if True in unclear else len(unclear)
        answers[prompt] = top.indices[:length, 0].tolist()
    return {prompt: answer for prompt, answer in answers.items() if answer}


def pieces_of(answer: Answer) -> list[str]:
    """Waits for the end of an answer, and returns its pieces of text; returns none if the provider was lost."""
    with contextlib.suppress(Unavailable):
        return list(answer)
    return []


@pytest.mark.parametrize("seed", [1, 2])
def test_every_answer_is_right_or_an_error(client: TenantClient, provider: Watched, seed: int) -> None:
    want, chance = clear_answers(client), random.Random(seed)
    assert len(want) >= 4

    def fail(call: Call) -> None:
        if len(provider.seen) % GONE_AT == 0:
            raise Unavailable("the provider went away")

    provider.seen.clear()
    provider.fail = fail
    num_right = num_failed = num_cancelled = 0
    with Engine(client, step_tokens=16, max_running=6, kv_bytes=60_000, overtaking_s=0.0) as engine:
        answers = []
        for _ in range(NUM_REQUESTS):
            prompt = chance.choice(list(want))
            answers.append((prompt, engine.submit(prompt, max_new_tokens=len(want[prompt]), eos_token_id=[])))
            if chance.random() < 0.2:
                answers[-1][1].cancel()
            if chance.random() < 0.3:
                pieces_of(chance.choice(answers)[1])
        for prompt, answer in answers:
            try:
                answer.result(TIMEOUT_S)
            except Unavailable:
                num_failed += 1
                continue
            if answer.finish_reason == "cancelled":
                assert answer.token_ids == want[prompt][: len(answer.token_ids)]
                num_cancelled += 1
            else:
                assert answer.token_ids == want[prompt]
                num_right += 1
        assert replace(engine.status(), num_preemptions=0) == EngineStatus(0, 0, 0)
    assert num_right > NUM_REQUESTS // 2
    assert num_failed > 0
    assert num_cancelled > 0
    sent = [bytes(row.numpy()) for rows in provider.products() for row in rows.to(torch.int32)]
    assert len(set(sent)) == len(sent), "a row was sent twice under one mask"
