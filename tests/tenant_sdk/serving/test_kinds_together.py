"""An engine's answers with adapters of all kinds, side by side, are those of `generate` with each of them alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.engine import Engine
from tests.support.saved_adapters import save_adapter
from tests.support.saved_kinds import EXAMPLES, OF_CONV1D, save_kind
from tests.support.served_kinds import PROMPTS, make_model, open_client

pytestmark = [
    pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
NEW_TOKENS, TIMEOUT_S = 6, 60.0
LAYERS = {"llama": ("q_proj", "v_proj", "down_proj"), "gpt2": ("c_attn", "c_proj")}


@pytest.mark.parametrize(("kind", "titles"), [("llama", tuple(EXAMPLES)), ("gpt2", OF_CONV1D)])
def test_all_kinds_in_one_engine(kind: str, titles: tuple[str, ...], tmp_path: Path) -> None:
    """The engine has few places and slots, so requests join, wait for slots and share steps with LoRA and the base."""
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

        def make_slots(model: object, wake: object) -> AdapterStore:
            return AdapterStore(model, root, on_ready=wake, device_slots=6, separate_calls=True)

        with Engine(client, make_slots, step_tokens=32, max_running=8) as engine:
            answers = [engine.submit(prompt, name, **options) for name, prompt in asked]
            got = [answer.result(TIMEOUT_S) for answer in answers]
    assert got == want
