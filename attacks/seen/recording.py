"""This module names the files of a recording made by `provider serve --record`, and tells without loading torch whose
traffic it holds. attacks/seen/view.py reads and checks it.
"""

from __future__ import annotations

import json
from pathlib import Path

from wire.errors import ConfigurationError

INDEX_NAME = "index.jsonl"
MANIFEST_NAME = "manifest.json"
END_NAME = "end.json"


def tenants_of(folder: Path) -> tuple[str, ...]:
    """Returns the names of the tenants in a recording, in order of appearance.

    Raises:
        ConfigurationError: the folder holds no recording, or its index or manifest is no JSON.
    """
    try:
        json.loads((folder / MANIFEST_NAME).read_bytes())
        lines = (folder / INDEX_NAME).read_text(encoding="utf-8").splitlines()
        return tuple(dict.fromkeys(str(json.loads(line)["tenant"]) for line in lines))
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise no_recording(folder) from exc
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        raise damaged(folder) from (exc if isinstance(exc, OSError) else None)


def no_recording(folder: Path) -> ConfigurationError:
    """Returns the error for a folder that holds no recording."""
    return ConfigurationError(
        f"{folder} is not a recording: expected the folder that was given to `provider serve --record`"
    )


def damaged(folder: Path) -> ConfigurationError:
    """Returns the error for a recording that cannot be read."""
    return ConfigurationError(f"the recording in {folder} is damaged: record it again")
