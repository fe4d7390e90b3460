"""This module maps the model names in requests to the base model and to adapters, those of one folder and those of a
catalogue.

Guarantees: a name in a request leads to the base model, to a subfolder of the adapters' folder, to an entry of the
operator's catalogue, or to nothing. A name is never used as a path or an address. `/v1/load_lora_adapter` takes only a
direct subfolder of that folder, which is opened without following links (serving/adapters/reader.py), or the name of an
entry of the catalogue, whose files are checked against their digest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.command_line import instead
from tenant_sdk.adapter_checks import NAME
from tenant_sdk.endpoint.errors import HttpError, bad_request
from tenant_sdk.serving.adapters.store import AdapterStore, Tier

_MOST_NAMES = 10_000
MOST_COMPARED = 256
"""The most names among which the nearest to an unknown one is looked for."""
_LOAD_S = 60.0
_POLL_S = 0.01


class ModelNames:
    """Maps the field `model` of a request to the name of an adapter."""

    def __init__(
        self, base: str, store: AdapterStore | None, root: Path | None, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        """Keeps the arguments.

        Args:
            base: the name of the base model.
            store: the store of adapters; None serves only the base model.
            root: the folder of adapters.
            clock: a function that returns the present time in seconds; it serves to limit how long `load` waits.
        """
        self.base = base
        self.store, self._root, self._clock = store, root, clock
        self._created = int(time.time())
        self._lock = threading.Lock()
        self._alias: dict[str, str] = {}
        self._unloaded: set[str] = set()

    def adapter_of(self, model: str) -> str | None:
        """Returns the name of the adapter that a model's name stands for; None for the base model.

        Raises:
            HttpError: there is no such model.
        """
        if model == self.base:
            return None
        target = self._target(model)
        if target is None:
            raise self._unknown(model)
        return target

    def _unknown(self, model: str) -> HttpError:
        """Returns the error for a name that stands for nothing; it names the nearest one, unless there are so many that
        the search would take long. The folder is looked through no further than that."""
        found = [] if self.store is None else self.store.names(MOST_COMPARED)
        with self._lock:
            known = [self.base, *sorted({*found, *self._alias} - self._unloaded - {self.base})]
        advice = "see /v1/models" if len(known) > MOST_COMPARED else instead(model[:140], known, "/v1/models")
        return HttpError(404, f"there is no model {ascii(model)[:140]} here: {advice}", "model_not_found", "model")

    def _found(self) -> list[str]:
        return [] if self.store is None else self.store.names()

    def _has(self, name: str) -> bool:
        return self.store is not None and self.store.has(name)

    def _target(self, name: str) -> str | None:
        """Returns the subfolder for which a name stands; None if no request may use the name. A subfolder's own name
        always stands for this subfolder, even if `load` gave the name to another one before this subfolder existed.

        Every request comes here, so that only the subfolder of this name is looked for: a folder may have 10,000."""
        is_there = self._has(name)
        with self._lock:
            if not is_there:
                self._unloaded.discard(name)  # what is stored under that name later, as by a job, is another adapter
                return self._alias.get(name)
            return None if name in self._unloaded or name == self.base else name

    def _names(self) -> dict[str, str]:
        """Returns the names that requests may use, in order, each with the subfolder for which it stands."""
        found = set(self._found())
        with self._lock:
            self._unloaded &= found  # as in `_target`
            names = sorted(({*found, *self._alias} - self._unloaded) - {self.base})
            return {name: name if name in found else self._alias[name] for name in names}

    def tiers(self) -> list[tuple[str, Tier]] | None:
        """Returns the name of each adapter that requests may use, and its tier; None without adapters."""
        if self.store is None:
            return None
        tiers = self.store.tiers()
        return [(name, tiers.get(target, "disk")) for name, target in self._names().items()]

    def load_counts(self) -> dict[str, float]:
        """Returns how often adapters were copied onto the device and read from disk, for the metrics; an empty
        dictionary without adapters."""
        if self.store is None:
            return {}
        status = self.store.status()
        return {"adapter_device_loads": status.device_loads, "adapter_disk_reads": status.disk_reads}

    def listed(self) -> dict[str, Any]:
        """Returns the response to a request for /v1/models."""
        adapters = [self._entry(name, self.base) for name in self._names()]
        return {"object": "list", "data": [self._entry(self.base, None), *adapters]}

    def entry(self, model: str) -> dict[str, Any]:
        """Returns the response to a request for /v1/models/NAME.

        Raises:
            HttpError: there is no such model.
        """
        self.adapter_of(model)
        return self._entry(model, None if model == self.base else self.base)

    def _entry(self, name: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name, "object": "model", "created": self._created, "owned_by": "veilbase", "root": name,
            "parent": parent,
        }  # fmt: skip

    def load(self, name: str, path: str | None) -> None:
        """Gives an adapter of the folder a name for requests, and loads it, so that its first request is fast. If it is
        not loaded after 60 seconds, it gets the name all the same and is loaded when it is used.

        Args:
            name: the name for requests.
            path: the adapter's subfolder, as its name or as the absolute path; None means the subfolder `name`.

        Raises:
            HttpError: there is no folder of adapters, the name is taken or not allowed, too many names are in use, or
                the path is not a direct subfolder.
            VeilbaseError: there is no such adapter, or it cannot be loaded.
        """
        if self.store is None:
            raise bad_request("this server was started without --adapters")
        if NAME.fullmatch(name) is None or name == self.base:
            raise bad_request("expected a name of letters, digits, dots, dashes and underscores", "lora_name")
        subfolder = self._subfolder(name if path is None else path)
        self._check_free(name, subfolder)
        self._warm(self.store, subfolder)
        is_there = self._has(name)
        with self._lock:
            self._check_free_now(name, subfolder, is_there)  # another request may have taken the name meanwhile
            self._unloaded.discard(name)
            if name != subfolder:
                self._alias[name] = subfolder

    def _check_free(self, name: str, subfolder: str) -> None:
        is_there = self._has(name)
        with self._lock:
            self._check_free_now(name, subfolder, is_there)

    def _check_free_now(self, name: str, subfolder: str, is_there: bool) -> None:
        """Refuses a name that stands for another adapter than `subfolder`. The lock must be held.

        Args:
            name, subfolder: the name, and the subfolder that it is to stand for.
            is_there: whether there is a subfolder of this name.
        """
        is_alias = self._alias.get(name, subfolder) != subfolder and not is_there
        if is_alias or (name != subfolder and is_there):
            raise bad_request("another adapter has this name: unload it first", "lora_name", "name_taken")
        if len(self._alias) >= _MOST_NAMES and name not in self._alias:
            raise HttpError(429, f"{_MOST_NAMES} names are in use: unload some", "too_many_names")

    def _warm(self, store: AdapterStore, subfolder: str) -> None:
        """Loads an adapter onto the device, and waits until it is there; gives up waiting after `_LOAD_S` seconds.

        Raises:
            VeilbaseError: the adapter cannot be loaded.
        """
        loan = store.reserve(subfolder)
        try:
            give_up_at = self._clock() + _LOAD_S
            while not loan.is_ready() and loan.failure is None:
                if self._clock() > give_up_at:  # all places are held by running requests: it will be loaded when used
                    return
                time.sleep(_POLL_S)
            if loan.failure is not None:
                raise loan.failure
        finally:
            loan.release()

    def _subfolder(self, path: str) -> str:
        """Returns the name of the subfolder to which a path leads. A path with `..` or a double slash is refused and
        not normalised."""
        rest = path
        if self._root is not None and path.startswith("/"):
            rest = path.removeprefix(f"{str(self._root.absolute()).rstrip('/')}/")
        if NAME.fullmatch(rest) is None:
            raise bad_request("expected a direct subfolder of the folder of adapters", "lora_path", "outside_root")
        return rest

    def unload(self, name: str) -> None:
        """Refuses further requests with this name; those under way are still answered. The adapter's memory is free
        afterwards, unless another name stands for the same adapter.

        Raises:
            HttpError: no adapter has this name.
        """
        target, is_there = self._target(name), self._has(name)
        if target is None:
            raise self._unknown(name)
        with self._lock:
            self._alias.pop(name, None)
            if is_there:
                self._unloaded.add(name)
            others = {subfolder for other, subfolder in self._alias.items() if other not in self._unloaded}
            is_used = target in others or (target != name and target not in self._unloaded)
        if self.store is not None and not is_used:
            self.store.drop(target)
