"""Finds the service of a running provider, and a tenant's session in it."""

from __future__ import annotations

from provider.net.ports import TensorPort
from provider.net.service import ProviderService
from provider.net.session import Session
from tests.support.loopback_provider import Provider
from tests.support.waiting import until


def service_of(provider: Provider) -> ProviderService:
    """Returns the service of a running provider."""
    return provider.service


def session_of(provider: Provider, tenant: str) -> Session:
    """Waits until a tenant has a session, and returns the session."""
    service = service_of(provider)
    until(lambda: any(one.tenant == tenant for one in service.sessions), f"a session of {tenant}")
    return next(one for one in service.sessions if one.tenant == tenant)


def tensors_of(provider: Provider) -> TensorPort:
    """Returns the tensor port of a running provider."""
    assert provider.server.tensors is not None
    return provider.server.tensors
