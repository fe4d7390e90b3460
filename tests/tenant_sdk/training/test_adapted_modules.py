"""Tests that settings of an adapter which name nothing in the provider's model are told, and that no others are."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import GPT2Config, MixtralConfig, PreTrainedConfig

from tenant_sdk import TenantClient
from tenant_sdk.kinds.refused import check_trainable
from tenant_sdk.testing import ScriptedProvider, character_tokenizer
from tenant_sdk.training.adapted_modules import TENSORS, check_adapter, check_prefix, module_names
from tenant_sdk.trust.checkpoint import TrustedCheckpoint
from tests.support.tiny_models import GPT2_SIZES, SIZES, save_random
from tests.support.training import QUICK, ROWS, lora
from wire.errors import ConfigurationError
from wire.manifest import Manifest


@pytest.fixture(scope="module")
def provider() -> Iterator[ScriptedProvider]:
    with ScriptedProvider() as made:
        yield made


@pytest.fixture(scope="module")
def client(provider: ScriptedProvider) -> Iterator[TenantClient]:
    """Provides a client of a Llama of two blocks."""
    with provider.client(mask="off") as opened:
        yield opened


def check(client: TenantClient, *, caches_prefix: bool = False, **settings: Any) -> None:
    with warnings.catch_warnings(action="error"):
        client.connect(partial(check_adapter, settings, caches_prefix))


def test_one_unknown_module_to_save_beside_others_is_a_warning(client: TenantClient) -> None:
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "nrom"]}
    with pytest.warns(UserWarning, match="modules_to_save .* 'nrom', .* the nearest is norm; it is not trained"):
        client.connect(partial(check_adapter, settings, False))


def names_of(client: TenantClient) -> frozenset[str] | None:
    found: list[frozenset[str] | None] = []
    client.connect(lambda manifest, beginning: found.append(module_names(manifest, beginning(TENSORS))))
    return found[0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"target_modules": ["q_prj"]},
            "names 'q_prj', but no module of the model is called so: the nearest is q_proj",
        ),
        (
            {"target_modules": "all_linear"},
            "names 'all_linear', but no module of the model is called so: the nearest is all-linear",
        ),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_haed"]},
            "modules_to_save of peft_config names 'lm_haed', but no module of the model is called so: the nearest is "
            "lm_head",
        ),
        ({"target_modules": "all-linear", "modules_to_save": ["nrom"]}, "modules_to_save of peft_config names 'nrom'"),
        ({"target_modules": {"o_prjo", "q_prj"}}, "names 'o_prjo', but no module"),
        ({"target_modules": "q_proj"}, "is the text 'q_proj', a pattern for the whole name of a module"),
        ({"target_modules": ".*q_prj"}, "names '.*q_prj', but no module"),
        ({"target_modules": "("}, "is no regular expression"),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": [40]},
            "names block 40, but the model has blocks 0 to 1",
        ),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 2]}, "names block 2, but the model has blocks 0 to"),
        ({"target_modules": ["q_proj"], "layers_to_transform": -1}, "names block -1, but the model has blocks 0 to 1"),
    ],
)
def test_settings_that_name_nothing_are_told(client: TenantClient, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(expected)) as caught:
        check(client, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"target_modules": "all-linear"}, {"target_modules": "ALL-LINEAR"}, {"target_modules": None},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 1]}, {"target_modules": ["self_attn.q_proj"]},
        {"target_modules": ["q_proj"], "layers_to_transform": 1},
        {"target_modules": ["q_proj"], "layers_to_transform": []},
        {"target_modules": ["q_proj"], "layers_to_transform": [7], "layers_pattern": "towers"},
        {"target_modules": r".*\.1\..*_proj"}, {"target_modules": ["lm_head"]}, {"target_modules": "lm_head"},
        {"target_modules": ["embed_tokens"]}, {"target_modules": ["model.layers.0.mlp.up_proj"]},
        {"target_modules": ["nothing"], "target_parameters": ["experts.weight"]},
    ],
)  # fmt: skip
def test_settings_that_peft_can_use_are_not_refused(client: TenantClient, settings: dict[str, Any]) -> None:
    check(client, **settings)


def test_a_name_beside_others_that_are_there_is_warned_of(client: TenantClient) -> None:
    with pytest.warns(UserWarning, match="names 'v_prj', but no module .* the nearest is v_proj; the others are"):
        client.connect(partial(check_adapter, {"target_modules": ["q_proj", "v_prj"]}, False))


@pytest.mark.parametrize("config", [GPT2Config(**GPT2_SIZES), MixtralConfig(**SIZES, num_local_experts=2)])
def test_every_module_with_parameters_may_be_named(config: PreTrainedConfig, tmp_path: Path) -> None:
    """Also with a provider that serves some of the layers only: the others are in the bundle."""
    save_random(config, tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    with ScriptedProvider(model=tmp_path) as provider, provider.client(mask="off") as client:
        modules, names = dict(client.load_model().named_modules()), names_of(client)
        assert names is not None
        assert {name for name, module in modules.items() if name and [*module.parameters()]} <= names
        for last in {name.rpartition(".")[2] for name in names}:
            check(client, target_modules=[last])


@pytest.mark.parametrize("tensors", [b"", b"\0" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\xff" * 8 + b"{"])
def test_a_header_that_cannot_be_read_says_nothing(client: TenantClient, tensors: bytes) -> None:
    assert module_names(client.connect(), tensors) is None


# ---- the frozen prefix -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({"target_modules": "all-linear"}, True), ({"target_modules": ["q_proj"]}, True),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1, 0]}, True),
        ({"target_modules": r".*layers\.0\..*q_proj"}, True), ({"target_modules": r".*layers\.1\..*q_proj"}, False),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, False),
        ({"target_modules": ["q_proj"], "exclude_modules": r".*\.0\..*"}, False),
        ({"target_modules": ["lm_head"]}, False), ({"target_modules": None}, False),
    ],
)  # fmt: skip
def test_an_adapter_on_the_lowest_block_is_told(client: TenantClient, settings: Any, is_refused: bool) -> None:
    if not is_refused:
        check(client, caches_prefix=True, **settings)
        return
    with pytest.raises(ConfigurationError, match="no effect with an adapter on the lowest block"):
        check(client, caches_prefix=True, **settings)


def test_all_linear_layers_are_on_the_lowest_block_of_any_model() -> None:
    check_prefix({"target_modules": "all-linear", "exclude_modules": ".*"})
    check_prefix({"target_modules": ["q_proj"]})
    with pytest.raises(ConfigurationError, match="no effect with an adapter on the lowest block"):
        check_prefix({"target_modules": "all-linear"})


# ---- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (lora(target_modules=["q_prj"]), {}), (IA3Config(target_modules=["q_prj"], feedforward_modules=[]), {}),
        (LoraConfig(target_modules=["q_proj"], layers_to_transform=[2]), {}),
        (lora(), {"cache_frozen_prefix": True, "max_steps": 20}),
    ],
)  # fmt: skip
def test_a_run_is_refused_before_anything_is_sent(
    provider: ScriptedProvider, client: TenantClient, tmp_path: Path, config: Any, options: dict[str, Any]
) -> None:
    provider.forget_calls()
    check_trainable(config)
    with pytest.raises(ConfigurationError, match=r"names|no effect"):
        client.finetune(ROWS, config, tmp_path / "a", **{**QUICK, **options})
    assert provider.calls == []
    assert not [*tmp_path.iterdir()]


def test_what_is_refused_peft_refuses_too(client: TenantClient) -> None:
    """And what is not, it takes: of names as they may be written in a recipe."""
    for word in ("q_proj", "q_prj", "self_attn", "attn.q_proj", "self_attn.q_proj", "layers.0.self_attn.q_proj", "0"):
        config = LoraConfig(target_modules=[word])
        try:
            get_peft_model(client.load_model(), config)
            is_taken = True
        except ValueError as exc:
            is_taken = "not found" not in str(exc)
        refused = pytest.raises(ConfigurationError)
        if is_taken:
            check(client, target_modules=[word])
        else:
            with refused:
                check(client, target_modules=[word])


def test_blocks_are_counted_by_the_config_where_a_provider_serves_some_of_them(client: TenantClient) -> None:
    manifest: Manifest = client.connect()
    some = manifest.model_copy(update={"groups": manifest.groups[:1]})
    check_adapter({"layers_to_transform": [1]}, False, some, lambda _: b"")


def test_an_offer_is_compared_before_a_trusted_checkpoint_is(
    provider: ScriptedProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may take minutes. The bundle of a new cache is not there yet either."""
    monkeypatch.setattr(TrustedCheckpoint, "open", lambda _: pytest.fail("it was looked at first"))
    client = provider.client(cache=tmp_path / "cache")
    with pytest.raises(ConfigurationError, match="the nearest is q_proj"):
        client.finetune(ROWS, lora(target_modules=["q_prj"]), tmp_path / "a", **QUICK)
    client.close()


def test_an_offer_is_compared_also_where_the_session_is_open(client: TenantClient) -> None:
    with pytest.raises(ConfigurationError, match="the nearest is q_proj"):
        check(client, target_modules=["q_prj"])
    check(client, target_modules=["q_proj"])
