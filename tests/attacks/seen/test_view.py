"""Tests that a recording is read as it was written, and that one that is empty, cut off or of another model gives one
clear error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from attacks.adversaries import prompt_inversion, slot_reuse
from attacks.controls import unmasked
from attacks.controls.lattice import manifest as manifest_of
from attacks.controls.lattice import no_model
from attacks.seen.adversary import StolenDifference
from attacks.seen.forward_passes import forward_passes, places, prompts
from attacks.seen.public_model import describe
from attacks.seen.view import Exchange, open_view, write_recording
from attacks.victim.models import tiny_manifest, tiny_model
from provider.operations.recording import Recorder
from wire.errors import ConfigurationError
from wire.frame import Arithmetic, Call, Direction


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides the recording of a prompt, beside the folder of its model."""
    folder = tmp_path_factory.mktemp("recorded")
    unmasked.prompt_traffic(folder)
    return folder


@pytest.fixture
def seen(recorded: Path, tmp_path: Path) -> Path:
    """Provides a copy of the recording, which a test may damage."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    return tmp_path / "seen"


def test_not_a_recording(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not a recording"):
        open_view(tmp_path)


def test_an_empty_recording(seen: Path) -> None:
    (seen / "index.jsonl").write_text("")
    with pytest.raises(ConfigurationError, match="is empty"):
        open_view(seen)


@pytest.mark.parametrize("line", ['{"seq": 1', "[]", '{"seq": 0, "tenant": "a"}'])
def test_a_line_that_cannot_be_read_is_named(seen: Path, line: str) -> None:
    index = seen / "index.jsonl"
    index.write_text(index.read_text() + line + "\n")
    with pytest.raises(ConfigurationError, match=f"line {len(index.read_text().splitlines())} "):
        open_view(seen)


def test_a_file_that_is_missing_or_elsewhere(seen: Path) -> None:
    first = json.loads((seen / "index.jsonl").read_text().splitlines()[0])
    (seen / first["file"]).unlink()
    with pytest.raises(ConfigurationError, match="cut off"):
        open_view(seen)
    for name in ("../model/config.json", "/etc/passwd", "x" * 5000):
        (seen / "index.jsonl").write_text(json.dumps(first | {"file": name}) + "\n")
        with pytest.raises(ConfigurationError, match=r"line 1 .* cannot be read"):
            open_view(seen)


@pytest.mark.parametrize("tenant", ["../../evil", "/tmp/evil", "a | b", "a\nb", "", "A" * 200])
def test_a_tenant_that_no_provider_enrols(seen: Path, tenant: str) -> None:
    first = json.loads((seen / "index.jsonl").read_text().splitlines()[0])
    (seen / "index.jsonl").write_text(json.dumps(first | {"tenant": tenant}) + "\n")
    with pytest.raises(ConfigurationError, match=r"line 1 .* cannot be read"):
        open_view(seen)


def test_a_line_nested_without_end(seen: Path) -> None:
    (seen / "index.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(ConfigurationError, match=r"line 1 .* cannot be read"):
        open_view(seen)


def test_requests_that_failed_are_apart_and_their_masks_are_looked_at(tmp_path: Path) -> None:
    """Two requests use the same mask rows, and one of them was cancelled. The cancelled one is listed apart, and the
    adversary still finds the mask's second use."""
    recorder = Recorder(tmp_path / "seen", manifest_of(32))
    mask = torch.randint(-(2**31), 2**31, (4, 32), dtype=torch.int32)
    rows = [mask + torch.randint(-9, 10, mask.shape, dtype=torch.int32) for _ in range(2)]
    call = Call(0, Direction.FORWARD, Arithmetic.RING)
    recorder.record("acme", call, rows[0], None)
    recorder.record("acme", call, rows[1], torch.zeros(4, 32, dtype=torch.int32))
    recorder.close()
    view = open_view(tmp_path / "seen").of_tenant("acme")
    assert [message.seq for message in view.messages] == [1]
    assert [message.seq for message in view.products()] == [0, 1]
    with pytest.raises(ConfigurationError, match="damaged"):
        view.unanswered[0].reply()
    (claim,) = slot_reuse.attack(view, no_model(), None)
    assert isinstance(claim, StolenDifference)
    assert torch.equal(claim.rows, (rows[0] - rows[1]).to(torch.float64))


