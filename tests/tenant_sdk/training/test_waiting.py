"""Tests how long a fine-tuning run waits for its provider, and when it gives up, with a clock of the tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tenant_sdk.plain_values import seconds
from tenant_sdk.training import waiting
from tenant_sdk.training.waiting import ProviderAwayWarning, with_waits
from wire.errors import ConfigurationError, ForkedConnection, QuotaExceeded, Unauthenticated, Unavailable, VeilbaseError

AWAY = Unavailable("the provider is gone")


class Clock:
    """Replaces the module `time`: a sleep moves the clock and takes no time."""

    def __init__(self) -> None:
        self.now_s, self.num_sleeps = 0.0, 0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        assert duration_s > 0
        self.now_s += duration_s
        self.num_sleeps += 1


class Provider:
    """Plays a run and its session: attempts fail as `failures` say, and the provider can be reached from `back_at`."""

    def __init__(self, clock: Clock, *failures: VeilbaseError, back_at: float = 0.0) -> None:
        self._clock, self.failures, self.back_at = clock, list(failures), back_at
        self.refusal: VeilbaseError = AWAY
        self.steps: list[int] = []
        self.num_attempts = self.num_tries = 0

    def attempt(self) -> str:
        self.num_attempts += 1
        if self.failures:
            raise self.failures.pop(0)
        return "done"

    def reconnect(self) -> None:
        self.num_tries += 1
        if self._clock.now_s < self.back_at:
            raise self.refusal

    def num_steps(self) -> int:
        return self.steps.pop(0) if len(self.steps) > 1 else (self.steps or [3])[0]

    def train(self, wait_s: float, check: Callable[[], None] = lambda: None) -> str:
        return with_waits(self.attempt, self, wait_s, self.num_steps, check)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(waiting, "time", made)
    monkeypatch.setattr(waiting, "gc", SimpleNamespace(collect=lambda: 0))  # half a second each, in a process of tests
    return made


@pytest.mark.parametrize("back_at", [0.0, 45.0])
def test_a_run_goes_on_when_the_provider_is_back(clock: Clock, back_at: float) -> None:
    provider = Provider(clock, AWAY, back_at=back_at)
    with pytest.warns(ProviderAwayWarning, match="up to 60 s"):
        assert provider.train(60) == "done"
    assert provider.num_attempts == 2
    assert back_at <= clock.now_s < back_at + 11  # the longest pause, and a quarter
    assert provider.num_tries < 12, "a provider that starts is not asked all the time"


def test_a_provider_that_stays_away(clock: Clock) -> None:
    provider = Provider(clock, AWAY, back_at=math.inf)
    with pytest.warns(ProviderAwayWarning), pytest.raises(Unavailable):
        provider.train(60)
    assert clock.now_s == pytest.approx(60)
    assert provider.num_attempts == 1


def test_no_wait(clock: Clock) -> None:
    provider = Provider(clock, AWAY)
    with pytest.raises(Unavailable):
        provider.train(0)
    assert (provider.num_tries, clock.now_s) == (0, 0.0)


@pytest.mark.filterwarnings("ignore::tenant_sdk.ProviderAwayWarning")
def test_a_provider_that_comes_back_in_vain_has_no_more_time(clock: Clock) -> None:
    provider = Provider(clock, *[AWAY] * 1000)
    with pytest.raises(Unavailable):
        provider.train(60)
    assert clock.now_s == pytest.approx(60)
    assert provider.num_attempts < 20


@pytest.mark.filterwarnings("ignore::tenant_sdk.ProviderAwayWarning")
def test_steps_that_are_made_again_are_no_waiting(clock: Clock) -> None:
    provider = Provider(clock, AWAY, AWAY)
    attempt = provider.attempt

    def slow() -> str:
        clock.now_s += 1000 * provider.num_attempts
        return attempt()

    provider.attempt = slow  # type: ignore[method-assign]
    assert provider.train(60) == "done"
    assert provider.num_attempts == 3


@pytest.mark.filterwarnings("ignore::tenant_sdk.ProviderAwayWarning")
def test_a_provider_that_has_no_place_yet_is_waited_for(clock: Clock) -> None:
    provider = Provider(clock, AWAY, QuotaExceeded("too many calls"), back_at=30)
    provider.refusal = QuotaExceeded("too many calls at once")
    assert provider.train(60) == "done"


@pytest.mark.filterwarnings("ignore::tenant_sdk.ProviderAwayWarning")
def test_each_step_forward_gives_the_provider_the_whole_time_again(clock: Clock) -> None:
    provider = Provider(clock, *[AWAY] * 100)
    provider.steps = [step for step in range(100) for _ in range(2)]  # asked twice a failure
    assert provider.train(2) == "done"
    assert clock.now_s > 20


@pytest.mark.parametrize("error", [Unauthenticated("revoked"), ForkedConnection("forked"), VeilbaseError("other")])
def test_other_failures_end_the_run_at_once(clock: Clock, error: VeilbaseError) -> None:
    provider = Provider(clock, error)
    with pytest.raises(type(error)):
        provider.train(60)
    assert (provider.num_attempts, clock.now_s) == (1, 0.0)


@pytest.mark.filterwarnings("ignore::tenant_sdk.ProviderAwayWarning")
def test_a_provider_that_is_back_with_another_model_ends_the_run(clock: Clock) -> None:
    provider = Provider(clock, AWAY, back_at=math.inf)
    provider.refusal = ConfigurationError("the provider serves other weights")
    with pytest.raises(ConfigurationError, match="other weights"):
        provider.train(60)
    assert (provider.num_attempts, provider.num_tries) == (1, 1)


@pytest.mark.filterwarnings("ignore::tenant_sdk.ProviderAwayWarning")
def test_a_check_ends_the_wait(clock: Clock) -> None:
    def check() -> None:
        if clock.now_s > 5:
            raise InterruptedError

    provider = Provider(clock, AWAY, back_at=math.inf)
    with pytest.raises(InterruptedError):
        provider.train(60, check)
    assert clock.now_s < 5.5


@pytest.mark.parametrize("wait_s", [-1.0, math.nan, math.inf, True, "600"])
def test_impossible_waits(wait_s: Any) -> None:
    with pytest.raises(ConfigurationError, match="provider_wait_s must be a finite number of seconds from 0"):
        seconds("provider_wait_s", wait_s)
