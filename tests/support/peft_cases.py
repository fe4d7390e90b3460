"""Lists an example of every kind of PEFT and of every way to start it, for the table in docs/peft.md."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from peft import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    LoraConfig,
    PeftConfig,
    PeftType,
    TaskType,
)
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig

TARGETS = ("q_proj", "v_proj", "gate_proj", "down_proj")
"""The layers that examples change: some share a call to the provider with other layers, and down_proj has a call
of its own."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Describes one row of the table.

    Attributes:
        title: the row's first cell.
        kind: the `peft_type`.
        settings: the settings of the config, beside the layers that it changes.
        start: the value of the setting that chooses how the adapter starts, if the row is about that.
        variant: the setting of LoRA that is on, if the row is about that.
        takes_layers: whether the config has `target_modules`.
    """

    title: str
    kind: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    start: str | None = None
    variant: str | None = None
    takes_layers: bool = True

    def config(self) -> PeftConfig:
        """Returns a new config."""
        own: dict[str, Any] = {"task_type": TaskType.CAUSAL_LM, **self.settings}
        if self.takes_layers:
            own.setdefault("target_modules", list(TARGETS))
        return PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(self.kind)](**own)


def _lora(title: str, start: Any = True, variant: str | None = None, **settings: Any) -> Case:
    how = start if isinstance(start, str) else None
    return Case(title, "LORA", {"r": 4, "init_lora_weights": start, **settings}, how, variant)


_VIRTUAL: dict[str, Any] = {"num_virtual_tokens": 3}
CASES: tuple[Case, ...] = (
    _lora("LoRA"),
    _lora("LoRA, rsLoRA, with biases", use_rslora=True, lora_bias=True),
    _lora("LoRA from a Gaussian", "gaussian"),
    _lora("LoRA, orthogonal", "orthogonal"),
    _lora("LoRA, EVA", "eva"),
    _lora("LoRA, OLoRA", "olora"),
    _lora("LoRA, PiSSA by iterations", "pissa_niter_8"),
    _lora("LoRA, PiSSA", "pissa"),
    _lora("LoRA, CorDA", "corda"),
    _lora("LoRA, LoftQ", "loftq"),
    _lora("LoRA, LoRA-GA", "lora_ga"),
    _lora("LoRA, MiCA", "mica"),
    _lora("DoRA", variant="use_dora", use_dora=True),
    _lora("aLoRA", variant="alora_invocation_tokens", alora_invocation_tokens=[5, 6]),
    _lora("VeLoRA", variant="velora_config", velora_config=VeloraConfig(num_groups=4)),
    _lora("MonteCLoRA", variant="monteclora_config", monteclora_config=MontecloraConfig()),
    _lora("BD-LoRA", variant="use_bdlora", use_bdlora=BdLoraConfig(
        target_modules_bd_a=["down_proj"], target_modules_bd_b=["q_proj", "v_proj", "gate_proj"], nblocks=2
    )),
    _lora("KaSA", variant="kasa_config", kasa_config=KasaConfig()),
    Case("AdaLoRA", "ADALORA", {"init_r": 4, "target_r": 2, "total_step": 100, "tinit": 1, "tfinal": 1}),
    Case("AdaMSS", "ADAMSS"),
    Case("Adaption prompt", "ADAPTION_PROMPT", {"adapter_len": 3, "adapter_layers": 1}, takes_layers=False),
    Case("BEFT", "BEFT"),
    Case("BOFT", "BOFT", {"boft_block_size": 4}),
    Case("C3A", "C3A", {"block_size": 8}),
    Case("Cartridge", "CARTRIDGE", _VIRTUAL, takes_layers=False),
    Case(
        "CPT", "CPT", {"cpt_token_ids": [4, 5], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]}, takes_layers=False
    ),
    Case("DEFT", "DEFT", {"r": 4}),
    Case("DeLoRA", "DELORA", {"r": 4}),
    Case("FourierFT", "FOURIERFT", {"n_frequency": 40}),
    Case("FRoD", "FROD"),
    Case("GLoRA", "GLORA", {"r": 4}),
    Case("GLoRA by vectors", "GLORA", {"r": 4, "config_A_B": "vector", "config_C": "vector", "config_D_E": "vector"}),
    Case("GraLoRA", "GRALORA", {"r": 4}),
    Case("HiRA", "HIRA", {"r": 4}),
    Case("HRA", "HRA", {"r": 4}),
    Case("IA3", "IA3", {"feedforward_modules": ["down_proj"]}),
    Case("Lily", "LILY", {"r": 4}),
    Case("LN tuning", "LN_TUNING", {"target_modules": ["input_layernorm"]}),
    Case("LoHa", "LOHA", {"r": 4}),
    Case("LoKr", "LOKR", {"r": 4}),
    Case("MiSS", "MISS", {"r": 4}),
    Case("MiSS, mini", "MISS", {"r": 4, "init_weights": "mini", "mini_r": 4}, "mini"),
    Case("MiSS, bat", "MISS", {"r": 4, "init_weights": "bat"}, "bat"),
    Case("Multitask prompt tuning", "MULTITASK_PROMPT_TUNING", {**_VIRTUAL, "num_tasks": 2}, None, None, False),
    Case("OFT", "OFT", {"oft_block_size": 8}),
    Case("OSF", "OSF"),
    Case("P-tuning", "P_TUNING", {**_VIRTUAL, "encoder_hidden_size": 8}, None, None, False),
    Case("PEANuT", "PEANUT", {"r": 4, "depth": 2}),
    Case("Poly", "POLY", {"r": 4}),
    Case("Prefix tuning", "PREFIX_TUNING", _VIRTUAL, takes_layers=False),
    Case("Prompt tuning", "PROMPT_TUNING", _VIRTUAL, takes_layers=False),
    Case("PSOFT by iterations", "PSOFT", {"r": 4, "psoft_svd": "lowrank"}, "lowrank"),
    Case("PSOFT", "PSOFT", {"r": 4}),
    Case("PVeRA", "PVERA", {"r": 4}),
    Case("RandLoRA", "RANDLORA", {"r": 4}),
    Case("RoAd", "ROAD", {"group_size": 8}),
    Case("Shadow", "SHADOW", takes_layers=False),
    Case("SHiRA", "SHIRA", {"r": 2}),
    Case("Super-Tuning", "SUPERTUNING", {"sparsity": 0.9}),
    Case("TinyLoRA", "TINYLORA", {"r": 2, "u": 4}),
    Case("Trainable tokens", "TRAINABLE_TOKENS", {"token_indices": [9, 10]}, takes_layers=False),
    Case("UniLoRA", "UNILORA", {"r": 4}),
    Case("VB-LoRA", "VBLORA", {"r": 2, "num_vectors": 8, "vector_length": 8}),
    Case("VeRA", "VERA", {"r": 4}),
    Case("WaveFT", "WAVEFT", {"n_frequency": 40}),
    Case("X-LoRA", "XLORA", {"hidden_size": 32, "adapters": {}}, takes_layers=False),
)  # fmt: skip
"""The table's rows, in their order."""
NOT_ROWS = {
    "arrow_config": "a router over LoRA adapters that are loaded together",
    "lycoris": "a way to draw LoKr's random numbers",
    "gaussian": "a way to draw random numbers",
    "kaiming_uniform": "a way to draw random numbers",
    "xavier_uniform": "a way to draw random numbers",
    "zero": "the start of prefix tuning's vectors",
    "orthogonal": "a way to draw random numbers",
}
"""Maps starts and variants that PEFT's configs name, but that need no row of the table, to the reason."""


def starts_of(config: type) -> Iterator[str]:
    """Yields the texts that a config's type hints allow as ways to start an adapter."""
    hints = typing.get_type_hints(config)
    for name in ("init_lora_weights", "init_weights"):
        if name in hints:
            yield from _texts(hints[name])


def variants_of_lora() -> set[str]:
    """Returns the settings that make LoRA another kind of adapter, as PEFT marks them."""
    return {each.name for each in dataclasses.fields(LoraConfig) if each.metadata.get("is_lora_variant")}


def _texts(hint: Any) -> Iterator[str]:
    if typing.get_origin(hint) is typing.Literal:
        yield from (each for each in typing.get_args(hint) if isinstance(each, str))
    for inner in typing.get_args(hint):
        if not isinstance(inner, str):
            yield from _texts(inner)
