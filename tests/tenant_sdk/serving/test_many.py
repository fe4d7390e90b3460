"""Tests what `generate_many` sends, answers and says when a prompt is refused or fails."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tenant_sdk import PromptsFailed, TenantClient
from tenant_sdk.serving.adapters.reader import CONFIG, WEIGHTS
from tenant_sdk.testing import Fail, ScriptedProvider
from tests.support.lattice import PLAIN
from tests.support.saved_adapters import save_adapter
from wire.errors import ConfigurationError, Unavailable

PROMPTS = ("who?", "why so?", "where is it?", "b")
LONG = 43
"""The number of tokens of a prompt of 40 characters, with its role tokens."""
OPTIONS: dict[str, Any] = {"max_new_tokens": 5, "progress": False, "eos_token_id": []}


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[tuple[TenantClient, ScriptedProvider]]:
    with ScriptedProvider(model=folder) as provider, provider.client(**PLAIN) as client:
        yield client, provider


@pytest.fixture(scope="module")
def root(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides a folder with the adapters "good" and "nan", of which the second holds NaN."""
    root, model = tmp_path_factory.mktemp("adapters"), AutoModelForCausalLM.from_pretrained(folder)
    for seed, name in enumerate(("good", "nan")):
        save_adapter(model, root / name, seed, target_modules=["q_proj"])
    tensors = load_file(root / "nan" / WEIGHTS)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, root / "nan" / WEIGHTS)
    return root


@pytest.fixture(autouse=True)
def _forgets(opened: tuple[TenantClient, ScriptedProvider]) -> Iterator[None]:
    _, provider = opened
    provider.forget_calls()
    yield
    provider.handler = None


@pytest.mark.parametrize("index", [0, 2, 3])
def test_a_prompt_that_is_refused_is_named_and_nothing_is_sent(
    opened: tuple[TenantClient, ScriptedProvider], index: int
) -> None:
    client, provider = opened
    prompts = [*PROMPTS]
    prompts[index] = "xyzzy" * 40
    with pytest.raises(ConfigurationError) as refused:
        client.generate_many(prompts, **OPTIONS)
    said = "the prompt has 203 tokens; prompt and answer together may have 128: shorten the prompt by at least 76"
    assert str(refused.value) == f"prompts[{index}]: {said}"
    assert provider.calls == []


class Interrupted:
    """Acts as a list of messages during whose reading the user presses Ctrl-C."""

    def __iter__(self) -> Iterator[Any]:
        raise KeyboardInterrupt


def test_a_call_that_is_interrupted_before_all_are_accepted_ends_and_sends_nothing(
    opened: tuple[TenantClient, ScriptedProvider],
) -> None:
    client, provider = opened
    with pytest.raises(KeyboardInterrupt):
        client.generate_many([*PROMPTS, Interrupted()], **OPTIONS)
    assert provider.calls == []


def test_an_adapter_that_is_refused_is_named_and_nothing_is_sent(
    opened: tuple[TenantClient, ScriptedProvider], root: Path
) -> None:
    client, provider = opened
    (root / "empty").mkdir(exist_ok=True)
    adapters = [None, root / "good", root / "empty", None]
    with pytest.raises(ConfigurationError, match=r"^prompts\[2\]: the adapter empty has no adapter_config.json"):
        client.generate_many(PROMPTS, adapters, **OPTIONS)
    assert provider.calls == []


def test_options_of_the_store_of_adapters(
    opened: tuple[TenantClient, ScriptedProvider], root: Path, tmp_path: Path
) -> None:
    client, provider = opened
    shutil.copytree(root / "good", tmp_path / "renamed")
    settings = json.loads((tmp_path / "renamed" / CONFIG).read_text())
    (tmp_path / "renamed" / CONFIG).write_text(json.dumps({**settings, "base_model_name_or_path": "acme/elsewhere"}))
    with pytest.raises(ConfigurationError, match=r"^prompts\[0\]: .*acme/elsewhere"):
        client.generate_many(["who?"], tmp_path / "renamed", **OPTIONS)
    assert provider.calls == []
    (named,) = client.generate_many(["who?"], tmp_path / "renamed", bases=["acme/elsewhere"], **OPTIONS)
    assert [named] == client.generate_many(["who?"], root / "good", **OPTIONS)
    with pytest.raises(ConfigurationError, match="separate_calls is True or False"):
        client.generate_many(["who?"], separate_calls=1, **OPTIONS)


def test_a_prompt_that_fails_later_leaves_the_others_their_answers(
    opened: tuple[TenantClient, ScriptedProvider], root: Path
) -> None:
    client, provider = opened
    adapters = [None, root / "nan", root / "good", None]
    want = client.generate_many([PROMPTS[0], *PROMPTS[2:]], [None, root / "good", None], **OPTIONS)
    sent = sum(call.num_rows for call in provider.calls)
    provider.forget_calls()
    with pytest.raises(PromptsFailed) as failed:
        client.generate_many(PROMPTS, adapters, **OPTIONS)
    assert failed.value.answers == [want[0], None, *want[1:]]
    assert list(failed.value.failures) == [1]
    assert type(failed.value.failures[1]) is ConfigurationError
    text = str(failed.value)
    assert text == f"prompts[1]: {failed.value.failures[1]}"
    assert "the adapter nan holds NaN" in text
    assert "\n" not in text
    assert not any(answer in repr(failed.value) for answer in want)
    assert sum(call.num_rows for call in provider.calls) == sent
    for copied in (copy.copy(failed.value), pickle.loads(pickle.dumps(failed.value))):
        assert (copied.answers, list(copied.failures), str(copied)) == (failed.value.answers, [1], text)


def test_code_of_the_users_that_fails_names_the_first_and_counts(opened: tuple[TenantClient, ScriptedProvider]) -> None:
    client, _ = opened

    def fails_for_two(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if token_ids.shape[1] in (LONG, LONG + 1):
            raise RuntimeError("secret text")
        return scores

    with pytest.raises(PromptsFailed) as failed:
        client.generate_many(["a" * 40, "who?", "b" * 41], logits_processor=[fails_for_two], **OPTIONS)
    assert set(failed.value.failures) == {0, 2}
    assert failed.value.answers[0] is failed.value.answers[2] is None
    assert failed.value.answers[1] == client.generate("who?", max_new_tokens=5, eos_token_id=[])
    said = "on_text or a logits_processor of this request failed (RuntimeError)"
    assert str(failed.value) == f"prompts[0]: {said} (2 of 3 prompts failed)"


def test_a_provider_that_goes_away_ends_the_call_with_its_own_error(
    opened: tuple[TenantClient, ScriptedProvider],
) -> None:
    client, provider = opened
    gone = Fail(Unavailable("the provider went away", 3.0))
    provider.handler = lambda call: gone if call.number >= 20 else None
    with pytest.raises(Unavailable, match=r"^the provider went away$") as failed:
        client.generate_many([*PROMPTS, *PROMPTS], max_running=1, **OPTIONS)
    assert failed.value.retry_s == 3.0
