"""Measures the memory that a fine-tuning step's activations take at the tenant, against local transformers + PEFT.

Each variant runs in a fresh process. It trains an adapter of SmolLM2-135M in float32 on one row of tokens, each of
which has a label: by default LoRA of rank 16 on all linear layers. A short step comes first, so that memory for
gradients, AdamW's state and libraries is already allocated. The result is the peak of resident memory during the next
step, minus the resident memory before this step. malloc's thresholds are fixed in every process, because glibc would
otherwise keep a varying amount of freed pages. With `--malloc default` they are not, as in a user's own program, and
`replies`, `recompute` and `windows` set them during a step, as `finetune` does. Provider and tenant share the machine.
A run in int8 `ring` arithmetic without a mask sends rows of 32-bit numbers, as a masked run does.

With `--results FILE` the peaks are added to a file, so that a long measurement can be made in pieces; `python -m
benchmarks.activations figures FILE` makes tables and plots from it.

Times are measured in separate runs, with malloc's defaults: the variants take turns, and the ratio is the median over
the rounds.

`figures` makes tables and plots like FlexLLM's Figures 13 and 14 (arXiv:2402.18789). The first table and plot compare
adapters, with rows of one length. The second table and plot compare lengths, with LoRA.

`python -m benchmarks.activations kept` shows what autograd keeps for the backward pass, by the part of the model that
keeps it. The model is SmolLM2-135M with LoRA of rank 16 on all linear layers in float32, with a provider in this
process. One forward pass runs with the unchanged code of transformers and PEFT. Another runs with the loss in chunks
and the pruned model (tenant_sdk/training/pruning.py), which keeps fewer tensors. If several parts of the model keep the
same tensor, it counts once, for the first of these parts. Parameters do not count.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import Worker, interleaved, local_model, provider, pyplot, ratios, rss_mb, serve_worker

VARIANTS = ("local", "remote", "chunked", "pruned", "replies", "recompute", "windows")
"""The variants: `local` is transformers + PEFT, and `remote` uses a provider. The others also use a provider, and
compute the loss in chunks. In addition, `pruned` keeps fewer tensors for the backward pass. `replies` and `recompute`
compute each block of the model again in the backward pass: `replies` from the provider's replies, which it keeps on
disk, and `recompute` by requesting the products again. `windows` computes the row in windows of 256 tokens, and keeps
the replies on disk."""
TIMED = ("chunked", "pruned", "replies")
WINDOW_TOKENS = 256
METHODS = ("lora", "ia3", "prefix")
"""The adapters: LoRA of rank 16 on all linear layers; IA3 on k, v and down, as in its paper; 32 tokens of prefix
tuning. PEFT has no bottleneck adapter (an additional layer of a small width inside a block)."""
MALLOC = ("fixed", "default")
"""What malloc's thresholds are in the measured process: fixed from its start, or left to glibc."""
SHORT = 16
"""The number of tokens of the step before the measurement."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_THRESHOLD_BYTES = 1 << 16


def _fix_malloc() -> None:
    """Makes malloc return each block of 64 KiB or more to the system as soon as it is freed."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _THRESHOLD_BYTES)