def test_lines_that_are_missing_in_the_middle_or_at_the_end(seen: Path) -> None:
    lines = (seen / "index.jsonl").read_text().splitlines(keepends=True)
    assert not open_view(seen).is_ended
    (seen / "end.json").write_text(json.dumps({"messages": len(lines), "failed": False}))
    assert open_view(seen).is_ended
    (seen / "index.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(ConfigurationError, match="cut off or changed"):
        open_view(seen)
    (seen / "index.jsonl").write_text("".join(lines[:2] + lines[3:]))
    with pytest.raises(ConfigurationError, match="lacks lines"):
        open_view(seen)
    (seen / "index.jsonl").write_text("".join(lines))
    (seen / "end.json").write_text(json.dumps({"messages": len(lines), "failed": True}))
    assert not open_view(seen).is_ended, "the disk was full"
    (seen / "end.json").write_text("[")
    with pytest.raises(ConfigurationError, match=r"end\.json cannot be read"):
        open_view(seen)


def test_a_tensor_file_that_is_damaged(seen: Path) -> None:
    (seen / "00000000.safetensors").write_bytes(b"\0" * 10)
    with pytest.raises(ConfigurationError, match="damaged"):
        open_view(seen).messages[0].request()


@pytest.mark.parametrize(
    "wrong", [torch.zeros(5, 31), torch.zeros(4, 32), torch.zeros(5 * 32), torch.zeros(5, 32, dtype=torch.int32)]
)
def test_a_tensor_that_is_not_what_its_index_says(seen: Path, wrong: torch.Tensor) -> None:
    save_file({"request": wrong, "reply": wrong.clone()}, seen / "00000000.safetensors")
    with pytest.raises(ConfigurationError, match="does not hold what its index says"):
        open_view(seen).messages[0].request()


@pytest.mark.parametrize("change", [{"seq": 7}, {"seq": 1}, {"rows": -1}, {"seq": -1}])
def test_numbers_that_make_no_sense(seen: Path, change: dict[str, int]) -> None:
    lines = [json.loads(line) for line in (seen / "index.jsonl").read_text().splitlines()]
    lines[0] |= change
    (seen / "index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigurationError):
        open_view(seen)


def test_a_manifest_that_is_damaged(seen: Path) -> None:
    (seen / "manifest.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="damaged"):
        open_view(seen)


def test_a_layer_that_the_model_does_not_have(seen: Path) -> None:
    line = json.loads((seen / "index.jsonl").read_text().splitlines()[0]) | {"layer": 99}
    (seen / "index.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigurationError, match="does not have"):
        open_view(seen)


def test_a_recording_of_another_model(tmp_path: Path) -> None:
    manifest = tiny_manifest("gpt2", "int8", tmp_path / "model")
    with pytest.raises(ConfigurationError, match="of another model"):
        describe(tiny_model("llama"), manifest)


def test_truncated_messages_are_there_without_tensors(seen: Path) -> None:
    lines = [json.loads(line) for line in (seen / "index.jsonl").read_text().splitlines()]
    lines[3] |= {"file": None, "truncated": True}
    (seen / "index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    view = open_view(seen)
    assert view.is_truncated
    assert [message.seq for message in view.with_tensors().messages] == [0, 1, 2], "and none after it"
    with pytest.raises(ConfigurationError, match="truncated"):
        view.messages[3].request()


def test_prompts_and_their_answers_are_put_together(tmp_path: Path) -> None:
    manifest = tiny_manifest("llama", "int8", tmp_path / "model")
    widths = [group.in_features for group in manifest.groups]

    def one_pass(first: int, count: int) -> list[Exchange]:
        return [
            Exchange(
                group, torch.arange(first, first + count)[:, None].expand(count, width).float(), torch.zeros(count, 1)
            )
            for group, width in enumerate(widths)
        ]

    training = [*one_pass(50, 4), Exchange(7, torch.zeros(4, 32), torch.zeros(4, 1), "backward")]
    exchanges = [*one_pass(0, 3), *one_pass(3, 1), *training, *one_pass(10, 2), *one_pass(12, 1), *one_pass(13, 1)]
    view = write_recording(tmp_path / "seen", manifest, exchanges)
    assert [one.num_rows for one in forward_passes(view)] == [3, 1, 4, 2, 1, 1]
    assert [one.is_training for one in forward_passes(view)] == [False, False, True, False, False, False]
    first, second = prompts(view)
    for group in range(len(widths)):
        assert first.rows[group][:, 0].tolist() == [0, 1, 2, 3]
        assert second.rows[group][:, 0].tolist() == [10, 11, 12, 13]
    where = places(view)
    assert [where[message.seq] for message in view.select("product", "forward", 0) if message.seq in where] == [
        (0, 0), (0, 3), (1, 0), (1, 2), (1, 3),
    ]  # fmt: skip


def test_opened_rows_take_the_place_of_recorded_ones(tmp_path: Path) -> None:
    traffic = unmasked.prompt_traffic(tmp_path)
    first = traffic.view.messages[0]
    claims = prompt_inversion.LAYER0_LOOKUP.attack(traffic.view, traffic.public, {first.seq: first.request().double()})
    assert len(claims) == 1
