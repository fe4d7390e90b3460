"""Saves random PEFT adapters of a tiny model, LoRA and every kind that the adapter store keeps as PEFT's modules,
computes the logits of stock PEFT with them, and notes how often their files are opened."""

from __future__ import annotations

import builtins
import contextlib
import copy
import io
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from runtime.loading import loading
from tenant_sdk.adapter_checks import CONFIG, WEIGHTS
from tenant_sdk.serving.adapters import AdapterLoan, AdapterStore, reader
from tests.support.tiny_models import tiny_config

WAIT_S = 60.0


def base_model(kind: str = "llama", seed: int = 0) -> Any:
    """Returns a frozen random model with the name tiny-KIND."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind)).eval().requires_grad_(False)
    model.name_or_path = model.config.name_or_path = f"tiny-{kind}"
    return model


def save_adapter(model: Any, folder: Path, seed: int, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Path:
    """Saves an untrained PEFT adapter whose factors are random numbers of dtype `dtype`."""
    config = LoraConfig(
        **{"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
    )
    with loading():
        adapted = get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator).to(dtype) * 0.25)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def peft_logits(model: Any, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Returns the logits of stock PEFT for one sequence."""
    with loading():
        adapted = PeftModel.from_pretrained(copy.deepcopy(model), str(folder)).eval()
    with torch.no_grad():
        logits: torch.Tensor = adapted(ids[None]).logits[0]
    return logits


class Bell:
    """Gives a store a function to call when a loan is ready or has failed, and lets a test wait for this call."""

    def __init__(self) -> None:
        self._rang = threading.Condition()

    def __call__(self) -> None:
        with self._rang:
            self._rang.notify_all()

    def wait_for(self, *loans: AdapterLoan) -> None:
        """Waits until all these loans are ready or have failed."""
        with self._rang:
            assert self._rang.wait_for(lambda: all(t.is_ready() or t.failure for t in loans), WAIT_S)


def held(store: AdapterStore, bell: Bell, *names: str) -> list[AdapterLoan]:
    """Reserves adapters, and waits until all of them are ready."""
    loans = [store.reserve(name) for name in names]
    bell.wait_for(*loans)
    for loan in loans:
        assert loan.failure is None, loan.failure
    return loans


