"""Tests that only the owner can read checkpoints and new adapters, under any umask and at every moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from tenant_sdk import TenantClient
from tenant_sdk.training.checkpoints import Checkpoints, save_adapter
from tests.support.files import mode, umask_of
from tests.support.training import QUICK, ROWS, lora

ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
CHECKPOINT = ADAPTER | {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}


class Broken(Exception):
    """Ends a run in the middle."""


@pytest.fixture(params=[0, 0o022], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    with umask_of(request.param):
        yield


def modes(*folders: Path) -> set[tuple[bool, int]]:
    return {(path.is_dir(), mode(path)) for folder in folders for path in (folder, *folder.rglob("*"))}


PRIVATE = {(True, 0o700), (False, 0o600)}


def test_a_run_leaves_a_private_adapter_and_parents(chat_client: TenantClient, tmp_path: Path, umask: None) -> None:
    out = tmp_path / "adapters" / "support"
    chat_client.finetune(ROWS, lora(), out, **QUICK | {"max_steps": 1})
    assert {path.name for path in out.iterdir()} >= ADAPTER
    assert modes(tmp_path / "adapters") == PRIVATE


def test_checkpoints_are_private_before_anything_is_in_them(
    chat_client: TenantClient, tmp_path: Path, umask: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Path] = []
    save = PeftModel.save_pretrained

    def watched(self: Any, folder: str | Path, **options: Any) -> None:
        folder = Path(folder)
        if folder.name.startswith("checkpoint-"):
            assert list(folder.iterdir()) == []
            assert [mode(folder), mode(folder.parent)] == [0o700, 0o700]
            if len(saved) == 1:
                raise Broken
            saved.append(folder)
        save(self, folder, **options)

    monkeypatch.setattr(PeftModel, "save_pretrained", watched)
    with pytest.raises(Broken):
        chat_client.finetune(ROWS, lora(), tmp_path / "out", **QUICK)
    (whole,) = saved
    assert {path.name for path in whole.iterdir()} >= CHECKPOINT | {"complete"}
    assert modes(tmp_path / ".out.checkpoints") == PRIVATE
    monkeypatch.undo()
    result = chat_client.finetune(ROWS, lora(), tmp_path / "out", **QUICK)
    assert result.resumed_from_step == 2


def test_folders_that_are_there_keep_their_mode(tmp_path: Path, umask: None) -> None:
    folder = tmp_path / "parent" / ".out.checkpoints"
    folder.mkdir(parents=True)
    folder.chmod(0o750)
    folder.parent.chmod(0o755)
    (folder / "run.json").write_text("{}")
    (folder / "run.json").chmod(0o644)
    Checkpoints(folder).open("a run", None)
    assert [mode(folder.parent), mode(folder), mode(folder / "run.json")] == [0o755, 0o750, 0o600]


class _Model:
    """Writes files as PEFT does, with modes that depend on the umask."""

    def save_pretrained(self, folder: Path, **_: Any) -> None:
        folder.mkdir(exist_ok=True)
        for name in ADAPTER:
            (folder / name).write_text("fresh")


def test_an_adapter_that_is_shared_stays_shared(tmp_path: Path, umask: None) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "adapter_config.json").write_text("old")
    out.chmod(0o750)
    (out / "adapter_config.json").chmod(0o640)
    save_adapter(_Model(), out)
    assert [mode(out), mode(out / "adapter_config.json")] == [0o750, 0o640]
    assert mode(out / "adapter_model.safetensors") == 0o600
    assert (out / "adapter_config.json").read_text() == "fresh"


def test_new_cache_folders_are_for_their_owner(chat_folder: Path, tmp_path: Path, umask: None) -> None:
    """New folders of the cache have mode 0700. A bundle is public, but no other user may replace it by another one."""
    cache = tmp_path / "above" / "cache"
    with TenantClient(f"inproc:{chat_folder}", mask="off", cache=cache) as client:
        client.load_model()
    assert [mode(folder) for folder in (cache.parent, cache, cache / "bundles")] == [0o700] * 3
