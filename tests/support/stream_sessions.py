"""Finds a provider's service and a tenant's session in it."""

from __future__ import annotations

from provider.net.service import ProviderService
from provider.net.session import Session
from provider.net.tensor_port import TensorPort
from tests.support.loopback_provider import Provider
from tests.support.waiting import until


def service_of(provider: Provider) -> ProviderService:
    """Returns the service of a provider that runs."""
    return provider.service


def session_of(provider: Provider, tenant: str) -> Session:
    """Waits for a session of a tenant, and returns it."""
    service = service_of(provider)
    until(lambda: any(one.tenant == tenant for one in service.sessions), f"a session of {tenant}")
    return next(one for one in service.sessions if one.tenant == tenant)


def tensors_of(provider: Provider) -> TensorPort:
    """Returns the tensor port of a provider that runs."""
    assert provider.server.tensors is not None
    return provider.server.tensors
