"""Tests that an engine's answers with adapters of all kinds in the same steps are those of `generate` with each adapter
alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.engine import Engine
from tests.support.saved_adapters import EXAMPLES, OF_CONV1D, save_adapter, save_kind
from tests.support.tiny_models import PROMPTS, make_model, open_client
from tests.support.waiting import SLOW_TIMEOUT_S
from wire.errors import ConfigurationError

pytestmark = [
    pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
NEW_TOKENS = 6
LAYERS = {"llama": ("q_proj", "v_proj", "down_proj"), "gpt2": ("c_attn", "c_proj")}


ONE_OF_EACH = tuple({peft_type: title for title, (peft_type, _) in reversed(EXAMPLES.items())}.values())
"""The first example of each kind."""


@pytest.mark.parametrize(
    ("kind", "titles"),
    [
        ("llama", ONE_OF_EACH),
        pytest.param("llama", tuple(EXAMPLES), marks=pytest.mark.slow),
        pytest.param("gpt2", OF_CONV1D, marks=pytest.mark.slow),
    ],
    ids=["one of each", "all", "all of Conv1D"],
)
def test_all_kinds_in_one_engine(kind: str, titles: tuple[str, ...], tmp_path: Path) -> None:
    """The engine answers few requests at a time, and few adapters fit on the device, so requests join, wait for their
    adapters and share steps with LoRA and the base."""
    root = tmp_path / "adapters"
    with open_client(make_model(kind, tmp_path / kind)) as client:
        model = client.load_model()
        for seed, title in enumerate(titles):
            save_kind(model, kind, root / f"a{seed}", title, seed, target_modules=list(LAYERS[kind]))
        save_adapter(model, root / "lora", seed=99, fan_in_fan_out=kind == "gpt2")
        asked = [(f"a{seed}", PROMPTS[seed % len(PROMPTS)]) for seed in range(len(titles))]
        asked += [("lora", PROMPTS[0]), (None, PROMPTS[0])]
        options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": []}
        want = [client.generate(prompt, name and root / name, **options) for name, prompt in asked]

        def make_store(model: object, wake: object) -> AdapterStore:
            return AdapterStore(model, root, on_ready=wake, device_slots=6, separate_calls=True)

        with Engine(client, make_store, step_tokens=32, max_running=8) as engine:
            answers = [engine.submit(prompt, name, **options) for name, prompt in asked]
            got = [answer.result(SLOW_TIMEOUT_S) for answer in answers]
        plain = {prompt: client.generate(prompt, **options) for prompt in PROMPTS}
    assert got == want
    # The control: most adapters change their answer, so a request without its adapter would show.
    assert sum(answer != plain[prompt] for answer, (_, prompt) in zip(want, asked, strict=True)) > 0.8 * len(titles)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_adapters_of_the_head(kind: str, tmp_path: Path) -> None:
    """A step computes the logits of only some rows, so the head gets fewer rows than other layers. GPT-2's head is also
    its embedding."""
    root = tmp_path / "adapters"
    with open_client(make_model(kind, tmp_path / kind)) as client:
        model = client.load_model()
        ranks = {"one": 8, "two": 16, "three": 8}
        for seed, (name, rank) in enumerate(ranks.items()):
            save_adapter(model, root / name, seed, r=rank, target_modules=["lm_head"])
        save_kind(model, kind, root / "other", "VeRA", 9, target_modules=["lm_head"])
        asked = [(name, prompt) for name in (*ranks, "other", None) for prompt in PROMPTS[:3]]
        options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": []}
        want = [client.generate(prompt, name and root / name, **options) for name, prompt in asked]
        with Engine(
            client, lambda model, wake: AdapterStore(model, root, on_ready=wake, dtype=torch.float32), step_tokens=16
        ) as engine:
            answers = [engine.submit(prompt, name, **options) for name, prompt in asked]
            assert [answer.result(SLOW_TIMEOUT_S) for answer in answers] == want
    for first, second, third, _, plain in zip(*(want[at : at + 3] for at in range(0, 15, 3)), strict=True):
        assert len({first, second, third, plain}) == 4


def test_generate_many_with_adapters_that_change_inputs(tmp_path: Path) -> None:
    with open_client(make_model("llama", tmp_path / "llama")) as client:
        folder = save_kind(client.load_model(), "llama", tmp_path / "root" / "oft", "OFT", 1, target_modules=["q_proj"])
        want = client.generate("who?", folder, max_new_tokens=NEW_TOKENS)
        with pytest.raises(ConfigurationError, match="served with separate_calls=True"):
            client.generate_many(["who?"], folder, NEW_TOKENS, False)
        with pytest.raises(ConfigurationError, match="separate_calls is True or False, got int"):
            client.generate_many(["who?"], folder, NEW_TOKENS, False, separate_calls=1)
        assert client.generate_many(["who?"], folder, NEW_TOKENS, False, separate_calls=True) == [want]
