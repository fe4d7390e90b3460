"""Measures fine-tuning and decode with tenant and provider on one device, against local models on that device.

The first comparison is of the time of a fine-tuning step and of a token of decode. The second one is of step time and
memory by the number of adapters that are trained at once: adapters on one shared base, against as many copies of the
model on one GPU. Papers on shared base models make this comparison. Each side runs in a process of its own. In the
first comparison the sides take turns. The provider is `provider serve --device`, reached over mTLS loopback, over a
Unix socket, or through a window (memory of the device that both ends share). Tenants run attention and adapters on the
device, and `trust_same_gpu` lets them make masks there.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import Worker, interleaved, provider, ratios, serve_worker
from benchmarks.decode import NEW_TOKENS, PROMPT_TOKENS, decode_of
from benchmarks.finetune_step import SHAPE, step_of

if TYPE_CHECKING:
    from benchmarks.accelerator import Setting

SIZES = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 32_000, "max_position_embeddings": 2048,
}  # fmt: skip
"""The shape of TinyLlama-1.1B with 6 of its 22 blocks, so that the time to fetch hints fits into the benchmark's
budget."""
QUICK_SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 128,
}  # fmt: skip
QUICK_SHAPE = (2, 8)
ADAPTERS = (1, 2, 4)
LOCAL = "local bf16"


def compare(setting: Setting) -> bool:
    """Prints, for each side, the time of a fine-tuning step and of a token of decode, and its ratio to `LOCAL`. Returns
    True, which says that no result was wrong: this part checks none."""
    repeats = 2 if setting.is_quick else 7
    with _site(setting) as (folder, url):
        for kind in ("step", "decode"):
            sides = {
                LOCAL: ("local", "bfloat16"), "local fp32": ("local", "float32"), "int8 ring, off": ("remote", "off"),
                "lattice, masks ready": ("remote", "lattice"), "the same by ipc": ("ipc", "lattice"),
            }  # fmt: skip
            if setting.device != "cpu":
                sides["the same through a window"] = ("window", "lattice")
            with ExitStack() as running:
                workers = {
                    name: running.enter_context(_worker(setting, folder, kind, side, detail, url))
                    for name, (side, detail) in sides.items()
                }
                seconds = interleaved(
                    {name: worker.run for name, worker in workers.items()}, repeats,
                    before={name: worker.prepare for name, worker in workers.items()},
                )  # fmt: skip
            unit = "ms a step" if kind == "step" else "ms a token"
            divisor = 1 if kind == "step" else NEW_TOKENS
            print(f"| {kind} | {unit} | ratio to {LOCAL} |\n|---|---|---|")
            for name, ratio in ratios(seconds, LOCAL).items():
                print(f"| {name} | {statistics.median(seconds[name]) * 1e3 / divisor:.2f} | {ratio:.2f} |")
            print(flush=True)
    return True


def by_adapters(setting: Setting) -> bool:
    """Prints the milliseconds of a step and the device memory by the number of adapters. Returns True, which says that
    no result was wrong: this part checks none."""
    print("| adapters | side | ms a step of all | tokens/s | GB of the device |\n|---|---|---|---|---|")
    tokens = math.prod(QUICK_SHAPE if setting.is_quick else SHAPE)
    for side, detail in (("remote", "off"), ("local", "bfloat16")):
        with ExitStack() as stack:
            before_gb = _used_gb(setting.device)
            folder, url = stack.enter_context(_site(setting)) if side == "remote" else (None, "")
            if folder is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                _save_model(setting, folder / "model")
            workers: list[Worker] = []
            for number in ADAPTERS[:2] if setting.is_quick else ADAPTERS:
                if setting.left_s < 20:
                    print(f"| {number} | {side} | not measured: the time is up | | |")
                    continue
                while len(workers) < number:
                    workers.append(stack.enter_context(_worker(setting, folder, "step", side, detail, url)))
                with ThreadPoolExecutor(number) as threads:
                    runs = {"all": lambda workers=workers, threads=threads: list(threads.map(Worker.run, workers))}
                    seconds = statistics.median(interleaved(runs, 2 if setting.is_quick else 5)["all"])
                used = _used_gb(setting.device) - before_gb
                print(f"| {number} | {side} | {seconds * 1e3:.0f} | {number * tokens / seconds:.0f} | {used:.2f} |")
    print("\nOf the device, the memory of all processes is counted, the provider's included.", flush=True)
    return True


def _used_gb(device: str) -> float:
    if device == "cpu":
        return 0.0
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 1e9


@contextmanager
def _site(setting: Setting) -> Iterator[tuple[Path, str]]:
    """Saves the model, and serves it on the device. Yields the folder of the model and of the tenant's identity, and
    the provider's URL."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _save_model(setting, folder / "model")
        options = ("--model", str(folder / "model"), "--device", setting.device, "--ipc", str(folder / "ipc"))
        if setting.device != "cpu":
            options = (*options, "--gpu-windows", "1GiB")
        with provider(folder, *options) as (url, _):
            yield folder, url


def _save_model(setting: Setting, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**(QUICK_SIZES if setting.is_quick else SIZES), tie_word_embeddings=False)  # type: ignore[arg-type]
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _worker(setting: Setting, folder: Path, kind: str, side: str, detail: str, url: str) -> Worker:
    quick = "quick" if setting.is_quick else ""
    return Worker(__name__, kind, side, detail, str(folder), setting.device, quick, url)


def work(kind: str, side: str, detail: str, folder: str, device: str, quick: str, url: str = "") -> None:
    """Runs one side, as a `Worker` process.

    Args:
        kind: `step` or `decode`.
        side: `local`; for a tenant `remote`, `ipc`, or `window`, which is ipc with rows in shared memory of the device.
        detail: the dtype of a local model, or a tenant's mask.
        folder: the folder of the model and of the tenant's identity.
        device: the device of the model.
        quick: empty for full shapes.
        url: the provider's URL.
    """
    shape, vocabulary = (QUICK_SHAPE, 128) if quick else (SHAPE, 32_000)

    def task(model: Any) -> Callable[[], Any]:
        return step_of(model, shape, vocabulary) if kind == "step" else decode_of(model, vocabulary)

    if side == "local":
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=getattr(torch, detail))
        serve_worker(task(model.to(device).requires_grad_(False).eval()))
        return
    import tenant_sdk

    tenant_sdk.tune()
    with tenant_sdk.TenantClient(
        url if side == "remote" else f"ipc:{folder}/ipc", identity=Path(folder) / "bench", mask=detail,
        arithmetic="ring", cache=folder, device=device,
        mask_options={"background": False} if detail == "lattice" else {}, trust_same_gpu=side != "ipc",
        progress=False,
    ) as client:  # fmt: skip
        prepare = None
        if detail == "lattice":
            client.fetch_hints(backward=kind == "step")
            rows = shape[0] * shape[1] if kind == "step" else PROMPT_TOKENS + NEW_TOKENS
            prepare = lambda: client.prepare(rows, backward=kind == "step")  # noqa: E731 - two lines shorter
        serve_worker(task(client.load_model()), prepare)


if __name__ == "__main__":
    work(*sys.argv[1:])
