"""Measures decode attention over long contexts: its memory, its speed, how many requests fit, and host memory's speed.

Keys and values (KV) have the shapes of SmolLM2-135M's. They are random numbers that are written directly, since
computing a prompt of 32,768 tokens would take long and change nothing. The model has the attention of SmolLM2-135M, a
small vocabulary and narrow MLPs, and its passes are computed by the serving engine's own code (`RaggedModel`). Each
measurement of memory runs in a fresh process. The time of attention alone, over all 30 layers, is the time of a pass
minus the time of the same pass over a context of one token.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenant_sdk.serving.kv import KvLayout, RequestKv

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 30, 9, 3, 64
"""The sizes of SmolLM2-135M's attention."""
DTYPES = ("fp32", "bf16", "fp8")
LENGTHS = (1024, 8192, 32768)
BAR = 1.2
"""The target: passes with 32,768 tokens in bf16 or fp8 may take at most this many times the memory that the keys and
values of these tokens take in bf16."""
STEP_TOKENS = 256
BUDGET_BYTES = 1 << 30
PIECE_ROWS = 256
"""The number of a prompt's rows that are computed together when memory is measured. It is the most that a step of the
engine has by default."""
SHORT_PIECE_ROWS = 64
"""The number of a prompt's rows that are computed together when speed is measured. It is small, so that this takes only
seconds."""
REPEATS = 5


def layout(kv_dtype: str) -> KvLayout:
    """Returns the layout of SmolLM2-135M's keys and values."""
    from tenant_sdk.serving.kv import KV_DTYPES, KvLayout

    return KvLayout((None,) * NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, KV_DTYPES[kv_dtype], STEP_TOKENS)


def _filled(kv_dtype: str, num_tokens: int, room: int) -> RequestKv:
    """Returns random keys and values of `num_tokens` tokens, with room for `room` more."""
    import torch

    from tenant_sdk.serving.kv import RequestKv

    kv = RequestKv(layout(kv_dtype), num_tokens + room, torch.device("cpu"))
    for layer in range(NUM_LAYERS):
        for start in range(0, num_tokens, STEP_TOKENS):
            numbers = torch.randn(2, NUM_KV_HEADS, min(STEP_TOKENS, num_tokens - start), HEAD_DIM)
            kv.write(layer, start, numbers[0], numbers[1])
    return kv


def small_model() -> Any:
    """Returns a model with SmolLM2-135M's attention and little else, ready for the engine's passes."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tenant_sdk.serving.ragged import RaggedModel

    config = LlamaConfig(
        vocab_size=256, hidden_size=NUM_HEADS * HEAD_DIM, intermediate_size=64, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS, num_key_value_heads=NUM_KV_HEADS, head_dim=HEAD_DIM,
        max_position_embeddings=2 * max(LENGTHS),
    )  # fmt: skip
    torch.manual_seed(0)
    return RaggedModel(AutoModelForCausalLM.from_config(config).eval().requires_grad_(False))


def _pass_over(model: Any, kv: RequestKv, position: int, num_rows: int) -> None:
    """Computes one pass over `num_rows` tokens of one request, of which the first is at `position`."""
    import torch

    from tenant_sdk.serving.attention.few_rows import RequestRows

    ids, places = torch.zeros(num_rows, dtype=torch.int64), torch.arange(position, position + num_rows)
    model.forward([RequestRows(kv, position, num_rows)], ids, places, torch.tensor([num_rows - 1]))


def _measure_memory(kv_dtype: str, num_tokens: int, num_rows: int) -> float:
    """Returns by how many MB the peak of this process's resident memory grows while keys and values are written and
    four passes are computed.

    Args:
        kv_dtype: the type in which keys and values are kept: "fp32", "bf16" or "fp8".
        num_tokens: the number of tokens after the last pass.
        num_rows: the number of rows of each of the four passes: 1 as in decoding, more as at the end of a prompt.
    """
    import torch

    model = small_model()
    with torch.no_grad():
        _pass_over(model, _filled(kv_dtype, 64, num_rows), 64, num_rows)  # what the first pass alone allocates
        before = _own_mb("VmRSS")
        _forget_peak()
        kv = _filled(kv_dtype, num_tokens - 4 * num_rows, 4 * num_rows)
        for number in range(4):
            _pass_over(model, kv, num_tokens - (4 - number) * num_rows, num_rows)
    return _own_mb("VmHWM") - before


def _forget_peak() -> None:
    """Sets the process's peak of resident memory to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _own_mb(name: str) -> float:
    """Returns a number of /proc/self/status in MB: VmRSS for the resident memory, VmHWM for its peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024 / 1e6


def in_fresh_process(kv_dtype: str, num_tokens: int, num_rows: int = 1) -> float:
    """Runs `_measure_memory` in a new process, and returns its result."""
    arguments = [kv_dtype, str(num_tokens), str(num_rows)]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.long_context", *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def bf16_mb(num_tokens: int) -> float:
    """Returns how many MB the keys and values of `num_tokens` tokens take in bf16."""
    return layout("bf16").bytes_for(num_tokens) / 1e6


def attention_s(model: Any, kv_dtype: str, num_tokens: int, num_rows: int) -> float:
    """Returns the median seconds of the attention of `num_rows` rows in all layers.

    This is the time of a pass over a context of `num_tokens` tokens, minus the time of the same pass over as short a
    context as possible.
    """
    few, many = (_filled(kv_dtype, before, num_rows) for before in (1, num_tokens - num_rows))
    repeats = REPEATS if num_rows == 1 else 1
    return _median_s(lambda: _pass_over(model, many, num_tokens - num_rows, num_rows), repeats) - _median_s(
        lambda: _pass_over(model, few, 1, num_rows), repeats
    )


def _median_s(work: Callable[[], None], repeats: int) -> float:
    """Returns the median seconds of a function, after one call that is not counted."""
    work()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def memory_gb_s() -> float:
    """Returns how fast this machine reads memory, in GB/s, by a sum over 1 GB of float32 with torch's threads."""
    import torch

    numbers = torch.ones(1 << 28)
    return numbers.nbytes / 1e9 / _median_s(lambda: float(numbers.sum()) and None, 5)


