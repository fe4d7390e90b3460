"""Measures how each kind of PEFT does over a provider's layers, beside stock PEFT on the dequantised model, and writes
the table of docs/peft.md.

`python -m tests.support.peft_table` measures every kind and writes the table anew.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import sys
import tempfile
import typing
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PeftType,
    TaskType,
    get_peft_model,
)
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig
from transformers import LlamaConfig

from tenant_sdk import TenantClient, for_remote_base
from tenant_sdk.kinds.refused import TASKS, check_trainable
from tenant_sdk.kinds.started_lora import StartedLora
from tenant_sdk.peft_model import adapted_model
from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.testing import character_tokenizer
from tests.support.parity import batch, dequantised
from tests.support.repository import ROOT
from tests.support.saved_adapters import Bell, stepped
from tests.support.tiny_models import SIZES, save_random
from tests.support.training import ROWS
from wire.errors import VeilbaseError

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
    # PEFT draws as many samples beforehand as `buffer_size` says: 150 by default, which takes half a minute
    _lora("MonteCLoRA", variant="monteclora_config", monteclora_config=MontecloraConfig(buffer_size=2)),
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


PAGE = ROOT / "docs" / "peft.md"
BEGIN, END = "<!-- table: python -m tests.support.peft_table -->", "<!-- end of table -->"
BOUNDS = (1e-6, 1e-5, 1e-4, 1e-3)
"""The errors that the table may state. The writer takes the smallest that is twice what it measured."""
_EXTRA: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "POLY": lambda ids: {"task_ids": torch.zeros(ids.shape[0], dtype=torch.long)},
    "MULTITASK_PROMPT_TUNING": lambda ids: {"task_ids": torch.zeros(ids.shape[0], dtype=torch.long)},
}
"""Maps a kind to a function from token ids to the further arguments that a model with such an adapter needs."""


@dataclass(frozen=True)
class Found:
    """Holds what was found about one case: for each way of use None if it works, or else why it is refused.

    Attributes:
        stock: stock PEFT and Trainer over `load_model()`.
        finetune, generate, engine: the methods of the client.
        error: the largest relative distance to stock PEFT on the dequantised model; None where nothing works.
    """

    stock: str | None
    finetune: str | None
    generate: str | None
    engine: str | None
    error: float | None


@dataclass(frozen=True)
class Site:
    """Holds a provider's tiny model in `folder`, a client of it, a folder for adapters, the client's model, and the
    dequantised model."""

    folder: Path
    client: TenantClient
    scratch: Path
    remote: Any
    plain: Any

    def local(self) -> Any:
        """Returns a copy of the dequantised model."""
        return copy.deepcopy(self.plain)

    def loaded(self) -> Any:
        """Returns a copy of the client's model."""
        return copy.deepcopy(self.remote)


@contextlib.contextmanager
def opened(where: Path) -> Iterator[Site]:
    """Makes a tiny Llama with biases, served in int8, and a client of it in float arithmetic, so that results equal
    those of the dequantised model."""
    folder = where / "model"
    save_random(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=False), folder)
    character_tokenizer().save_pretrained(folder)
    options: dict[str, Any] = {"mask": "off", "arithmetic": "float", "progress": False, "cache": where / "cache"}
    with TenantClient(f"inproc:{folder}", **options) as client:
        yield Site(folder, client, where, client.load_model(), dequantised(folder))


def measure(case: Case, site: Site) -> Found:
    """Trains and saves an adapter of a kind in each way, and compares it with stock PEFT."""
    if case.kind == "XLORA":
        return Found("not measured: it needs adapters that are trained already", *[TASKS["XLORA"]] * 3, None)
    folder = site.scratch / "adapters" / re.sub(r"\W+", "-", case.title.lower())
    finetuned = folder.with_name(folder.name + "-finetuned")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock, error = _reason(lambda: _stock(case, site, folder), folder)
        finetune, _ = _reason(lambda: _finetune(case, site, finetuned), finetuned)
        if not (folder / "adapter_config.json").exists() and not _made_by_stock(case, site, folder):
            return Found(stock, finetune, stock, stock, None)
        generate, used = _reason(lambda: _generated(case, site, folder), folder)
        engine, served = _reason(lambda: _served(case, site, folder), folder)
        if finetune is None and generate is None:
            used = max(used or 0.0, _generated(case, site, finetuned))
    errors = [each for each in (error, used, served) if each is not None]
    return Found(stock, finetune, generate, engine, max(errors, default=None))


