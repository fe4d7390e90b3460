"""Measures whole models by their sides: a provider on the device, with tenants on the CPU or on the same device, beside
local models. Each side is a process of its own that is started once and measured in every kind of work.

`python -m benchmarks.accelerator --parts models` runs this, and `--only` names some of its comparisons. The model has
the shape of Llama-2-7B with two of its 32 blocks and random weights, so that it can be made where there is no network.
"""

from __future__ import annotations

import contextlib
import cProfile
import io
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import provider
from benchmarks.finetune_step import SHAPE, step_of

if TYPE_CHECKING:
    from benchmarks.accelerator import Setting

SIZES = {
    "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 4096, "max_position_embeddings": 40_000,
}  # fmt: skip
QUICK_SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 1024,
}  # fmt: skip
PREFILL_TOKENS, PROMPT_TOKENS, NEW_TOKENS, BATCH = 512, 32, 24, 16
CONTEXTS, QUICK_CONTEXTS = (1024, 4096, 16_384), (32, 64)
CLIENTS, QUICK_CLIENTS = (1, 2, 4, 6), (1, 2)
READY_S = 150.0


def run(setting: Setting) -> dict[str, Any]:
    """Measures everything beside one provider, the most valuable first. Returns the results by comparison."""
    results: dict[str, Any] = {}
    with site(setting) as folder:
        for name, measure in (
            ("tenant on the device", _on_device), ("tenant on the CPU", _on_cpu),
            ("tokens in context", context), ("clients", clients),
        ):  # fmt: skip
            if not setting.only or name in setting.only:
                measure(setting, folder, results.setdefault(name, {}), lambda: setting.note(results))
                setting.note(results)
    return results


Note = Callable[[], None]
"""A function that writes what was measured so far."""


def _on_device(setting: Setting, folder: Path, results: dict[str, Any], note: Note) -> None:
    """Measures tenants on the provider's device: in one process with it, through a window, and by sockets."""
    here: dict[str, Any] = {"device": setting.device}
    sides: dict[str, dict[str, Any]] = {
        "local bf16 on the device": {"local": "bfloat16", **here},
        "one process, off": {"url": "inproc", "mask": "off", **here},
        "one process, lattice, masks on the device": {"url": "inproc", "mask": "lattice", "trust": True, **here},
    }
    if setting.device != "cpu":
        sides["window, lattice, masks on the device"] = {"url": "ipc", "mask": "lattice", "trust": True, **here}
    kinds = ("step", "step, made", "prefill", "decode", "decode16", "masks", "profile")
    _measure(setting, folder, sides, kinds, results, note)
    slow: dict[str, dict[str, Any]] = {
        "ipc, off": {"url": "ipc", "mask": "off", **here},
        "mTLS, lattice, masks on the device": {"url": "tls", "mask": "lattice", "trust": True, **here},
        "ipc, lattice, masks on the CPU": {"url": "ipc", "mask": "lattice", **here},
    }
    slow = {name: {**side, "few": True} for name, side in slow.items()}
    _measure(setting, folder, slow, ("step, made", "decode"), results, note)


def _on_cpu(setting: Setting, folder: Path, results: dict[str, Any], note: Note) -> None:
    """Measures tenants on the CPU beside a provider on the device, over mTLS and by ipc, without a mask and with
    `lattice`, and a local model on the CPU."""
    sides = {
        "ipc, off": {"url": "ipc", "mask": "off"},
        "ipc, lattice": {"url": "ipc", "mask": "lattice"},
        "mTLS, lattice": {"url": "tls", "mask": "lattice"},
        "mTLS, off": {"url": "tls", "mask": "off"},
        "local bf16 on the CPU": {"local": "bfloat16", "device": "cpu"},
    }
    sides = {name: {**side, "few": True} for name, side in sides.items()}
    _measure(setting, folder, sides, ("step, made", "prefill", "decode", "decode16", "masks"), results, note)


