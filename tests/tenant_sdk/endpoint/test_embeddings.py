"""Tests embeddings with OpenAI's own client: each is the mean of a text's last hidden states, scaled to length 1,
whatever other requests share its steps, and whether the client asks for numbers or for base64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from peft import PeftModel

from tenant_sdk import TenantClient
from tenant_sdk.endpoint.server import Endpoint
from tests.support.endpoints import endpoint_of, official, raw

TEXTS = ["who?", "b", "x" * 40]


@pytest.fixture(scope="module")
def ai(endpoint: Endpoint) -> openai.OpenAI:
    return official(endpoint)


def wanted(model: Any, client: TenantClient, text: str) -> torch.Tensor:
    """Returns the embedding of a text from a transformers model alone."""
    ids = torch.tensor([client.tokenizer(text)["input_ids"]])
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[-1][0]
    return torch.nn.functional.normalize(hidden.mean(dim=0), dim=0)


def test_embeddings_are_means_of_hidden_states(ai: openai.OpenAI, client: TenantClient) -> None:
    made = ai.embeddings.create(model="llama", input=TEXTS)  # the client asks for base64 and gives numbers
    want = torch.stack([wanted(client.load_model(), client, text) for text in TEXTS])
    got = torch.tensor([each.embedding for each in made.data])
    assert torch.allclose(got, want, atol=1e-5)
    assert [each.index for each in made.data] == [0, 1, 2]
    assert made.usage.prompt_tokens == sum(len(client.tokenizer(text)["input_ids"]) for text in TEXTS)
    plain = ai.embeddings.create(model="llama", input=TEXTS, encoding_format="float")
    assert np.allclose(got, [each.embedding for each in plain.data], atol=1e-6)


def test_an_adapter_changes_them(ai: openai.OpenAI, client: TenantClient, adapters: Path) -> None:
    made = ai.embeddings.create(model="sales", input="who?").data[0].embedding
    want = wanted(PeftModel.from_pretrained(client.load_model(), adapters / "sales"), client, "who?")
    assert torch.allclose(torch.tensor(made), want, atol=5e-3)  # the store keeps adapters in bfloat16
    assert not torch.allclose(torch.tensor(made), wanted(client.load_model(), client, "who?"), atol=5e-3)


def test_token_ids_and_many_texts(ai: openai.OpenAI, client: TenantClient) -> None:
    ids = client.tokenizer("who?")["input_ids"]
    (one,) = ai.embeddings.create(model="llama", input="who?").data
    for given in (ids, [ids]):
        assert np.allclose(ai.embeddings.create(model="llama", input=given).data[0].embedding, one.embedding, atol=1e-5)
    many = ai.embeddings.create(model="llama", input=["who?", "b"] * 20).data
    assert len(many) == 40
    assert np.allclose(many[38].embedding, one.embedding, atol=1e-5)
    assert not np.allclose(many[39].embedding, one.embedding, atol=1e-3)


def test_a_long_text_is_read_in_pieces_and_padding_does_not_count(folder: Path) -> None:
    given = TenantClient(f"inproc:{folder}", mask="off", pad_rows=True, cache=folder.with_name("cache"), progress=False)
    with given as client, endpoint_of(client, max_running=2, step_tokens=5) as endpoint:
        made = official(endpoint).embeddings.create(model="llama", input=["x" * 33, "b"])
        for text, each in zip(["x" * 33, "b"], made.data, strict=True):
            assert torch.allclose(torch.tensor(each.embedding), wanted(client.load_model(), client, text), atol=1e-4)


def test_a_kept_prompt_changes_nothing(client: TenantClient) -> None:
    with endpoint_of(client, prefix_bytes=1 << 24) as endpoint:
        ai = official(endpoint)
        ai.completions.create(model="llama", prompt="x" * 40, max_tokens=2)
        made = ai.embeddings.create(model="llama", input="x" * 40).data[0].embedding
        assert torch.allclose(torch.tensor(made), wanted(client.load_model(), client, "x" * 40), atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [{"input": []}, {"input": [""]}, {"input": ""}, {"input": None}, {"input": [-1]}, {"input": ["a", 1]},
     {"input": ["a"] * 257}, {"input": "x" * 5000}, {"dimensions": 4}, {"encoding_format": "hex"}, {"n": 1}],
)  # fmt: skip
def test_what_cannot_be_embedded(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    with raw(endpoint) as http:
        answer = http.post("/v1/embeddings", json={"model": "llama", "input": "a", **fields})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert http.post("/v1/embeddings", json={"model": "nobody", "input": "a"}).status_code == 404
