"""Reads the results in a report of the attacks."""

from __future__ import annotations

import json
from pathlib import Path

from attacks.report.table import Finding, Result


def read(folder: Path) -> list[Result]:
    """Returns the results in the report.json of a folder. A value of null in this file stands for infinity."""
    results = json.loads((folder / "report.json").read_text())["results"]
    return [
        Result(
            one["mask"], one["arithmetic"], one["adversary"],
            Finding(
                one["module"], one["metric"], float("inf") if one["value"] is None else one["value"],
                one["baseline"], tuple(one["interval"]), one["verdict"],
            ),
        )
        for one in results
    ]  # fmt: skip
