"""Tests that an endpoint releases no numbers (such as log probabilities) that contain the mask's error, unless the
operator allows it. They are then rounded."""

from __future__ import annotations

import math
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from noise.params import PARAMETERS
from tenant_sdk import TenantClient
from tenant_sdk.endpoint.logprobs import TokenTexts
from tenant_sdk.endpoint.options import LogprobRecord
from tenant_sdk.endpoint.privacy import Released
from tenant_sdk.endpoint.server import Endpoint
from tenant_sdk.endpoint.settings import EndpointSettings
from tests.support.endpoints import chat, endpoint_of, raw
from tests.support.lattice import TOY_OPTIONS
from tests.support.tiny_models import open_client
from tests.support.waiting import until
from wire.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")
WANTED: list[dict[str, Any]] = [{"logprobs": True}, {"logprobs": True, "top_logprobs": 2, "stream": True}]
PLAIN = {"model": "llama", "prompt": "who?", "logprobs": 1, "max_tokens": 2, "temperature": 0}


TEXT = {"model": "llama", "input": "who?"}


def numbers(text: str) -> list[float]:
    return [float(each) for each in re.findall(r'"logprob":(-?[\d.e-]+)', text)]


def test_under_the_lattice_mask_they_are_refused(folder: Path) -> None:
    with open_client(folder, "lattice") as client, endpoint_of(client) as endpoint, raw(endpoint) as http:
        asked = [("completions", PLAIN), ("embeddings", TEXT)]
        for path, body in [("chat/completions", chat(**each)) for each in WANTED] + asked:
            answer = http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "values_not_released"
            assert "--release-values" in answer.json()["error"]["message"]
        plain = http.post("/v1/chat/completions", json=chat())
        assert plain.status_code == 200
        assert numbers(plain.text) == []
        assert "logprobs and embeddings are refused" in endpoint.explain()


def test_with_release_values_they_are_rounded_to_the_step(folder: Path) -> None:
    with open_client(folder, "lattice") as client, endpoint_of(client, release_step=0.5) as endpoint:
        assert "rounded to 0.5" in endpoint.explain()
        with raw(endpoint) as http:
            for wanted in WANTED:
                answer = http.post("/v1/chat/completions", json=chat(**wanted, max_tokens=8))
                found = numbers(answer.text)
                assert len(found) >= 8
                assert all(each % 0.5 == 0 for each in found)
                assert len(set(found)) > 1
            plain = http.post("/v1/completions", json=PLAIN).json()["choices"][0]["logprobs"]
            assert all(each % 0.5 == 0 for each in plain["token_logprobs"])
            assert all(value % 0.5 == 0 for each in plain["top_logprobs"] for value in each.values())


def test_with_release_values_embeddings_are_rounded_more_coarsely(folder: Path) -> None:
    with open_client(folder, "lattice") as client, endpoint_of(client, release_step=0.25) as endpoint:
        assert "embeddings rounded to 1 " in endpoint.explain()
        with raw(endpoint) as http:
            whole = np.array(http.post("/v1/embeddings", json=TEXT).json()["data"][0]["embedding"])
    assert np.linalg.norm(whole) == pytest.approx(1)
    steps = whole / np.abs(whole)[whole != 0].min()
    assert np.allclose(steps, steps.round(), atol=1e-3)  # before the scaling they were whole multiples of one step
    assert len(set(steps.round())) > 2
    released = Released("lattice", 16.0)
    assert not released.rounded_vector(torch.ones(4)).any()  # which the endpoint refuses with status 403


def test_a_repetition_penalty_does_not_enlarge_logprobs(folder: Path) -> None:
    """Log probabilities are those before the penalty. The penalty would multiply the mask's error too, so that rounding
    would no longer cover this error."""
    with open_client(folder, "off") as client, endpoint_of(client) as endpoint, raw(endpoint) as http:
        tops = [
            http.post("/v1/completions", json={**PLAIN, "logprobs": 5, "repetition_penalty": penalty}).json()
            for penalty in (1.0, 0.1, 10.0)
        ]
    first = [each["choices"][0]["logprobs"]["top_logprobs"][0] for each in tops]
    assert first[0] == pytest.approx(first[1], abs=1e-4)
    assert first[0] == pytest.approx(first[2], abs=1e-4)
    assert len({each["choices"][0]["text"] for each in tops}) > 1  # the penalty itself is in force


