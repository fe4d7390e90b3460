"""Tests token buckets with an injected clock."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from provider.schedule.quota import Quota, SharedRoom, TenantLimits
from provider.schedule.ticket import RequestClass


def test_no_limits_by_default() -> None:
    quota = Quota(TenantLimits(), 0.0)
    assert all(quota.admit(10_000, 1 << 30, 0.0) == 0.0 for _ in range(100))


def test_rows_a_second() -> None:
    quota = Quota(TenantLimits(rows_per_s=100), 0.0)
    assert quota.admit(60, 0, 0.0) == 0.0
    assert quota.admit(60, 0, 0.0) == pytest.approx(0.2)  # 40 are left, 20 are missing
    assert quota.admit(60, 0, 0.1) == pytest.approx(0.1)
    assert quota.admit(60, 0, 0.2) == 0.0
    sent, now = 0, 0.2
    while now < 100.2:
        wait = quota.admit(7, 0, now)
        sent, now = sent + (7 if wait == 0 else 0), now + max(wait, 1e-3)
    assert sent == pytest.approx(100 * 100, rel=0.01)


def test_a_quiet_hour_saves_up_no_more_than_a_second() -> None:
    quota = Quota(TenantLimits(rows_per_s=100), 0.0)
    assert quota.admit(100, 0, 3600.0) == 0.0
    assert quota.admit(1, 0, 3600.0) == pytest.approx(0.01)


def test_a_request_larger_than_the_bucket_passes_when_it_is_full_and_is_paid_for_afterwards() -> None:
    quota = Quota(TenantLimits(bytes_per_s=1000), 0.0)
    assert quota.admit(1, 5000, 0.0) == 0.0
    assert quota.admit(1, 1, 0.0) == pytest.approx(4.001)
    assert quota.admit(1, 1, 4.01) == 0.0


def test_rows_in_flight() -> None:
    quota = Quota(TenantLimits(max_rows_in_flight=10), 0.0)
    assert quota.admit(50, 0, 0.0) == 0.0  # allowed alone, since it never would be otherwise
    assert quota.admit(1, 0, 0.0) > 0
    quota.released(50, 0)
    assert quota.admit(10, 0, 0.0) == 0.0
    assert quota.admit(1, 0, 0.0) > 0


def test_a_refused_request_takes_nothing() -> None:
    quota = Quota(TenantLimits(rows_per_s=100, bytes_per_s=100), 0.0)
    assert quota.admit(100, 50, 0.0) == 0.0
    assert quota.admit(1, 10, 0.0) > 0
    assert quota.admit(1, 50, 0.01) == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": 0},
        {"rows_per_s": -1},
        {"classes": [7]},
        {"classes": []},
        {"classes": ["decode", "other"]},
        {"unknown": 1},
    ],
)
def test_settings_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TenantLimits.model_validate(wrong)


def test_bytes_in_flight() -> None:
    quota = Quota(TenantLimits.model_validate({"max_in_flight_bytes": "1MiB"}), 0.0)
    assert quota.admit(1, 1 << 20, 0.0) == 0.0
    assert quota.admit(1, 1, 0.0) > 0
    quota.released(1, 1 << 20)
    assert quota.admit(1, 1 << 19, 0.0) == 0.0


def test_classes_by_name() -> None:
    limits = TenantLimits.model_validate({"classes": ["decode", "prefill"]})
    assert limits.classes == {RequestClass.DECODE, RequestClass.PREFILL}


def test_no_tenant_holds_more_than_is_free() -> None:
    """No tenant may hold more memory than is left free. So two tenants that take all they can end at a third of the
    memory each, and leave a third for the next tenant."""
    room = SharedRoom(900)
    first, second, third = (Quota(TenantLimits(), 0.0, room) for _ in range(3))

    def fill(quota: Quota, num_bytes: int = 10) -> int:
        taken = 0
        while quota.admit(1, num_bytes, 0.0) == 0.0:
            taken += num_bytes
        return taken

    assert fill(first) == 450
    assert fill(second) == 220
    for _ in range(45 - 30):
        first.released(1, 10)
    assert fill(second) == 80  # as the first tenant's replies are sent, both end at a third
    assert fill(third, 1) == 150
    assert fill(first) == 0
    first.released(1, 10)
    assert 0 < first.admit(1, 10, 0.0) <= 1  # this tenant already holds its share


def test_a_request_larger_than_the_room_passes_alone() -> None:
    room = SharedRoom(100)
    one, other = Quota(TenantLimits(), 0.0, room), Quota(TenantLimits(), 0.0, room)
    assert one.admit(1, 1000, 0.0) == 0.0
    assert other.admit(1, 1, 0.0) > 0
    one.released(1, 1000)
    assert other.admit(1, 1, 0.0) == 0.0


def test_what_is_refused_takes_no_room() -> None:
    room = SharedRoom(100)
    quota = Quota(TenantLimits(rows_per_s=1), 0.0, room)
    assert quota.admit(1, 10, 0.0) == 0.0
    assert all(quota.admit(1, 10, 0.0) > 0 for _ in range(100))
    quota.released(1, 10)
    assert room.take(0, 100)
