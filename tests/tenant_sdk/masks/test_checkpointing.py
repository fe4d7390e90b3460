"""Tests fine-tuning in which the provider's replies are kept for the backward pass. Under every mask, it makes the same
calls and gives the same numbers as without this option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.mask_site import Site
from tests.support.training import QUICK, ROWS, lora
from wire.frame import Direction

pytestmark = [
    pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning"),
    pytest.mark.filterwarnings("ignore::noise.masks.gaussian_pool.NotPrivateWarning"),
]

ON_DISK: dict[str, Any] = {"checkpointing": "replies", "memory_budget_mb": 0}
IN_MEMORY: dict[str, Any] = {"checkpointing": "replies", "memory_budget_mb": 100}
Seen = list[tuple[int, str, str, int]]


def num_rows(rows: Any) -> int:
    return int(rows.shape[0] if isinstance(rows, torch.Tensor) else rows.num_rows)


def run(site: Site, out: Path, kinds: tuple[str, ...], options: dict[str, Any], **changes: Any) -> tuple[Any, Seen]:
    client, watched = site.inproc(*kinds, **options)
    config = changes.pop("config", None) or lora(fan_in_fan_out=kinds[0] == "gpt2")
    client.fetch_hints(backward=True)
    for one in watched:
        one.seen.clear()
    settings = {**QUICK, "max_steps": 1, **changes}
    result = client.finetune(ROWS, config, out, **settings)
    seen = [
        (call.group, call.direction.name, call.purpose.name, num_rows(rows))
        for one in watched
        for call, rows in one.seen
    ]  # fmt: skip
    return result, seen


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


MASKS: dict[str, dict[str, Any]] = {
    "off": {"mask": "off", "arithmetic": "ring"},
    "float": {"mask": "off", "arithmetic": "float"},
    "gaussian-pool": {"mask": "gaussian-pool"},
    "lattice": {"mask": "lattice", "mask_options": {"background": False}},
    "shares": {"mask": "shares"},
    "pad": {"mask": "pad"},
    "verified": {"mask": "lattice", "mask_options": {"background": False}},
}


@pytest.mark.parametrize(("name", "kept"), [*((name, ON_DISK) for name in MASKS), ("off", IN_MEMORY)])
def test_the_same_calls_and_losses(
    site: Site, folders: dict[str, Path], tmp_path: Path, name: str, kept: dict[str, Any]
) -> None:
    options = {**MASKS[name], **({"verify": folders["llama"]} if name in ("pad", "verified") else {})}
    kinds = ("llama", "llama") if name == "shares" else ("llama",)
    plain, calls = run(site, tmp_path / "plain", kinds, options, checkpointing=None)
    ours, again = run(site, tmp_path / "ours", kinds, options, **kept)
    assert sorted(again) == sorted(calls), "the calls differ"
    if len(kinds) == 1:
        assert again == calls, "their order differs"
    assert sum(way == Direction.FORWARD.name for _, way, *_ in calls) >= 9, "all groups are asked"
    is_exact = name in ("off", "float", "pad")
    assert ours.losses == pytest.approx(plain.losses, rel=1e-9 if is_exact else 1e-2)
    if is_exact:
        got, want = weights(tmp_path / "ours"), weights(tmp_path / "plain")
        assert all(torch.equal(got[key], want[key]) for key in want)


CHANGES: dict[str, dict[str, Any]] = {
    "dropout": {"adapter": {"lora_dropout": 0.3}},
    "accumulated": {"batch_size": 2, "gradient_accumulation_steps": 2},
    "upper block only": {"adapter": {"layers_to_transform": [1]}},
}
TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [
        *(("llama", name, torch.float32) for name in CHANGES), ("llama", "dropout", torch.bfloat16),
        ("gpt2", "dropout", torch.float32), ("gpt2", "upper block only", torch.float32),
    ],
)  # fmt: skip
def test_the_same_adapter_bit_for_bit(site: Site, tmp_path: Path, kind: str, name: str, dtype: torch.dtype) -> None:
    options = {"mask": "off", "arithmetic": "ring", "dtype": dtype}
    changes = dict(CHANGES[name])
    adapter = {"fan_in_fan_out": kind == "gpt2", **changes.pop("adapter", {})}
    changes["config"] = lora(target_modules=TARGETS[kind], **adapter)
    plain, calls = run(site, tmp_path / "plain", (kind,), options, checkpointing=None, max_steps=2, **changes)
    ours, again = run(site, tmp_path / "ours", (kind,), options, max_steps=2, **ON_DISK, **changes)
    assert again == calls
    assert ours.losses == plain.losses
    got, want = weights(tmp_path / "ours"), weights(tmp_path / "plain")
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert len(set(plain.losses)) == 2


def test_recompute_makes_more_calls_and_is_what_the_older_option_means(site: Site, tmp_path: Path) -> None:
    options = {"mask": "off", "arithmetic": "ring"}
    plain, calls = run(site, tmp_path / "plain", ("llama",), options, checkpointing=None)
    named, more = run(site, tmp_path / "named", ("llama",), options, checkpointing="recompute")
    older, as_many = run(site, tmp_path / "older", ("llama",), options, gradient_checkpointing=True)
    assert len(more) > 1.3 * len(calls)
    assert as_many == more
    assert named.losses == older.losses == pytest.approx(plain.losses, rel=1e-6)