def _reason(act: Callable[[], float], folder: Path) -> tuple[str | None, float | None]:
    """Returns (None, what an action returned), or (why it was refused, None); the reason says "it" for the
    adapter's folder."""
    try:
        return None, act()
    except VeilbaseError as exc:
        return str(exc).replace(str(folder), "it").replace(f"the adapter {folder.name}", "it"), None


def _config(case: Case) -> Any:
    try:
        return case.config()
    except ImportError:  # PEFT wants a package that is not installed before it makes this config
        settings = {"use_dora": False, "init_lora_weights": case.start, **case.settings}
        return SimpleNamespace(peft_type=case.kind, **settings)


def _made(model: Any, config: Any) -> Any:
    torch.manual_seed(3)
    return get_peft_model(model, config).eval()


def _stock(case: Case, site: Site, folder: Path) -> float:
    """Does what `_compared` does. If that fails, raises the error with which `finetune` refuses the kind, or else the
    error itself."""
    config = _config(case)
    if case.start == "lora_ga":  # its gradients are not prepared here, and without them PEFT makes a plain start
        check_trainable(config)
    try:
        return _compared(case, site, folder)
    except (VeilbaseError, AttributeError):
        check_trainable(config)
        raise


def _compared(case: Case, site: Site, folder: Path) -> float:
    """Returns the largest distance of logits, gradients, losses of five steps, and a saved adapter's logits."""
    config = _config(case)
    ours = _made(site.loaded(), for_remote_base(copy.deepcopy(config)))
    theirs = _made(site.local(), case.config())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in _trained(ours).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    _copy_numbers(ours, theirs, site)
    ids = batch()
    distances = [_distance(ours, theirs, case, ids)]
    _backward(ours, case, ids), _backward(theirs, case, ids)
    mine, other = (_gradient(each) for each in (ours, theirs))
    distances += [relative(mine, other), relative(_losses(ours, case, ids), _losses(theirs, case, ids))]
    ours.save_pretrained(folder, save_embedding_layers=False)
    distances.append(_distance(ours, PeftModel.from_pretrained(site.local(), str(folder)).eval(), case, ids))
    return max(distances)


def _made_by_stock(case: Case, site: Site, folder: Path) -> bool:
    """Saves an adapter that stock PEFT made where the weights are, and returns whether stock PEFT can make one."""
    try:
        made = _made(site.local(), case.config())
    except Exception:  # noqa: BLE001 - what PEFT itself cannot make has no file that could be used
        return False
    with torch.no_grad():
        for parameter in _trained(made).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    made.save_pretrained(folder, save_embedding_layers=False)
    return True


def _finetune(case: Case, site: Site, folder: Path) -> float:
    config = _config(case)
    if isinstance(config, SimpleNamespace):
        check_trainable(config)
    options = {"max_steps": 2, "batch_size": 2, "save_steps": 1, "learning_rate": 1e-2}
    site.client.finetune(ROWS, config, folder, progress=False, resume=False, overwrite=True, **options)
    return 0.0


def _generated(case: Case, site: Site, folder: Path) -> float:
    ours = adapted_model(site.client, folder)
    return _distance(ours, PeftModel.from_pretrained(site.local(), str(folder)).eval(), case, batch())


def _served(case: Case, site: Site, folder: Path) -> float:
    bell, model = Bell(), site.loaded()
    store = AdapterStore(model, folder.parent, on_ready=bell, separate_calls=True, dtype=torch.float32)
    try:
        loan = store.reserve(folder.name)
        bell.wait_for(loan)
        if loan.failure is not None:
            raise loan.failure
        got = stepped(store, model, [(loan.adapter_index, ids) for ids in batch()])
    finally:
        store.close()
    theirs = PeftModel.from_pretrained(site.local(), str(folder)).eval()
    return relative(torch.stack(got), _logits(theirs, case, batch()))