def _measure(
    setting: Setting, folder: Path, sides: Mapping[str, Mapping[str, Any]], kinds: tuple[str, ...],
    results: dict[str, Any], note: Note,
) -> None:  # fmt: skip
    """Starts all sides at once, and measures one after the other."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(sides)) as threads:
        running = {}
        for name, made in zip(
            sides, threads.map(lambda one: _started(setting, folder, one), sides.values()), strict=True
        ):
            if isinstance(made, str):
                results[name] = made
                continue
            running[name] = stack.enter_context(made)
        for name, side in running.items():
            results[name] = {"seconds to be ready": round(side.ready_s, 1)}
            for kind in kinds:
                results[name][kind] = side.ask(kind)
                note()
            side.leave()


def clients(setting: Setting, folder: Path, results: dict[str, Any], note: Note) -> None:
    """Measures steps of several fine-tuning clients at once: on one shared base, and each with a model of its own
    (Symbiosis, Figures 11 and 12)."""
    tokens = SHAPE[0] * SHAPE[1]
    numbers = QUICK_CLIENTS if setting.is_quick else CLIENTS
    shared = {"mask": "off", "device": setting.device, "url": "ipc"}
    windows = {**shared, "mask": "lattice", "trust": True}
    for label, side in (
        ("a model each, bf16", {"local": "bfloat16", "device": setting.device}),
        ("shared base, lattice through windows", windows), ("shared base, off by ipc", shared),
    ):  # fmt: skip
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(numbers[-1]) as threads:
            asked = [{**side, "name": f"bench{number}"} for number in range(numbers[-1])]
            made = list(threads.map(lambda one: _started(setting, folder, one), asked))
            running = [stack.enter_context(one) for one in made if not isinstance(one, str)]
            if len(running) < numbers[-1]:
                results[label] = next(one for one in made if isinstance(one, str))
                continue
            results[label] = {}
            for number in numbers:
                answers = list(threads.map(lambda one: one.ask("steps"), running[:number]))
                step = statistics.median(answer["s"] for answer in answers)
                results[label][str(number)] = {"s a step": step, "tokens/s of all": number * tokens / step}
                note()


def context(setting: Setting, folder: Path, results: dict[str, Any], note: Note) -> None:
    """Measures seconds a token by the tokens in context, with keys and values of random numbers: a client on the CPU
    beside a provider on the device, and models on the device with their cache there or in the CPU's memory (Symbiosis,
    Figure 19)."""
    sides: dict[str, dict[str, Any]] = {
        "client on the CPU, provider on the device, ipc, lattice": {"url": "ipc", "mask": "lattice"},
        "model and cache on the device": {"local": "bfloat16", "device": setting.device},
    }
    if setting.device != "cpu":
        sides["model on the device, cache offloaded"] = {
            "local": "bfloat16", "device": setting.device, "offload": True,
        }  # fmt: skip
    lengths = QUICK_CONTEXTS if setting.is_quick else CONTEXTS
    _measure(setting, folder, sides, tuple(f"context {length}" for length in lengths), results, note)


# ---- a side ---------------------------------------------------------------------------------------------------------


class _Side:
    """Stands for one side's process. Raises SystemExit if it ends early."""

    def __init__(self, setting: Setting, folder: Path, told: Mapping[str, Any]) -> None:
        began = time.monotonic()
        given = {"folder": str(folder), "device": "cpu", "quick": setting.is_quick, "url": "", "name": "bench0", **told}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `leave` closes it
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__, json.dumps(given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._answer("ready")
        self.ready_s = time.monotonic() - began

    def ask(self, kind: str) -> Any:
        """Lets the side do one kind of work; returns what it measured, or a text if it failed."""
        if self._process.poll() is not None or self._process.stdin is None:
            return "the side has ended"
        self._process.stdin.write(f"{kind}\n")
        self._process.stdin.flush()
        try:
            return self._answer("done")
        except SystemExit as exc:
            return str(exc)

    def leave(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _answer(self, word: str) -> Any:
        while self._process.stdout is not None:
            line = self._process.stdout.readline()
            if not line:
                break
            if line.startswith(f"{word} "):
                return json.loads(line.partition(" ")[2])
        self._log.seek(0)
        raise SystemExit(f"a side ended early: {self._log.read()[-1500:]}")

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def _started(setting: Setting, folder: Path, told: Mapping[str, Any]) -> _Side | str:
    try:
        return _Side(setting, folder, told)
    except SystemExit as exc:
        return str(exc)


@contextlib.contextmanager
def site(setting: Setting) -> Iterator[Path]:
    """Makes the model and serves it on the device, over mTLS and ipc. Yields the folder of model and identities."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = Path(os.environ.get("VEILBASE_BENCH_MODEL", folder / "model"))
        if not model.exists():
            make_model(setting, model)
        (folder / "model").exists() or (folder / "model").symlink_to(model)
        options = ("--model", str(model), "--device", setting.device, "--ipc", str(folder / "ipc"))
        if setting.device != "cpu":
            options = (*options, "--gpu-windows", "2GiB")
        began = time.monotonic()
        with provider(folder, *options, tenants=tuple(f"bench{number}" for number in range(6))) as (url, _):
            (folder / "url").write_text(url)
            print(f"the provider took {time.monotonic() - began:.1f} s to start", flush=True)
            yield folder


def make_model(setting: Setting, folder: Path) -> None:
    """Saves a model of random weights in bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = QUICK_SIZES if setting.is_quick else SIZES
    config = LlamaConfig(**sizes, tie_word_embeddings=False)  # type: ignore[arg-type]
    with torch.device(setting.device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.cpu().save_pretrained(folder)


def work(told: Mapping[str, Any]) -> None:
    """Runs one side, as the process of a `_Side`."""
    with contextlib.ExitStack() as stack:
        model, prepare, masked_numbers = _model(told, stack)
        print("ready 0", flush=True)
        for line in sys.stdin:
            kind = line.strip()
            try:
                answer = _answer(kind, told, model, prepare, masked_numbers)
            except Exception as exc:  # noqa: BLE001 - reported as this kind's result; the others go on
                answer = f"{type(exc).__name__}: {str(exc)[:300]}"
            print("done " + json.dumps(answer), flush=True)


def _model(told: Mapping[str, Any], stack: contextlib.ExitStack) -> tuple[Any, Any, int]:
    """Returns the side's model, the function that makes masks ahead, and the numbers of masks and effects that it makes
    for one row in both directions."""
    folder = Path(told["folder"])
    if "local" in told:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, told["local"]))
        return model.to(told["device"]).requires_grad_(False).eval(), None, 0
    import tenant_sdk

    tenant_sdk.tune()
    lattice = told["mask"] == "lattice"
    cache = stack.enter_context(tempfile.TemporaryDirectory())
    urls = {
        "tls": (folder / "url").read_text(), "ipc": f"ipc:{folder}/ipc",
        "inproc": f"inproc:{folder}/model?device={told['device']}",
    }  # fmt: skip
    client = stack.enter_context(
        tenant_sdk.TenantClient(
            urls[told["url"]], identity=None if told["url"] == "inproc" else folder / told["name"],
            mask=told["mask"], arithmetic="ring", cache=cache, device=told["device"],
            mask_options={"background": False, "pool_bytes": 8 << 30} if lattice else {},
            trust_same_gpu=told.get("trust", False), progress=False,
        )
    )  # fmt: skip
    if lattice:
        client.fetch_hints(backward=True)
    model = client.load_model()
    hidden, inner = model.config.hidden_size, model.config.intermediate_size
    # Inputs and outputs of q, k, v; o; gate, up; down; each in both directions, and the head's.
    one_block = 4 * hidden + 2 * hidden + (hidden + 2 * inner) + (inner + hidden)
    numbers = 2 * (model.config.num_hidden_layers * one_block + hidden + model.config.vocab_size)
    return model, client.prepare if lattice else None, numbers


def _answer(kind: str, told: Mapping[str, Any], model: Any, prepare: Any, numbers: int) -> Any:
    import torch

    device = torch.device(told["device"])
    shape = (2, 8) if told["quick"] else SHAPE
    rows, vocabulary = shape[0] * shape[1], model.config.vocab_size
    ready = (lambda count, backward: prepare(count, backward=backward)) if prepare else lambda count, backward: None

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def timed(
        run: Callable[[], Any], before: Callable[[], Any], repeats: int, warmup: int = 1 if told.get("few") else 3
    ) -> dict[str, Any]:
        seconds = []
        for repeat in range(warmup + repeats):
            before()
            finish()
            began = time.perf_counter()
            run()
            finish()
            if repeat >= warmup:
                seconds.append(time.perf_counter() - began)
        return {"s": statistics.median(seconds), "all": [round(one, 5) for one in seconds]}

    repeats = 1 if told["quick"] else 4 if told.get("few") else 9
    if kind.startswith("context "):
        return _context(int(kind.partition(" ")[2]), told, model, ready, timed)
    if kind in ("step", "step, made", "steps", "profile"):
        step = _step(model, shape, vocabulary)
        if kind == "profile":
            return _profiled(step, lambda: None)
        if kind == "steps":
            return timed(step, lambda: None, 8)
        return timed(step, (lambda: ready(rows, True)) if kind == "step" else lambda: None, repeats)
    tokens = 16 if told["quick"] else PREFILL_TOKENS
    if kind == "prefill":
        ids = torch.randint(10, vocabulary, (1, tokens)).to(device)
        with torch.no_grad():
            return timed(lambda: model(input_ids=ids, use_cache=True), lambda: ready(tokens, False), repeats)
    if kind in ("decode", "decode16"):
        count = BATCH if kind == "decode16" else 1
        ids = torch.randint(10, vocabulary, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).to(
            device
        )
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2}

        def generate(new: int) -> Callable[[], Any]:
            return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options)

        before = lambda: ready(count * (PROMPT_TOKENS + NEW_TOKENS), False)  # noqa: E731 - one line
        with torch.no_grad():
            long, short = timed(generate(NEW_TOKENS), before, 2, 1), timed(generate(1), before, 2, 1)
        return {"s a token": (long["s"] - short["s"]) / (NEW_TOKENS - 1), "whole": long, "prompt": short}
    if kind == "masks":
        if prepare is None:
            return None
        began = time.perf_counter()
        made = 0.0
        for _ in range(1 if told["quick"] else 2):
            before = time.perf_counter()
            prepare(rows, backward=True)
            finish()
            made = time.perf_counter() - before
            _step(model, shape, vocabulary)()
        return {"s": made, "rows": rows, "ns a number": made / (rows * numbers) * 1e9 if numbers else None,
                "whole s": time.perf_counter() - began}  # fmt: skip
    return f"no such kind: {kind}"


