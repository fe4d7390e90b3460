"""Token buckets on an injected clock."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from provider.schedule.quota import Quota, TenantLimits
from provider.schedule.request_class import RequestClass


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


def test_a_request_larger_than_the_bucket_passes_when_it_is_full_and_is_paid_for_afterwards() -> None:
    quota = Quota(TenantLimits(bytes_per_s=1000), 0.0)
    assert quota.admit(1, 5000, 0.0) == 0.0
    assert quota.admit(1, 1, 0.0) == pytest.approx(4.001)
    assert quota.admit(1, 1, 4.01) == 0.0


def test_rows_in_flight() -> None:
    quota = Quota(TenantLimits(max_rows_in_flight=10), 0.0)
    assert quota.admit(50, 0, 0.0) == 0.0  # alone, else it never would
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