def _report_memory() -> bool:
    """Prints the memory with 8,192 and 32,768 tokens; returns whether the target `BAR` is met."""
    heads = (
        "tokens",
        "KV",
        "bytes of KV, MB",
        "peak growth in decode, MB",
        "of bf16",
        "at a prompt's end, MB",
        "of bf16",
    )
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    is_kept = True
    for num_tokens in LENGTHS[1:]:
        for kv_dtype in DTYPES:
            grown = [in_fresh_process(kv_dtype, num_tokens, num_rows) for num_rows in (1, PIECE_ROWS)]
            ratios = [each / bf16_mb(num_tokens) for each in grown]
            is_kept &= num_tokens < max(LENGTHS) or kv_dtype == "fp32" or max(ratios) <= BAR
            size = layout(kv_dtype).bytes_for(num_tokens) / 1e6
            cells = " | ".join(f"{mb:.0f} | {ratio:.2f}" for mb, ratio in zip(grown, ratios, strict=True))
            print(f"| {num_tokens} | {kv_dtype} | {size:.0f} | {cells} |", flush=True)
    return is_kept


def _report_speed() -> None:
    """Prints the speed of attention alone."""
    import torch

    heads = ("tokens", "KV", "one row, ms", "tokens/s", "KV read, GB/s", f"{SHORT_PIECE_ROWS} rows, ms")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    model = small_model()
    for num_tokens in LENGTHS:
        for kv_dtype in DTYPES:
            with torch.no_grad():
                one, many = (attention_s(model, kv_dtype, num_tokens, rows) for rows in (1, SHORT_PIECE_ROWS))
            read = layout(kv_dtype).bytes_for(num_tokens) / 1e9 / one
            cells = f"{1e3 * one:.1f} | {1 / one:.1f} | {read:.1f} | {1e3 * many:.0f}"
            print(f"| {num_tokens} | {kv_dtype} | {cells} |", flush=True)


def report_fit() -> None:
    """Prints how many requests of each length fit into 1 GiB of keys and values."""
    print(f"| KV | a token, kB | {' | '.join(f'requests of {length} tokens in 1 GiB' for length in LENGTHS)} |")
    print("|---" * (2 + len(LENGTHS)) + "|")
    for kv_dtype in DTYPES:
        fitting = (str(BUDGET_BYTES // layout(kv_dtype).bytes_for(length)) for length in LENGTHS)
        print(f"| {kv_dtype} | {layout(kv_dtype).bytes_for(1) / 1e3:.1f} | {' | '.join(fitting)} |")


def main(part: str | None = None) -> None:
    """Prints the tables.

    Args:
        part: "fit", "memory" or "speed" prints one table only; None prints all.

    Raises:
        SystemExit: the target `BAR` is not met.
    """
    import torch

    print(f"threads: {torch.get_num_threads()}; host memory is read at {memory_gb_s():.1f} GB/s\n")
    if part in (None, "fit"):
        report_fit()
    if part in (None, "speed"):
        _report_speed()
    if part in (None, "memory") and not _report_memory():
        raise SystemExit(f"32,768 tokens take more than {BAR} times their size in bf16")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(_measure_memory(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    else:
        main(*sys.argv[1:2])