_steps: dict[int, Callable[[], Any]] = {}


def _step(model: Any, shape: tuple[int, int], vocabulary: int) -> Callable[[], Any]:
    """Returns the step of a model, with the adapter that its first step put on it."""
    if id(model) not in _steps:
        _steps[id(model)] = step_of(model, shape, vocabulary)
    return _steps[id(model)]


def _context(length: int, told: Mapping[str, Any], model: Any, ready: Any, timed: Any) -> Any:
    """Decodes one token at a time after `length` tokens whose keys and values are random."""
    import torch
    from transformers import DynamicCache

    options = {"offloading": True} if told.get("offload") else {}
    cache = DynamicCache(config=model.config, **options)
    heads, width = model.config.num_key_value_heads, model.config.hidden_size // model.config.num_attention_heads
    for layer in range(model.config.num_hidden_layers):
        pair = [torch.randn(1, heads, length, width, dtype=model.dtype, device=model.device) for _ in range(2)]
        cache.update(pair[0], pair[1], layer)
    ids, at = torch.full((1, 1), 20, device=model.device), [length]

    def token() -> None:
        place = torch.full((1, 1), at[0], device=model.device)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, position_ids=place, use_cache=True)
        at[0] += 1

    ready(32, False)
    return timed(token, lambda: None, 8, 3)


def _profiled(step: Callable[[], Any], before: Callable[[], Any]) -> str:
    """Returns where a step's time goes, by function; the backward pass runs in the same thread."""
    import torch

    before()
    with torch.autograd.set_multithreading_enabled(False):
        step()
        profile = cProfile.Profile()
        profile.enable()
        step()
        profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(25)
    return text.getvalue()


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
