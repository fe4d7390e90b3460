"""Serves a model inside the tenant's own process, without a network and therefore without a privacy boundary."""

from __future__ import annotations

import torch

from provider.device.choice import choose
from provider.device.on_device import OnDevice
from provider.engine.replica import ReplicaLost
from provider.model.load import load, resolve
from provider.model.served_model import ServedModel
from provider.model.weights import PreparedModel, WeightsKind, serve_model
from runtime.loading import quiet_transformers
from wire.errors import ConfigurationError, RemoteFault
from wire.frame import Call
from wire.ring.seeded_rows import Rows


def serve_in_process(
    model: str,
    weights: WeightsKind = "int8",
    base_layers: str | None = None,
    num_shards: int = 1,
    device: str = "cpu",
) -> ServedModel:
    """Loads a model and serves it to this process.

    Args:
        model: name, path or hub id, as for `provider serve --model`.
        weights: `int8` or `native`, as for `--weights`.
        base_layers: patterns of the names of layers to serve, as for `--base-layers`; None serves all layers.
        num_shards: the number of processes that compute, as for `--shards`; with 1, this process computes.
        device: `cpu`, `cuda` or `cuda:N`, which computes in this process; only with one shard.

    Returns:
        The served model, to which the tenant's code can send calls at once. With several shards, `close` ends their
        processes.

    Raises:
        ConfigurationError: the model is unknown, it has no layer to serve, there are more shards than layer groups, or
            the device cannot be used.
    """
    if device != "cpu" and num_shards != 1:
        raise ConfigurationError("one process computes on a device: leave out the shards, or the device")
    with quiet_transformers():  # This restores the tenant's own log level and progress bars at its end.
        served = serve_model(load(resolve(model)), weights, base_layers)
    if device != "cpu":
        chosen = choose(device, groups=served.groups)
        return ServedModel(served) if chosen is None else ModelOnDevice(served, chosen)
    if num_shards == 1:
        return ServedModel(served)
    from provider.shards.local import ShardedModel

    return ShardedModel(served, num_shards)


class ModelOnDevice(ServedModel):
    """Computes every product on one device, in this process. It is safe under threads."""

    def __init__(self, served: PreparedModel, device: torch.device) -> None:
        """Moves the weights to the device. Raises ConfigurationError if they do not fit, or if a product is wrong."""
        super().__init__(served)
        self.fingerprints  # noqa: B018 - the property is cached before the weights leave the CPU
        self._replica = OnDevice(self.take_weights(), device)
        self._replica.waits = False
        self.device = device

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        """Computes one product; see `ServedModel.compute`. Rows on the device have their product there."""
        try:
            return self._replica.product(call, rows)
        except ReplicaLost:
            raise RemoteFault("the device was lost: start again") from None

    def close(self) -> None:
        """Frees the weights on the device."""
        super().close()
        self._replica.close()
