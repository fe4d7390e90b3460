"""Measures the memory of a tenant's process by phase, for fine-tuning, `generate` and the engine, against a local run.

Every run is a fresh process with default options, on SmolLM2-135M, with a provider over mTLS loopback on the same
machine. The tenant verifies. Another thread reads the process's memory every 50 ms; the table has the peak of each
phase. "Own" memory is the process's share of anonymous pages, of shared memory (memfd and tmpfs count) and of what is
in swap: Pss_Anon + Pss_Shmem + SwapPss of Linux's smaps_rollup. "Whole" is Pss, which also has files that are mapped,
such as hints; the kernel may drop these at any time.

The phases: `import` (the package and torch), `connect` (bundle, checkpoint and secret products of the verification),
`hints` (fetched or read from the cache), `first` (the first step, token or answers), `steady` (all further ones).
Fine-tuning takes `--steps` steps of batches of 8 short texts. The local peer is transformers + PEFT in float32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import local_model, local_tokenizer, own_mb, provider, pss_mb_of

PHASES = ("import", "connect", "hints", "first", "steady")
TASKS = ("finetune", "generate", "engine-1", "engine-16")
SIDES = ("lattice", "off", "local")
BATCH_SIZE = 8
STEPS = 6
NEW_TOKENS = 32
_EVERY_S = 0.05


def _texts(count: int) -> list[str]:
    """Returns `count` texts of some 60 tokens each, of nearly the same length."""
    each = "The tide comes in twice a day, since the moon pulls at the water on both sides of the earth."
    return [f"{number}: {each} {each}" for number in range(count)]


# ---- the process that is measured ------------------------------------------------------------------------------------


def _enter(phase: str) -> None:
    """Tells the measuring process that a phase begins, and waits until it has noted that."""
    print(phase, flush=True)
    sys.stdin.readline()


def tenant(task: str, mask: str, url: str, folder: str, steps: int, pool_bytes: int | None = None) -> None:
    """Does a task as a tenant, and names each phase as it begins."""
    _enter("import")
    import tenant_sdk

    tenant_sdk.tune()
    _enter("connect")
    arithmetic = {"arithmetic": "ring"} if mask == "off" else {}
    given = {} if pool_bytes is None else {"mask_options": {"pool_bytes": pool_bytes}}
    with tenant_sdk.TenantClient(
        url, identity=Path(folder) / "bench", mask=mask, verify="smollm2-135m", cache=folder, progress=False,
        **arithmetic, **given,
    ) as client:  # fmt: skip
        client.connect()
        _enter("hints")
        client.fetch_hints(backward=task == "finetune")
        _enter("first")
        if task == "finetune":
            _finetune(client, steps)
        elif task == "generate":
            client.generate(_texts(1)[0], max_new_tokens=1)
            _enter("steady")
            client.generate(_texts(1)[0], max_new_tokens=NEW_TOKENS)
        else:
            _serve(client, int(task.rpartition("-")[2]), Path(folder) / "adapters")
    _enter("end")


def _finetune(client: Any, steps: int) -> None:
    from transformers import TrainerCallback, trainer

    class Phases(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                _enter("steady")

    trainer.DEFAULT_CALLBACKS.append(Phases)  # `finetune` takes no callbacks.
    data = [{"text": each} for each in _texts(BATCH_SIZE * steps)]
    with tempfile.TemporaryDirectory() as out:
        given: dict[str, Any] = {"batch_size": BATCH_SIZE, "max_steps": steps, "learning_rate": 1e-4}
        client.finetune(data, output_dir=Path(out) / "adapter", **given)


def _serve(client: Any, num_requests: int, adapters: Path) -> None:
    import tenant_sdk
    from tenant_sdk.serving.adapters import AdapterStore

    names = [f"a{number}" for number in range(num_requests)]

    def store(model: Any, wake: Callable[[], None]) -> AdapterStore:
        return AdapterStore(model, adapters, on_ready=wake, preload=names)

    with tenant_sdk.Engine(client, store, max_running=num_requests) as engine:
        for phase, num_new in ((None, 2), ("steady", NEW_TOKENS)):
            if phase is not None:
                _enter(phase)
            asked = [
                engine.submit(text, name, num_new, eos_token_id=[])
                for text, name in zip(_texts(num_requests), names, strict=True)
            ]
            for each in asked:
                each.result()


def local(task: str, steps: int) -> None:
    """Does a task with transformers and PEFT on a local float32 model."""
    _enter("import")
    import torch
    from peft import LoraConfig, get_peft_model

    import tenant_sdk

    tenant_sdk.tune()
    _enter("connect")
    model, tokenizer = local_model(), local_tokenizer()
    _enter("first")
    if task == "finetune":
        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        adapted: Any = get_peft_model(model, config).train()
        optimizer = torch.optim.AdamW([each for each in adapted.parameters() if each.requires_grad], lr=1e-4)
        for number in range(steps):
            batch = tokenizer(_texts(BATCH_SIZE), return_tensors="pt", padding=True)
            adapted(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                _enter("steady")
    else:
        count = int(task.rpartition("-")[2]) if "-" in task else 1
        batch = tokenizer(_texts(count), return_tensors="pt", padding=True)
        for phase, num_new in ((None, 1), ("steady", NEW_TOKENS)):
            if phase is not None:
                _enter(phase)
            with torch.no_grad():
                model.generate(**batch, max_new_tokens=num_new, do_sample=False, eos_token_id=None)
    _enter("end")


# ---- the measurement -------------------------------------------------------------------------------------------------


@dataclass
class _Peaks:
    """Holds a process's peaks in MB and the seconds of each phase, by phase.

    Attributes:
        own: anonymous and shared memory, and what of it is in swap.
        whole: PSS, with mapped files.
        seconds: how long the phase lasted.
    """

    own: dict[str, float] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, phase: str, rollup: str) -> None:
        """Notes one reading of smaps_rollup, whose sizes are in KiB."""
        self.own[phase] = max(self.own.get(phase, 0.0), own_mb(rollup))
        self.whole[phase] = max(self.whole.get(phase, 0.0), pss_mb_of(rollup))


class _Watch:
    """Reads the memory of a process until it is stopped."""

    def __init__(self, pid: int, peaks: _Peaks) -> None:
        """Starts to read; nothing is noted before the first phase."""
        self._file, self._peaks, self.phase = Path(f"/proc/{pid}/smaps_rollup"), peaks, ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self.look()

    def look(self) -> None:
        """Reads the memory once."""
        if self.phase:
            try:
                self._peaks.note(self.phase, self._file.read_text())
            except OSError:  # The process has ended.
                return

    def stop(self) -> None:
        """Ends the reading."""
        self._ended.set()
        self._thread.join()


def _measure(*arguments: str) -> _Peaks:
    """Runs one process of this module and returns its peaks.

    Raises:
        SystemExit: the process failed; the error has the end of its messages.
    """
    peaks = _Peaks()
    with tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.tenant_memory", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, text=True,
        )  # fmt: skip
        if process.stdout is None or process.stdin is None:
            raise SystemExit("a process without pipes")
        watch, began = _Watch(process.pid, peaks), time.perf_counter()
        try:
            for line in process.stdout:
                if (phase := line.strip()) not in (*PHASES, "end"):
                    continue
                if watch.phase:
                    watch.look()
                    peaks.seconds[watch.phase] = time.perf_counter() - began
                watch.phase, began = phase if phase != "end" else "", time.perf_counter()
                process.stdin.write("\n")
                process.stdin.flush()
        finally:
            watch.stop()
            process.stdin.close()
            process.wait(timeout=60)
        if process.returncode != 0:
            messages.seek(0)
            raise SystemExit(f"{' '.join(arguments)} failed:\n{messages.read()[-2000:]}")
    return peaks


def run(
    tasks: Sequence[str], sides: Sequence[str], steps: int, pool_bytes: int | None, show: Callable[[str], None]
) -> dict[tuple[str, str], _Peaks]:
    """Measures each task on each side, and shows each result as a row of the table when it is there."""
    found: dict[tuple[str, str], _Peaks] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        counts = [int(task.rpartition("-")[2]) for task in tasks if "-" in task]
        _save_adapters(folder / "adapters", max(counts, default=0))
        url, _ = stack.enter_context(provider(folder))
        show("| task | side | " + " | ".join(f"{phase}, MB" for phase in PHASES) + " | whole, MB | s |")
        show("|" + "---|" * (len(PHASES) + 4))
        for task in tasks:
            for side in sides:
                job = {"task": task, "side": side, "url": url, "folder": str(folder), "steps": steps}
                found[task, side] = peaks = _measure("run", json.dumps(job | {"pool_bytes": pool_bytes}))
                cells = [f"{peaks.own[phase]:.0f}" if phase in peaks.own else "" for phase in PHASES]
                work = sum(peaks.seconds.get(phase, 0.0) for phase in ("first", "steady"))
                show(f"| {task} | {side} | {' | '.join(cells)} | {max(peaks.whole.values()):.0f} | {work:.1f} |")
    return found


def _save_adapters(folder: Path, count: int) -> None:
    if count:
        import torch

        from benchmarks.adapters import save, smollm2_shapes

        model = smollm2_shapes()
        for number in range(count):
            save(model, folder / f"a{number}", number, torch.bfloat16)


def main() -> None:
    """Prints the table."""
    if sys.argv[1:2] == ["run"]:
        job = json.loads(sys.argv[2])
        if job["side"] == "local":
            local(job["task"], job["steps"])
        else:
            tenant(job["task"], job["side"], job["url"], job["folder"], job["steps"], job["pool_bytes"])
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tenant_memory", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of fine-tuning")
    parser.add_argument("--pool-bytes", type=int, help="the mask's pool_bytes in place of its default")
    given, _ = parser.parse_known_args()
    run(given.tasks, given.sides, given.steps, given.pool_bytes, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