def _adapter_config(method: str) -> Any:
    """Returns PEFT's config of one of METHODS."""
    from peft import IA3Config, LoraConfig, PrefixTuningConfig

    if method == "ia3":
        targets = ["k_proj", "v_proj", "down_proj"]
        return IA3Config(target_modules=targets, feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    if method == "prefix":
        return PrefixTuningConfig(num_virtual_tokens=32, task_type="CAUSAL_LM")
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


class _Stepper:
    """Takes fine-tuning steps of one variant."""

    def __init__(self, variant: str, model: Any, folder: Path, method: str = "lora") -> None:
        """Adds an adapter to the model, and turns on the variant's way to save memory."""
        import torch
        from peft import get_peft_model

        torch.manual_seed(0)
        self.model: Any = get_peft_model(model, _adapter_config(method)).train()
        self._takes_no_cache = {} if method == "prefix" else {"use_cache": False}
        self._kept = self._windows = None
        if variant not in ("local", "remote"):
            self._save_memory(variant, folder, method)
        self._optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)

    def _save_memory(self, variant: str, folder: Path, method: str) -> None:
        from tenant_sdk.training.activation_checkpointing import Checkpointing, choose
        from tenant_sdk.training.finetune import prepare_windows
        from tenant_sdk.training.loss import chunk_loss
        from tenant_sdk.training.pruning import prune

        chunk_loss(self.model, every_position=method == "prefix")
        if variant == "pruned":
            prune(self.model)
        mode = {"windows": "replies"}.get(variant, variant if variant in ("replies", "recompute") else None)
        base, budget_mb = self.model.get_base_model(), 0 if mode == "replies" else None
        self._kept: Checkpointing | None = choose(mode, base, SHORT, False, budget_mb, folder)
        self._windows = prepare_windows(self.model, WINDOW_TOKENS if variant == "windows" else None, self._kept)

    def step(self, num_tokens: int) -> float:
        """Takes one step and returns its loss."""
        import torch

        ids = torch.randint(100, 40_000, (1, num_tokens), generator=torch.Generator().manual_seed(0))
        if self._kept is not None:
            self._kept.before_step(num_tokens)
        if self._windows is not None:
            loss = self._windows.backward({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
        else:
            loss = self.model(input_ids=ids, labels=ids, **self._takes_no_cache).loss
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        return float(loss.detach())


def _client(url: str, folder: str) -> Any:
    import tenant_sdk

    tenant_sdk.tune()
    return tenant_sdk.TenantClient(url, identity=Path(folder) / "bench", mask="off", cache=folder)


def _measure_peak(stepper: _Stepper, num_tokens: int) -> dict[str, float]:
    """Takes a short step and then the step that is measured. Returns this step's `loss`, and `peak_mb`: by how many MB
    its peak of resident memory exceeds the memory before it."""
    stepper.step(SHORT)
    before = _rss_mb_now()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident
    loss = stepper.step(num_tokens)
    return {"loss": loss, "peak_mb": _status("VmHWM") - before}


def _rss_mb_now() -> float:
    """Returns the resident memory of this process in MB, after freed pages have been given back."""
    import gc
    import os

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return rss_mb(os.getpid())


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1000
    return float("nan")


def _peak_process(method: str, variant: str, tokens: str, malloc: str, url: str, folder: str) -> None:
    """Measures one variant in this process, and prints the result as JSON."""
    if malloc == "fixed":
        _fix_malloc()
    scratch, num_tokens = Path(folder) / "replies", int(tokens)
    if variant == "local":
        found = _measure_peak(_Stepper(variant, local_model(), scratch, method), num_tokens)
    else:
        with _client(url, folder) as client:
            stepper = _Stepper(variant, client.load_model(), scratch, method)
            stepper.step(SHORT)
            before = client.traffic
            calls, up, down = before.calls, before.bytes_up, before.bytes_down
            found = _measure_peak(stepper, num_tokens)
            after = client.traffic
            found |= {"calls": after.calls - calls, "up": after.bytes_up - up, "down": after.bytes_down - down}
    print(json.dumps(found))


def _time_worker(variant: str, tokens: str, url: str, folder: str) -> None:
    """Takes steps of one variant with LoRA, as a `Worker` process."""
    with _client(url, folder) as client:
        stepper = _Stepper(variant, client.load_model(), Path(folder) / "replies")
        stepper.step(SHORT)
        serve_worker(lambda: stepper.step(int(tokens)))


def peaks(
    method: str, tokens: int, variants: Sequence[str], url: str, folder: str, limit_s: float, malloc: str = "fixed"
) -> Iterator[tuple[str, dict[str, float]]]:
    """Measures variants, each in a fresh process.

    Args:
        method: one of METHODS.
        tokens: the number of tokens of the row.
        variants: names of VARIANTS.
        url, folder: the provider's URL, and the folder of the tenant's identity.
        limit_s: the seconds after which a process is ended; then there is no result.
        malloc: one of MALLOC.

    Yields:
        (the variant, its figures): `loss` and `peak_mb` of the measured step. If the variant uses a provider, there are
        also `calls`, and `up` and `down` in bytes, of the measured step and the short step before it together.
    """
    for variant in variants:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.activations", "peak", method, variant]
        try:
            done = subprocess.run(
                [*command, str(tokens), malloc, url, folder],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            continue
        yield variant, json.loads(done.stdout.splitlines()[-1])


def times(tokens: int, variants: Sequence[str], url: str, folder: str, repeats: int) -> dict[str, dict[str, float]]:
    """Returns, for each of those `variants` that are in TIMED, the median `seconds` of a step with LoRA, and `ratio`,
    the median of its time divided by that of `chunked`, if that is among them."""
    with ExitStack() as stack:
        workers = {
            one: stack.enter_context(Worker("benchmarks.activations", "time", one, str(tokens), url, folder))
            for one in TIMED
            if one in variants
        }
        seconds = interleaved({name: worker.run for name, worker in workers.items()}, repeats)
    found = {name: {"seconds": statistics.median(each)} for name, each in seconds.items()}
    for name, ratio in (ratios(seconds, "chunked") if "chunked" in seconds else {}).items():
        found[name]["ratio"] = ratio
    return found


def _add_result(file: Path, method: str, tokens: int, variant: str, found: dict[str, float]) -> None:
    """Adds a result to a JSON file; it replaces an earlier result of the same method, number of tokens and variant."""
    results = json.loads(file.read_text()) if file.exists() else {}
    results.setdefault(method, {}).setdefault(str(tokens), {})[variant] = found
    file.write_text(json.dumps(results, indent=1))


def report(method: str, tokens: int, found: dict[str, dict[str, float]]) -> None:
    """Prints the results as a table."""
    local, plain = found.get("local", {}), found.get("remote", {})
    print(
        f"| {method}, 1 × {tokens} | peak, MB | of local | loss | calls | up, MB | traffic of remote | s | × chunked |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, one in found.items():
        part = one.get("peak_mb", float("nan")) / local.get("peak_mb", float("nan"))
        both = (one.get("up", 0) + one.get("down", 0)) / (plain.get("up", 0) + plain.get("down", 0) or float("nan"))
        memory = f"{one.get('peak_mb', float('nan')):.0f} | {part:.1%} | {one.get('loss', float('nan')):.4f}"
        traffic = f"{one.get('calls', 0):.0f} | {one.get('up', 0) / 1e6:.0f} | {both:.3f}"
        times = f"{one.get('seconds', float('nan')):.1f} | {one.get('ratio', float('nan')):.2f}"
        print(f"| {name} | {memory} | {traffic} | {times} |")


def main() -> None:
    """Measures what the command line names, and prints a table for each adapter and length."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activations")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["lora"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--malloc", choices=MALLOC, default="fixed", help="default is what a user's own program has")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of timed steps (LoRA); 0 measures memory only")
    parser.add_argument("--times-only", action="store_true", help="measures no memory")
    parser.add_argument("--limit-s", type=float, default=900, help="the time after which a process is given up")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="a file to which peaks are added")
    given = parser.parse_args([] if sys.argv[0].endswith("__main__.py") else None)
    with tempfile.TemporaryDirectory() as folder, provider(Path(folder)) as (url, _):
        for method in given.methods:
            for tokens in given.tokens:
                began, found = time.monotonic(), dict[str, dict[str, float]]()
                variants = [] if given.times_only else given.variants
                for variant, one in peaks(method, tokens, variants, url, folder, given.limit_s, given.malloc):
                    found[variant] = one
                    if given.results is not None:
                        _add_result(given.results, method, tokens, variant, one)
                if given.repeats and method == "lora":
                    for variant, one in times(tokens, given.variants, url, folder, given.repeats).items():
                        found.setdefault(variant, {}).update(one)
                report(method, tokens, found)
                print(f"({time.monotonic() - began:.0f} s)", flush=True)


ROWS = {
    "local": "local transformers + PEFT", "remote": "remote, as transformers and PEFT have it",
    "chunked": "+ loss in chunks", "pruned": "+ pruned graph: `checkpointing=None`",
    "replies": "`checkpointing=\"replies\"`, all on disk", "windows": "`replies` with windows of 256 tokens",
}  # fmt: skip
"""The variants that tables and plots show, each with its label."""
TITLES = {"lora": "LoRA", "ia3": "IA3", "prefix": "prefix tuning"}

Peaks = dict[str, dict[str, float]]
"""The peaks in MB of the columns of a table: by column, then by variant."""


def columns(results: dict[str, Any], tokens: int) -> tuple[Peaks, Peaks]:
    """Returns the peaks by adapter for rows of `tokens` tokens, and the peaks with LoRA by the number of tokens."""
    by_method = {
        title: _peaks(results[method][str(tokens)])
        for method, title in TITLES.items()
        if str(tokens) in results.get(method, {})
    }
    lengths = sorted(results.get("lora", {}), key=int)
    return by_method, {f"1 × {int(length):,}": _peaks(results["lora"][length]) for length in lengths}


def _peaks(found: dict[str, dict[str, float]]) -> dict[str, float]:
    return {variant: one["peak_mb"] for variant, one in found.items()}


def table(peaks: Peaks) -> str:
    """Returns a table of peaks in MB, and of their shares of local transformers + PEFT."""
    lines = [f"| peak, MB | {' | '.join(peaks)} |", f"|---|{'---|' * len(peaks)}"]
    for variant, label in ROWS.items():
        lines.append(f"| {label} | {' | '.join(_cell(each, variant) for each in peaks.values())} |")
    return "\n".join(lines)


def _cell(found: dict[str, float], variant: str) -> str:
    if variant not in found:
        return "not measured"
    share = f" ({found[variant] / found['local']:.1%})" if variant != "local" and "local" in found else ""
    return f"{found[variant]:,.0f}{share}"


def plot(peaks: Peaks, file: Path) -> None:
    """Draws bars of peaks in GB, a group for each column, and writes the plot as an SVG file."""
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(7.2, 2.9), layout="constrained")
    width = 0.8 / len(ROWS)
    for number, (variant, label) in enumerate(ROWS.items()):
        places = [place + (number - (len(ROWS) - 1) / 2) * width for place in range(len(peaks))]
        heights = [found.get(variant, 0) / 1e3 for found in peaks.values()]
        axes.bar(places, heights, width, label=label.replace("`", ""))
    axes.set(ylabel="peak of activations, GB", yscale="log")
    axes.set_xticks(range(len(peaks)), list(peaks))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=6)
    figure.savefig(file, format="svg", metadata={"Date": None})
    plots.close(figure)


def _draw_figures(arguments: Sequence[str]) -> None:
    """Prints both tables; with `--plots` also writes both plots."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activations figures")
    parser.add_argument("results", type=Path, metavar="FILE.json")
    parser.add_argument("--tokens", type=int, default=1024, help="the length of the rows in the first table")
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    given = parser.parse_args(arguments)
    for name, peaks in zip(
        ("memory_by_adapter", "memory_by_length"), columns(json.loads(given.results.read_text()), given.tokens),
        strict=True,
    ):  # fmt: skip
        print(f"{table(peaks)}\n")
        if given.plots is not None:
            plot(peaks, given.plots / f"{name}.svg")


_PARTS = (
    (r"lora_(A|dropout)|_proj$", r"(q|k|v)_proj", "inputs and outputs of adapters on q, k, v"),
    (r"lora_(A|dropout)|_proj$", r"o_proj", "inputs and outputs of the adapter on o"),
    (r"lora_(A|dropout)|_proj$", r"(gate|up)_proj", "inputs and outputs of adapters on gate, up"),
    (r"lora_(A|dropout)|_proj$", r"down_proj", "inputs and outputs of the adapter on down"),
    (r"lora_B", r"", "the adapters' rows of rank 16"),
    (r"act_fn", r"", "SiLU"),
    (r"mlp$", r"", "SiLU(gate) × up"),
    (r"self_attn$", r"", "attention: q, k, v, its output, RoPE"),
    (r"norm$", r"", "norms"),
    (r"", r"", "loss and the rest"),
)
"""The parts of the model, each as (pattern of the last part of a module's name, pattern of the whole name, label). A
module belongs to the first part for which both patterns match."""


class Kept:
    """Counts the bytes of the distinct tensors that autograd keeps, by part of the model.

    A tensor counts for the module that is running when autograd saves the tensor.
    """

    def __init__(self, model: Any) -> None:
        """Adds hooks to all modules of a model, which record the module that is running."""
        self.num_bytes: dict[str, int] = defaultdict(int)
        self._running = [""]
        self._seen = {each.untyped_storage().data_ptr() for each in model.parameters() if each.device.type != "meta"}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name))
            module.register_forward_hook(self._ends, always_call=True)

    def _ends(self, *_: Any) -> None:
        self._running.pop()

    def hooks(self, pack: Callable[[Any], Any] | None = None, unpack: Callable[[Any], Any] | None = None) -> Any:
        """Returns saved-tensor hooks that count the tensors that autograd keeps.

        Args:
            pack: returns what is kept in place of a tensor that autograd saves; None keeps the tensor itself.
            unpack: returns the tensor again from what `pack` returned; None if nothing has to be done.
        """
        from torch.autograd.graph import saved_tensors_hooks

        def note(tensor: Any) -> Any:
            packed = tensor if pack is None else pack(tensor)
            self._count(packed)
            return packed

        return saved_tensors_hooks(note, unpack or (lambda packed: packed))

    def _count(self, packed: Any) -> None:
        if isinstance(packed, tuple):
            packed = packed[0]
        for each in getattr(packed, "inputs", ()):
            self._count(each)
        if not hasattr(packed, "untyped_storage"):
            return
        storage = packed.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.num_bytes[_label_of(self._running[-1])] += storage.nbytes()


def _label_of(name: str) -> str:
    """Returns the label of the part to which a module belongs."""
    whole = name.removesuffix(".default")
    last = whole.rpartition(".")[2]
    return next(label for inner, outer, label in _PARTS if re.search(inner, last) and re.search(outer, whole))


def _measure_kept(model: Any, ids: Any, pruned: bool) -> dict[str, int]:
    """Returns the bytes that one forward pass keeps, by part; an empty dict if the loss needs no gradient.

    Args:
        model: a PEFT model.
        ids: the token ids of one row, which are also its labels.
        pruned: whether the model is first changed so that it is pruned and computes its loss in chunks.
    """
    from tenant_sdk.training import pruning
    from tenant_sdk.training.loss import chunk_loss

    before = pruning.saved_tensors_hooks
    if pruned:
        pruning.prune(model)
        chunk_loss(model)
    kept = Kept(model)
    try:
        if pruned:
            pruning.saved_tensors_hooks = kept.hooks  # type: ignore[assignment, misc]
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        else:
            with kept.hooks():
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    finally:
        pruning.saved_tensors_hooks = before  # type: ignore[misc]
    return {label: kept.num_bytes.get(label, 0) for *_, label in _PARTS} if loss.requires_grad else {}


def show_kept(arguments: Sequence[str] = ()) -> None:
    """Shows what autograd keeps for the backward pass of a fine-tuning step, by part of the model.

    Measures both passes and prints the bytes per token of each part as a table.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    from tenant_sdk import TenantClient

    parser = argparse.ArgumentParser(prog="python -m benchmarks.activations kept")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dropout", type=float, default=0.0)
    given = parser.parse_args(arguments)
    ids = torch.randint(100, 40_000, (1, given.tokens), generator=torch.Generator().manual_seed(0))
    found = []
    with TenantClient("inproc:smollm2-135m", mask="off", progress=False) as client:
        for pruned in (False, True):
            config = LoraConfig(
                r=16, lora_alpha=32, target_modules="all-linear", lora_dropout=given.dropout, task_type="CAUSAL_LM"
            )
            found.append(_measure_kept(get_peft_model(client.load_model(), config).train(), ids, pruned))
    print("| kept for the backward pass, kB a token | transformers and PEFT | pruned |\n|---|---|---|")
    for label in found[0]:
        print(f"| {label} | {' | '.join(f'{one[label] / given.tokens / 1e3:.0f}' for one in found)} |")
    print(f"| together | {' | '.join(f'{sum(one.values()) / given.tokens / 1e3:.0f}' for one in found)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["peak"]:
        _peak_process(*sys.argv[2:])
    elif sys.argv[1:2] == ["time"]:
        _time_worker(*sys.argv[2:])
    elif sys.argv[1:2] == ["figures"]:
        _draw_figures(sys.argv[2:])
    elif sys.argv[1:2] == ["kept"]:
        show_kept(sys.argv[2:])
    else:
        main()