def test_logprobs_are_written_in_another_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing the log probabilities of 16 long answers takes seconds, in which the event loop would serve nobody."""
    threads = set()
    text_of = TokenTexts.__getitem__

    def noted(self: TokenTexts, token_id: int) -> str:
        threads.add(threading.current_thread().name)
        return text_of(self, token_id)

    monkeypatch.setattr(TokenTexts, "__getitem__", noted)
    with open_client(folder, "off") as client, endpoint_of(client) as endpoint, raw(endpoint) as http:
        for stream in (False, True):
            assert http.post("/v1/chat/completions", json=chat(logprobs=True, stream=stream)).status_code == 200
            plain = http.post("/v1/completions", json={**PLAIN, "stream": stream})
            assert plain.status_code == 200
            if not stream:
                found = plain.json()["choices"][0]["logprobs"]
                ends = [place + len(each) for place, each in zip(found["text_offset"], found["tokens"], strict=True)]
                assert [0, *ends[:-1]] == found["text_offset"]
    assert threads
    assert "veilbase-endpoint" not in threads


def test_the_order_of_rounded_logprobs_shows_no_error() -> None:
    plain = torch.full((1, 50), 2.0)
    for step, differ in ((0.25, False), (None, True)):
        seen = set()
        for place in (3, 30):
            logits = plain.clone()
            logits[0, place] += 0.001  # as the error of a mask might
            record = LogprobRecord(5, Released("lattice", step).rounded_logprobs)
            record(torch.zeros(1, 1, dtype=torch.long), logits)
            seen.add(str(record.steps([7])))
        assert (len(seen) > 1) is differ


@pytest.mark.parametrize("mask", ["pad", "shares"])
def test_masks_that_leave_no_error_give_them(folder: Path, mask: str) -> None:
    where = [f"inproc:{folder}"] * 2 if mask == "shares" else f"inproc:{folder}"
    verify = str(folder) if mask == "pad" else None
    given = TenantClient(where, mask=mask, verify=verify, cache=folder.with_name("cache"), progress=False)
    with given as client, endpoint_of(client) as endpoint, raw(endpoint) as http:
        found = numbers(http.post("/v1/chat/completions", json=chat(logprobs=True, top_logprobs=2)).text)
        assert any(each % 0.25 for each in found)
        vector = np.array(http.post("/v1/embeddings", json=TEXT).json()["data"][0]["embedding"])
        assert len({f"{each:.6f}" for each in vector}) > len(vector) // 2  # not a few steps
        assert "as they are" in endpoint.explain()


@pytest.mark.parametrize(
    ("mask", "is_exact"), [("lattice", False), ("gaussian-pool", False), ("pad", True), ("shares", True), ("off", True)]
)
def test_which_masks_leave_no_error(mask: str, is_exact: bool) -> None:
    assert Released(mask, None).is_exact is is_exact
    assert Released(mask, 0.5).rounded(-1.3) == (-1.3 if is_exact else -1.5)


def test_losses_of_jobs_are_rounded(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    form: Any = {"files": {"file": ("x", b'{"prompt": "a", "completion": "b"}')}, "data": {"purpose": "fine-tune"}}
    opened = open_client(folder, "lattice")
    with opened as client, endpoint_of(client, tmp_path / "adapters") as endpoint, raw(endpoint) as http:
        file_id = http.post("/v1/files", **form).json()["id"]
        body = {"model": "llama", "training_file": file_id, "hyperparameters": {"max_steps": 1000, "rank": 2}}
        path = f"/v1/fine_tuning/jobs/{http.post('/v1/fine_tuning/jobs', json=body).json()['id']}"
        until(lambda: http.get(f"{path}/checkpoints").json()["data"], "a checkpoint")
        assert http.post(f"{path}/cancel").status_code == 200
        checkpoint = http.get(f"{path}/checkpoints").json()["data"][0]["metrics"]["train_loss"]
        events = http.get(f"{path}/events?limit=1000").json()["data"]
        losses = [each["data"]["train_loss"] for each in events if each["type"] == "metrics"]
        curve = http.get(f"{path}/losses").json()
    assert min(len(losses), curve["num_steps"]) >= 5
    for loss in (checkpoint, *losses, *(loss for _, loss in curve["data"])):
        assert loss == pytest.approx(round(loss / 0.05) * 0.05, abs=1e-9)


def test_parameters_with_a_larger_error_round_more_coarsely() -> None:
    lean = PARAMETERS["lean"].sigma
    with pytest.raises(ConfigurationError, match=r"from 2\.5 to 160"):
        Released("lattice", 0.25, lean)
    assert "losses of jobs rounded to 0.5," in Released("lattice", 2.5, lean).explain()
    assert Released("lattice", None, lean).rounded_loss(2.34) == 2.5
    assert Released("lattice", None).rounded_loss(2.34) == 2.35
    assert Released("off", None).rounded_loss(2.34) == 2.34
    assert Released("off", None).rounded_loss(float("nan")) == 9999.0  # JSON has no NaN


def test_rounded_rows_round_what_is_released_more_coarsely(folder: Path) -> None:
    """What rounding to 24 bits takes from a row is part of the error that results show: 2^8 / √12 is 23 times 3.2."""
    options = {**TOY_OPTIONS, "precision": "balanced", "hints": "stream", "background": False}
    with open_client(folder, "lattice", mask_options=options) as client:
        assert client.error_sigma == pytest.approx(math.hypot(3.2, 2**8 / math.sqrt(12)))
        with pytest.raises(ConfigurationError, match=r"from 5\.\d+ to 369.*precision='exact' may allow smaller"):
            Endpoint(client, settings=EndpointSettings(port=0, release_step=0.25, unverified=True))
        released = Released("lattice", None, client.error_sigma)
        assert released.rounded_loss(2.34) == pytest.approx(2 * 0.05 * 23.116, abs=1e-3)
    with open_client(folder, "pad", verify=folder) as client:
        assert client.error_sigma == 0.0


@pytest.mark.parametrize("step", [0.0, -1.0, 0.2, 17.0, float("nan"), float("inf")])
def test_a_step_that_hides_too_little_is_refused(step: float) -> None:
    with pytest.raises(ConfigurationError, match=r"from 0\.25 to 16"):
        Released("lattice", step)
