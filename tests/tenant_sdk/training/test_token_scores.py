"""Tests the scores of next tokens: they and their gradients are those of the model's own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tenant_sdk import TenantClient
from tenant_sdk.training import loss
from tenant_sdk.training.loss import Scores, score_tokens
from tests.support.parity import adapted, lora, relative
from tests.support.spies import before_requests
from tests.support.tiny_models import VOCAB, make_tiny

IGNORED = -100


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma"])
def client_of_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Provides (kind, client) of a model whose head is the provider's (llama), tied, or tied with capped logits."""
    folder = tmp_path_factory.mktemp(request.param)
    make_tiny(request.param, folder)
    options = {"weights": "native", "mask": "off", "arithmetic": "float", "cache": folder / "cache"}
    with TenantClient(f"inproc:{folder}", **options) as client:
        yield request.param, client


def batch() -> dict[str, torch.Tensor]:
    """Returns two rows of 12 tokens, of which the second is padded, with labels at some positions."""
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[:, :4] = labels[1, 9:] = labels[0, 6] = IGNORED
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def expected(model: Any, inputs: dict[str, torch.Tensor]) -> Scores:
    """Returns the scores by the model's own logits, all at once."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1].float()
    labels = inputs["labels"][:, 1:]
    mask, log_probs = labels != IGNORED, logits.log_softmax(dim=-1)
    found = log_probs.gather(2, labels.clamp(min=0)[..., None]).squeeze(2)
    values = (found, -(log_probs.exp() * log_probs).sum(-1), logits.mean(-1), logits.argmax(-1) == labels)
    return Scores(*(torch.where(mask, value, torch.zeros_like(value)) for value in values), mask)


@pytest.mark.parametrize("every_position", [False, True])
def test_scores_and_gradients(client_of_kind: Any, every_position: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of three rows leave an uneven rest. Each row's score has its own factor in the loss."""
    kind, client = client_of_kind
    for name in ("LOCAL_CHUNK_BYTES", "REMOTE_CHUNK_BYTES"):
        monkeypatch.setattr(loss, name, 4 * VOCAB * 3)
    factors = torch.linspace(-1, 2, 22).view(2, 11)
    found = []
    for is_chunked in (False, True):
        model = adapted(client.load_model(), lora(kind)).train()
        if is_chunked:
            score_tokens(model, every_position=every_position)
        scores = model(**batch(), fused_lm_head=True, use_cache=False) if is_chunked else expected(model, batch())
        (scores.log_probs * factors).sum().backward()
        found.append((scores, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (want, gradients), (got, ours) = found
    for name in ("log_probs", "entropy", "mean_logits"):
        assert torch.allclose(getattr(got, name), getattr(want, name), rtol=1e-4, atol=1e-5), name
    assert torch.equal(got.is_top1, want.is_top1)
    assert torch.equal(got.label_mask, want.label_mask)
    assert ours.keys() == gradients.keys()
    assert all(relative(ours[name], gradient) < 1e-4 for name, gradient in gradients.items())


def test_a_pass_without_gradients(client_of_kind: Any) -> None:
    kind, client = client_of_kind
    model = adapted(client.load_model(), lora(kind)).eval()
    with torch.no_grad():
        want = expected(model, batch())
        score_tokens(model)
        got = model(**batch(), fused_lm_head=True)
        assert torch.allclose(got.log_probs, want.log_probs, rtol=1e-4, atol=1e-5)
        assert model(batch()["input_ids"]).logits.shape == (2, 12, VOCAB), "another pass has changed"


def test_logits_that_cannot_be_computed_in_chunks(client_of_kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, client = client_of_kind
    model = adapted(client.load_model(), lora(kind)).eval()
    with torch.no_grad():
        want = expected(model, batch())
        monkeypatch.setattr(loss, "probe", lambda base: None)
        score_tokens(model)
        assert torch.allclose(model(**batch(), fused_lm_head=True).log_probs, want.log_probs, rtol=1e-4, atol=1e-5)


def test_the_rows_of_a_head_at_the_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head gets the rows of all positions that predict a label of at least one sequence, but no padding. With
    `every_position`, it gets all rows, whatever the labels are."""
    make_tiny("llama", tmp_path)
    with TenantClient(f"inproc:{tmp_path}", weights="native", mask="off", arithmetic="float") as client:
        head = next(group.id for group in client.connect().groups if "lm_head" in group.name)
        rows: list[int] = []
        before_requests(
            monkeypatch, lambda call, payload: rows.append(payload.num_rows) if call.group == head else None
        )
        for every_position, num_rows in ((False, 2 * 8 - 2), (True, 2 * 12)):
            model = client.load_model()
            score_tokens(model, every_position=every_position)
            rows.clear()
            with torch.no_grad():
                model(**batch(), fused_lm_head=True)
            assert rows == [num_rows]
