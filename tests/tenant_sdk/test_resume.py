"""Tests runs that are interrupted: by a lost provider, a full disk, and checkpoints that are incomplete or of another
run."""

from __future__ import annotations

import builtins
import copy
import datetime
import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from transformers.utils import chat_template_utils

from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient
from tenant_sdk.testing import CHAT_TEMPLATE
from tenant_sdk.training import waiting
from tenant_sdk.training.checkpoints import checkpoints_folder
from tenant_sdk.training.waiting import ProviderAwayWarning
from tests.support.providers import WrappedModel, serving
from tests.support.spies import before_requests
from tests.support.tiny_models import make_chat_model
from tests.support.training import QUICK, ROWS, lora
from tests.support.waiting import SLOW_TIMEOUT_S, WAIT_S, until
from wire.errors import ConfigurationError, Unavailable, VeilbaseError

CALLS_A_STEP = 16
"""The number of calls in a step: 9 groups forward, and most of them backward."""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "adapter_model.safetensors"))


def assert_same_adapter(got: Path, want: Path) -> None:
    ours, theirs = weights(got), weights(want)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-5, atol=1e-6), name


def run(client: TenantClient, out: Path, **changes: Any) -> Any:
    return client.finetune(ROWS, lora(), out, overwrite=True, **QUICK | changes)