def _copy_numbers(ours: Any, theirs: Any, site: Site) -> None:
    """Gives the local model the remote model's adapter. Subtracts the start of an adapter such as PiSSA from the local
    weights, since the remote model cannot change its weights and subtracts it in each pass."""
    held = theirs.state_dict() | dict(theirs.named_buffers())  # some kinds keep factors in buffers that are not saved
    for key, value in (ours.state_dict() | dict(ours.named_buffers())).items():
        if key in held and held[key].shape == value.shape:
            held[key].copy_(value)
    for name, module in ours.named_modules():
        if isinstance(module, StartedLora):
            start = module.scaling["default"] * module.lora_start_B["default"] @ module.lora_start_A["default"]
            weight = site.plain.get_submodule(name.removeprefix("base_model.model.")).weight
            theirs.get_submodule(name).base_layer.weight.data = weight.data - start


def _trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad and each.is_floating_point()}


def _inputs(case: Case, ids: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **_EXTRA.get(case.kind, lambda _: {})(ids)}


@torch.no_grad()
def _logits(model: Any, case: Case, ids: torch.Tensor) -> torch.Tensor:
    return model(**_inputs(case, ids)).logits  # type: ignore[no-any-return]


def _distance(ours: Any, theirs: Any, case: Case, ids: torch.Tensor) -> float:
    return relative(_logits(ours, case, ids), _logits(theirs, case, ids))


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the distance of two tensors, divided by the norm of the second one."""
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def _backward(model: Any, case: Case, ids: torch.Tensor) -> float:
    loss = model(**_inputs(case, ids), labels=ids).loss
    loss.backward()
    return float(loss.detach())


def _gradient(model: Any) -> torch.Tensor:
    """Returns all gradients as one vector; a parameter without a gradient counts as zeros."""
    return torch.cat([
        (torch.zeros_like(each) if each.grad is None else each.grad).reshape(-1) for each in _trained(model).values()
    ])  # fmt: skip


def _losses(model: Any, case: Case, ids: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.AdamW(_trained(model).values(), lr=3e-3)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(_backward(model, case, ids))
        optimizer.step()
    return torch.tensor(losses)


def line_of(case: Case, found: Found, bound: float | None) -> str:
    """Returns the table's line for a case.

    Args:
        case: the case.
        found: what was found about it.
        bound: the error that the line states.
    """
    ways = [found.stock, found.finetune, found.generate, found.engine]
    reasons = list(dict.fromkeys(_plain(each) for each in ways if each is not None))
    cells = ["yes" if each is None else f"no ({reasons.index(_plain(each)) + 1})" for each in ways]
    why = " ".join(f"({number}) {reason}." for number, reason in enumerate(reasons, start=1))
    return f"| {' | '.join([case.title, *cells, '' if bound is None else f'{bound:.0e}', why])} |"


def _plain(reason: str) -> str:
    """Returns a sentence as a cell of the table."""
    return reason.replace("|", "/").rstrip(".")


def bound_of(error: float | None) -> float | None:
    """Returns the least of BOUNDS that is twice a measured error; infinity if none is, and None if nothing was
    measured."""
    return None if error is None else next((each for each in BOUNDS if 2 * error <= each), float("inf"))


def lines_of_page() -> dict[str, str]:
    """Returns the lines of the page's table by their first cell."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def bound_of_line(line: str) -> float | None:
    """Returns the error that a line states; None if it states none."""
    cell = line.split(" | ")[5].strip()
    return float(cell) if cell else None


def main() -> None:
    """Measures every case and writes the page's table."""
    with tempfile.TemporaryDirectory() as where, opened(Path(where)) as site:
        lines = []
        for case in CASES:
            found = measure(case, site)
            lines.append(line_of(case, found, bound_of(found.error)))
            print(f"{lines[-1]}   measured {found.error}", file=sys.stderr, flush=True)
    head = "| kind | stock PEFT over `load_model()` | `finetune` | `generate` | engine | error at most | why not |"
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    table = "\n".join([BEGIN, "", head, "|---|---|---|---|---|---|---|", *lines, "", END])
    PAGE.write_text(before + table + after, encoding="utf-8")


if __name__ == "__main__":
    main()