def stepped(store: AdapterStore, model: Any, sequences: list[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
    """Returns the logits of sequences of the same length, computed in one pass, each with the adapter in its place."""
    order = sorted(range(len(sequences)), key=lambda at: sequences[at][0])
    ids = torch.stack([sequences[at][1] for at in order])
    rows = [sequences[at][0] for at in order for _ in range(ids.shape[1])]
    with torch.no_grad(), store.in_step(rows):
        logits = model(ids).logits
    return [logits[order.index(at)] for at in range(len(sequences))]


class Openings:
    """Notes the name of each adapter's file that is opened from now on, and each text of such a file that is parsed as
    JSON."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: list[str] = []
        self.parsed: list[str] = []
        monkeypatch.setattr(reader, "RACY_NS", -1)  # files that have just been written are opened again
        for owner in (os, io, builtins):
            monkeypatch.setattr(owner, "open", self._noting(owner.open))
        loads = json.loads

        def parsing(text: Any, **options: Any) -> Any:
            self.parsed.extend([text] if "peft_type" in str(text) or "lora_A" in str(text) else [])
            return loads(text, **options)

        monkeypatch.setattr(json, "loads", parsing)

    def _noting(self, function: Any) -> Any:
        def opening(path: Any, *arguments: Any, **options: Any) -> Any:
            self.files.extend(name for name in (CONFIG, WEIGHTS) if str(path).endswith(name))
            return function(path, *arguments, **options)

        return opening

    def assert_once(self) -> None:
        """Checks that one adapter was opened and parsed once: its settings, and the header of its weights."""
        assert self.files == [CONFIG, WEIGHTS]
        assert len(self.parsed) == 2


def open_files() -> list[str]:
    """Returns the paths of the adapters' files, and of all folders, that are open in this process."""
    paths: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            paths.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(path for path in paths if path.endswith((CONFIG, WEIGHTS)) or os.path.isdir(path))


EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA with biases": ("LORA", {"r": 4, "lora_alpha": 6, "lora_bias": True, "rank_pattern": {"q_proj": 2}}),
    "IA3": ("IA3", {}),
    "LoHa": ("LOHA", {"r": 4, "alpha": 6, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    "LoKr": ("LOKR", {"r": 4}),
    "LoKr of two products": ("LOKR", {"r": 2, "decompose_both": True, "decompose_factor": 4}),
    "VeRA": ("VERA", {"r": 8}),
    "VeRA without its projections": ("VERA", {"r": 8, "save_projection": False, "projection_prng_key": 7}),
    "PVeRA": ("PVERA", {"r": 8}),
    "RandLoRA": ("RANDLORA", {"r": 4}),
    "RandLoRA without its bases": ("RANDLORA", {"r": 4, "save_projection": False, "sparse": True}),
    "OFT": ("OFT", {"oft_block_size": 8}),
    "OFT by rank": ("OFT", {"r": 4, "oft_block_size": 0, "block_share": True, "use_cayley_neumann": False}),
    "OFT within bounds": ("OFT", {"oft_block_size": 4, "coft": True, "eps": 0.5}),
    "BOFT": ("BOFT", {"boft_block_size": 4}),
    "BOFT of two factors": ("BOFT", {"boft_block_size": 0, "boft_block_num": 4, "boft_n_butterfly_factor": 2}),
    "FourierFT": ("FOURIERFT", {"n_frequency": 50, "n_frequency_pattern": {"v_proj": 30}}),
    "WaveFT": ("WAVEFT", {"n_frequency": 50, "wavelet_family": "db2"}),
    "VB-LoRA": ("VBLORA", {"r": 2, "num_vectors": 8, "vector_length": 8}),
    "GraLoRA": ("GRALORA", {"r": 4, "hybrid_r": 2}),
    "MiSS": ("MISS", {"r": 4}),
    "MiSS, small": ("MISS", {"r": 4, "init_weights": "mini", "mini_r": 4}),
    "BEFT": ("BEFT", {}),
    "C3A": ("C3A", {"block_size": 8, "block_size_pattern": {"v_proj": 4}}),
    "RoAd": ("ROAD", {"group_size": 8, "variant": "road_2"}),
    "HRA": ("HRA", {"r": 4}),
    "HRA, orthogonal": ("HRA", {"r": 3, "apply_GS": True}),
    "DEFT": ("DEFT", {"r": 4}),
    "DEFT, scaled": ("DEFT", {"r": 4, "alpha": 8, "decomposition_method": "qr"}),
    "DEFT without injection": ("DEFT", {"r": 4, "para": True}),
    "DeLoRA": ("DELORA", {"r": 4, "rank_pattern": {"q_proj": 2}}),
    "TinyLoRA": ("TINYLORA", {"r": 2, "u": 4, "weight_tying": 0.5}),
    "TinyLoRA with its matrices": ("TINYLORA", {"r": 2, "u": 4, "save_projection": True}),
    "AdaLoRA": ("ADALORA", {"init_r": 4, "target_r": 2, "total_step": 100}),
    "AdaLoRA of fewer ranks": ("ADALORA", {"init_r": 4, "target_r": 2, "total_step": 100}),
}  # fmt: skip
"""An example of each kind by its title: `peft_type`, and settings."""
OF_CONV1D = (
    "LoRA with biases",
    "IA3", "VeRA", "VeRA without its projections", "PVeRA", "RandLoRA", "RandLoRA without its bases", "FourierFT",
    "WaveFT", "VB-LoRA", "GraLoRA", "AdaLoRA", "AdaLoRA of fewer ranks", "DEFT", "DEFT, scaled",
    "DEFT without injection", "TinyLoRA", "TinyLoRA with its matrices",
)  # fmt: skip
"""The examples that PEFT makes for Conv1D."""
TARGETS = {"llama": ("q_proj", "v_proj", "down_proj"), "gpt2": ("c_attn", "c_proj")}
"""The layers that examples change, by kind of model. q_proj and v_proj share a call to the provider."""


def save_kind(model: Any, kind: str, folder: Path, title: str, seed: int, **changes: Any) -> Path:
    """Saves an adapter by PEFT, untrained: random numbers are added to what training would change.

    Args:
        model: the base model.
        kind: llama or gpt2.
        folder: where the adapter is saved.
        title: a key of `EXAMPLES`.
        seed: the seed of the random numbers.
        changes: settings beside those of the example.
    """
    peft_type, settings = EXAMPLES[title]
    targets = list(TARGETS[kind])
    own: dict[str, Any] = {"target_modules": targets, "task_type": "CAUSAL_LM", **settings, **changes}
    if peft_type == "IA3":
        own.setdefault(
            "feedforward_modules", [each for each in own["target_modules"] if each in ("down_proj", "c_proj")]
        )
    with loading():
        torch.manual_seed(seed)
        adapted = get_peft_model(copy.deepcopy(model), PEFT_TYPE_TO_CONFIG_MAPPING[peft_type](**own))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    if title == "AdaLoRA of fewer ranks":
        adapted.peft_config["default"].rank_pattern = {
            f"{name}.lora_E.default": [at % 3 > 0 for at in range(4)]
            for name, module in adapted.base_model.model.named_modules()
            if hasattr(module, "lora_E") and name.endswith(targets[0])
        }
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


# ---- adapters that answer with a code --------------------------------------------------------------------------------
#
# A wrong adapter shows, since each answers with a code of its own. The model has one block and reads one token at a
# time. Attention then returns its value, so the output is h = e + Wo·v. The v_proj of an adapter detects the two prompt
# tokens in the block's input, and adds Wo⁻¹·c·w. Here w is the head's row of the token to answer, and c is large enough
# to outweigh everything else.

HIDDEN, VOCAB = 32, 64
PROMPT = (5, 9)
"""The two prompts; each is one token."""
LOUD = 100.0
Code = tuple[int, int]
"""The pair of tokens with which an adapter answers the two prompts."""


def coded_model() -> Any:
    """Returns a model of one block. If the head's input is the direction of a token, that token has the largest
    logit."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    rows = torch.randn(VOCAB, HIDDEN)
    model.lm_head.weight.copy_(rows / rows.norm(dim=1, keepdim=True))  # so a token's own row gives the largest logit
    model.model.embed_tokens.weight.normal_()
    block = model.model.layers[0]
    for layer in (block.self_attn.o_proj, block.self_attn.v_proj):
        layer.weight.copy_(torch.linalg.qr(torch.randn(HIDDEN, HIDDEN))[0])
    return model


def code_of(number: int) -> Code:
    """Returns a code that is different for every number below 4,096."""
    return number % VOCAB, (number // VOCAB + number) % VOCAB


def save_coded(model: Any, folder: Path, code: Code, rank: int, seed: int) -> None:
    """Saves an adapter of q and v that answers with a code. Its q part is random, which has no effect on a sequence of
    one token."""
    generator = torch.Generator().manual_seed(seed)
    block = model.model.layers[0]
    inputs = block.input_layernorm(model.model.embed_tokens(torch.tensor(PROMPT)))  # (2, hidden)
    wanted = LOUD * model.lm_head.weight[list(code)] @ torch.linalg.inv(block.self_attn.o_proj.weight).t()
    pick, give = torch.zeros(rank, HIDDEN), torch.zeros(HIDDEN, rank)
    pick[:2], give[:, :2] = torch.linalg.pinv(inputs).t(), wanted.t()
    turn = torch.linalg.qr(torch.randn(rank, rank, generator=generator))[0]  # now every row of the factors matters
    tensors = {
        "v_proj.lora_A": turn @ pick,
        "v_proj.lora_B": give @ turn.t() / 2,  # alpha / rank is 2
        "q_proj.lora_A": torch.randn(rank, HIDDEN, generator=generator),
        "q_proj.lora_B": torch.randn(HIDDEN, rank, generator=generator),
    }
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "base_model.model.model.layers.0.self_attn"
    save_file({f"{prefix}.{name}.weight": each.contiguous() for name, each in tensors.items()}, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"]}
    (folder / CONFIG).write_text(json.dumps(config))


def answers(store: AdapterStore, model: Any, indices: Sequence[int]) -> list[Code]:
    """Returns the answers that the adapters in these places give to both prompts, computed in one pass."""
    order = sorted(range(len(indices)), key=lambda at: indices[at])
    ids = torch.tensor([token for _ in indices for token in PROMPT])[:, None]  # (2 · places, 1)
    with torch.no_grad(), store.in_step([indices[at] for at in order for _ in PROMPT]):
        best = model(ids).logits[:, 0].argmax(-1).view(-1, 2).tolist()
    found: dict[int, Code] = {at: (pair[0], pair[1]) for at, pair in zip(order, best, strict=True)}
    return [found[at] for at in range(len(indices))]