@pytest.fixture(scope="module")
def whole(chat_client: TenantClient, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Provides the result of a run that is not interrupted."""
    return run(chat_client, tmp_path_factory.mktemp("whole") / "out")


class Breaking:
    """Makes calls fail from call `at` on, as calls to a lost provider do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: float = float("inf")
        self.count = 0
        before_requests(monkeypatch, self._note)

    def _note(self, *_: object) -> None:
        self.count += 1
        if self.count >= self.at:
            raise Unavailable("the provider is gone")

    def heal(self) -> None:
        self.at = float("inf")


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Breaking:
    return Breaking(monkeypatch)


def calls_a_step(client: TenantClient, breaking: Breaking, folder: Path) -> int:
    """Runs one fine-tuning step, returns the number of calls that it makes to the provider, and sets the count of
    `breaking` back to zero."""
    breaking.count, breaking.at = 0, float("inf")
    run(client, folder / "count", max_steps=1)
    num_calls, breaking.count = breaking.count, 0
    return num_calls


def break_in_step(client: TenantClient, breaking: Breaking, out: Path, step: int, **changes: Any) -> None:
    """Ends a run in the middle of the given step; steps are counted from 1."""
    breaking.at = (step - 0.5) * calls_a_step(client, breaking, out.parent)
    with pytest.raises(Unavailable):
        run(client, out, **changes)
    breaking.heal()


def checkpoints(out: Path) -> list[str]:
    return sorted(path.parent.name for path in checkpoints_folder(out).glob("*/complete"))


@pytest.mark.parametrize(("step", "saved"), [(2, 0), (6, 4)])
def test_goes_on_from_the_last_checkpoint(
    chat_client: Any, breaking: Breaking, whole: Any, tmp_path: Path, step: int, saved: int
) -> None:
    out = tmp_path / "out"
    break_in_step(chat_client, breaking, out, step)
    assert not out.exists()
    assert checkpoints(out) == [f"checkpoint-{number}" for number in range(2, saved + 1, 2)]
    result = run(chat_client, out)
    assert result.resumed_from_step == saved
    assert result.losses == pytest.approx(whole.losses, rel=1e-5)
    assert result.tokens == pytest.approx(whole.tokens * (6 - saved) / 6, rel=0.3)
    assert_same_adapter(out, whole.adapter_dir)
    assert not out.with_name(".out.checkpoints").exists()


@pytest.mark.parametrize("options", [{}, {"eval_data": ROWS[:2], "eval_steps": 1, "early_stopping_steps": 3}], ids=str)
def test_a_run_that_had_only_its_adapter_to_write_asks_for_nothing_more(
    chat_client: Any, breaking: Breaking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Steps end within an epoch, where Trainer itself would make one more, at a learning rate of 0. The second run
    ends early: no loss falls by as much as its threshold."""
    from tenant_sdk.training import finetune

    changes = {"batch_size": 3, "max_steps": 5, "save_steps": 1, **options}
    changes |= {"early_stopping_threshold": 100.0, "max_steps": 20} if options else {}
    want = run(chat_client, tmp_path / "want", **changes)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(finetune, "save_adapter", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space")))
        with pytest.raises(VeilbaseError, match="could not be written"):
            run(chat_client, out, **changes)
    breaking.count = 0
    result = run(chat_client, out, **changes)
    assert breaking.count == 0
    assert result.resumed_from_step == result.adapter_step == len(want.losses) < 20
    assert (result.losses, result.evaluations) == (want.losses, want.evaluations)
    assert_same_adapter(out, want.adapter_dir)


@pytest.mark.slow
def test_goes_on_in_the_middle_of_an_epoch_with_accumulation(
    chat_client: Any, breaking: Breaking, tmp_path: Path
) -> None:
    changes = {"batch_size": 1, "gradient_accumulation_steps": 3, "max_steps": 5, "save_steps": 1}
    want = run(chat_client, tmp_path / "want", **changes)
    breaking.count, out = 0, tmp_path / "out"
    run(chat_client, tmp_path / "count", **changes | {"max_steps": 1})
    breaking.at, breaking.count = 3.5 * breaking.count, 0
    with pytest.raises(Unavailable):
        run(chat_client, out, **changes)
    breaking.heal()
    result = run(chat_client, out, **changes)
    assert result.resumed_from_step in (2, 3)
    assert result.losses == pytest.approx(want.losses, rel=1e-5)
    assert_same_adapter(out, want.adapter_dir)


@pytest.mark.slow
def test_breaks_twice(chat_client: Any, breaking: Breaking, whole: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    break_in_step(chat_client, breaking, out, 3)
    break_in_step(chat_client, breaking, out, 3)  # the third from the checkpoint: step 5
    assert checkpoints(out) == ["checkpoint-2", "checkpoint-4"]
    result = run(chat_client, out)
    assert result.resumed_from_step == 4
    assert result.losses == pytest.approx(whole.losses, rel=1e-5)
    assert_same_adapter(out, whole.adapter_dir)


def test_goes_on_with_the_config_object_of_the_broken_run(
    chat_client: Any, breaking: Breaking, whole: Any, tmp_path: Path
) -> None:
    """PEFT writes into the config that it gets, and the user's own object must stay unchanged."""
    shared, out = lora(), tmp_path / "out"
    before = copy.deepcopy(shared)
    breaking.at = calls_a_step(chat_client, breaking, tmp_path) * 2.5
    with pytest.raises(Unavailable):
        chat_client.finetune(ROWS, shared, out, **QUICK)
    breaking.heal()
    assert shared == before
    assert checkpoints(out) == ["checkpoint-2"]
    result = chat_client.finetune(ROWS, shared, out, **QUICK)
    assert shared == before
    assert result.resumed_from_step == 2
    assert_same_adapter(out, whole.adapter_dir)


def test_a_broken_run_leaves_no_progress_bar_behind(chat_client: Any, breaking: Breaking, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    break_in_step(chat_client, breaking, tmp_path / "out", 3, progress=True)
    # the bar's thread is told to end, and not waited for
    until(lambda: set(threading.enumerate()) == before, "the end of the bar's thread")


class GoesAway(WrappedModel):
    """Plays a provider that stops in the middle of one call."""

    def __init__(self, served_model: ServedModel) -> None:
        super().__init__(served_model)
        self._count = 0
        self.at = 10**9
        self.stop: Callable[[], None] = lambda: None
        self.stopper: threading.Thread | None = None
        self.client_knows = threading.Event()

    def compute(self, *arguments: Any) -> torch.Tensor:
        self._count += 1
        if self._count == self.at:
            self.stopper = threading.Thread(target=self.stop)
            self.stopper.start()
            assert self.client_knows.wait(WAIT_S)
        return self.served_model.compute(*arguments)


def test_a_grpc_provider_that_stops_and_comes_back(chat_served_model: ServedModel, whole: Any, tmp_path: Path) -> None:
    state, out = StateDir(tmp_path / "state"), tmp_path / "out"
    leaving = GoesAway(chat_served_model)
    with serving(leaving, state=state) as server:
        url = f"grpcs://127.0.0.1:{server.port}"
        enroll(state, "acme", tmp_path / "acme", url)
        leaving.stop, leaving.at = server.stop, 3 * CALLS_A_STEP
        with TenantClient(url, identity=tmp_path / "acme", mask="off", arithmetic="float") as client:
            with pytest.raises(Unavailable) as failure:
                run(client, out)
            leaving.client_knows.set()
            assert leaving.stopper is not None
            leaving.stopper.join(WAIT_S)
            assert "\n" not in str(failure.value)
            with pytest.raises(Unavailable):  # still gone: an error, and the checkpoint is kept
                run(client, out)
            with serving(chat_served_model, server.port, state):
                result = run(client, out)
    assert result.resumed_from_step == 2
    assert result.losses == pytest.approx(whole.losses, rel=1e-5)
    assert_same_adapter(out, whole.adapter_dir)


def test_a_run_waits_for_a_provider_that_is_started_again(
    chat_served_model: ServedModel, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, leaving = StateDir(tmp_path / "state"), GoesAway(chat_served_model)
    waits, is_over = threading.Event(), threading.Event()

    def note_warning(text: str, kind: type[Warning]) -> None:
        assert kind is ProviderAwayWarning
        assert "goes on from its last checkpoint" in text
        leaving.client_knows.set()
        waits.set()

    def serve_again(port: int) -> None:
        assert waits.wait(WAIT_S)
        assert leaving.stopper is not None
        leaving.stopper.join(WAIT_S)
        with serving(chat_served_model, port, state):
            is_over.wait(WAIT_S)

    monkeypatch.setattr(waiting, "warn_and_go_on", note_warning)
    with serving(leaving, state=state) as server:
        url = f"grpcs://127.0.0.1:{server.port}"
        enroll(state, "acme", tmp_path / "acme", url)
        leaving.stop, leaving.at = server.stop, 3 * CALLS_A_STEP
        second = threading.Thread(target=serve_again, args=(server.port,))
        second.start()
        try:
            with TenantClient(url, identity=tmp_path / "acme", mask="off", arithmetic="float") as client:
                result = run(client, tmp_path / "out", provider_wait_s=WAIT_S)
        finally:
            waits.set()
            is_over.set()
            second.join(WAIT_S)
    assert (result.num_waits, result.resumed_from_step) == (1, 0)
    assert result.losses == pytest.approx(whole.losses, rel=1e-5)
    assert result.tokens > whole.tokens  # the third step was made again
    assert_same_adapter(tmp_path / "out", whole.adapter_dir)


# ---- which checkpoint -----------------------------------------------------------------------------------------------


def test_a_checkpoint_without_its_marker_is_ignored(
    chat_client: Any, breaking: Breaking, whole: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    break_in_step(chat_client, breaking, out, 6)
    newest = tmp_path / ".out.checkpoints" / "checkpoint-4"
    (newest / "complete").unlink()
    (newest / "adapter_model.safetensors").write_bytes(b"cut short")
    result = run(chat_client, out)
    assert result.resumed_from_step == 2
    assert result.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.parametrize("changed", [{"learning_rate": 1e-2}, "data", "adapter"], ids=str)
def test_another_run_does_not_take_the_checkpoint(
    chat_client: Any, breaking: Breaking, tmp_path: Path, changed: Any
) -> None:
    out = tmp_path / "out"
    break_in_step(chat_client, breaking, out, 4)
    rows = ROWS[:-1] if changed == "data" else ROWS
    config = lora(r=8) if changed == "adapter" else lora()
    settings = QUICK | (changed if isinstance(changed, dict) else {})
    with pytest.raises(ConfigurationError, match="other data or settings"):
        chat_client.finetune(rows, config, out, **settings)
    assert checkpoints(out) == ["checkpoint-2"]


def test_resume_demanded_or_refused(chat_client: Any, breaking: Breaking, whole: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigurationError, match="no complete checkpoint"):
        run(chat_client, out, resume=True)
    break_in_step(chat_client, breaking, out, 4)
    assert run(chat_client, out, resume=False).resumed_from_step == 0
    break_in_step(chat_client, breaking, out, 4)
    result = run(chat_client, out, resume=True)
    assert result.resumed_from_step == 2
    assert result.losses == pytest.approx(whole.losses, rel=1e-5)


class Later(datetime.datetime):
    """Tells the time of tomorrow."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.datetime.now(tz) + datetime.timedelta(days=1)


def test_a_template_that_prints_the_time_is_no_other_run(
    breaking: Breaking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run is a day later."""
    folder = make_chat_model(tmp_path / "model", template="{{ strftime_now('%d %b %y') }}" + CHAT_TEMPLATE)
    out = tmp_path / "out"
    with TenantClient(f"inproc:{folder}", weights="native", mask="off", arithmetic="float") as client:
        break_in_step(client, breaking, out, 4)
        monkeypatch.setattr(chat_template_utils, "datetime", Later)
        client.text.tokenizer.__dict__.pop("_rendered_patterns", None)
        assert run(client, out).resumed_from_step == 2
        break_in_step(client, breaking, out, 4)
        client.text.tokenizer.chat_template = CHAT_TEMPLATE
        with pytest.raises(ConfigurationError, match="other data or settings"):
            run(client, out)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["run.json", "trainer_state.json", "optimizer.pt"])
def test_a_damaged_checkpoint_is_one_error(chat_client: Any, breaking: Breaking, tmp_path: Path, damage: str) -> None:
    out = tmp_path / "out"
    break_in_step(chat_client, breaking, out, 4)
    folder = tmp_path / ".out.checkpoints"
    path = folder / damage if damage == "run.json" else folder / "checkpoint-2" / damage
    path.write_bytes(b"\x00garbage")
    with pytest.raises(ConfigurationError, match="resume=False") as failure:
        run(chat_client, out)
    assert "\n" not in str(failure.value)


# ---- full disk ------------------------------------------------------------------------------------------------------


class FullDisk:
    """Refuses writes to matching paths, after a first piece of each was written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full: Callable[[str], bool] = lambda path: False
        save, open_, torch_save = safetensors.torch.save_file, builtins.open, torch.save

        def save_file(tensors: Any, filename: Any, *arguments: Any, **options: Any) -> None:
            if self.full(str(filename)):
                Path(filename).write_bytes(b"half")
                raise safetensors.SafetensorError(
                    "Error while serializing: I/O error: No space left on device (os error 28)"
                )
            save(tensors, filename, *arguments, **options)

        def open_file(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if "w" in mode and isinstance(file, str | os.PathLike) and self.full(str(file)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
            return open_(file, mode, *arguments, **options)

        def save_torch(value: Any, file: Any, *arguments: Any, **options: Any) -> None:
            if self.full(str(file)):
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
            torch_save(value, file, *arguments, **options)

        monkeypatch.setattr(safetensors.torch, "save_file", save_file)
        monkeypatch.setattr("peft.peft_model.safe_save_file", save_file)
        monkeypatch.setattr(builtins, "open", open_file)
        monkeypatch.setattr(torch, "save", save_torch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        "checkpoint-4/adapter_model.safetensors", "checkpoint-4/optimizer.pt",
        "checkpoint-4/trainer_state.json", "new/adapter_model.safetensors",
    ],
)  # fmt: skip
def test_full_disk(chat_client: Any, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    out = tmp_path / "out"
    run(chat_client, out, seed=5)  # an older adapter, which stays until there is a new one
    older = {path.name: path.read_bytes() for path in out.iterdir()}
    hits: list[str] = []
    with monkeypatch.context() as patch:
        disk = FullDisk(patch)
        disk.full = lambda path: path.endswith(where) and not hits.append(path)  # type: ignore[func-returns-value]
        with pytest.raises(VeilbaseError, match="could not be written") as failure:
            run(chat_client, out)
    assert hits, "the file was never written"
    assert "no space" in str(failure.value).lower()
    assert "\n" not in str(failure.value)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == older
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [".out.checkpoints"]
    result = run(chat_client, out)
    assert result.resumed_from_step == (2 if where.startswith("checkpoint-4") else 6)
    assert result.losses == pytest.approx(whole.losses, rel=1e-5)
    assert_same_adapter(out, whole.adapter_dir)


LIMITED = """
import json, resource, signal, sys
from pathlib import Path
from tenant_sdk import TenantClient
from tenant_sdk.training import waiting
from tenant_sdk.training.checkpoints import checkpoints_folder
from tenant_sdk.training.waiting import ProviderAwayWarning
from tests.support.training import QUICK, ROWS, lora
from wire.errors import VeilbaseError
import torch
torch.set_num_threads(1)

folder, out = sys.argv[1:]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
outcome = []
with TenantClient(f"inproc:{folder}", weights="native", mask="off", arithmetic="float") as client:
    client.load_model()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        client.finetune(ROWS, lora(), out, **QUICK)
    except VeilbaseError as exc:
        outcome.append([type(exc).__name__, str(exc)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    outcome.append(client.finetune(ROWS, lora(), out, **QUICK).losses)
print(json.dumps(outcome))
"""


@pytest.mark.slow
def test_files_that_really_cannot_grow(chat_folder: Path, whole: Any, tmp_path: Path) -> None:
    """Every write past 4 KiB fails in the kernel, so that safetensors and torch report it as on a full disk."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, chat_folder, tmp_path / "out"],
        capture_output=True, text=True, timeout=SLOW_TIMEOUT_S / 2, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (kind, text), losses = json.loads(done.stdout)
    assert kind == "VeilbaseError"
    assert "could not be written" in text
    assert losses == pytest.approx(whole.losses, rel=1e-5)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
