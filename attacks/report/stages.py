"""Says on stderr what a program of this package is doing: a line for each stage, at once, in a terminal and without
one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")


def say(text: str) -> None:
    """Prints a line on stderr, which nothing holds back."""
    print(text, file=sys.stderr, flush=True)


def counted(what: str, items: Sequence[_Item], name: Callable[[_Item], object] = str) -> Iterator[_Item]:
    """Yields each item, after a line that says which one it is, and of how many.

    Args:
        what: what the items are, such as "control".
        items: the items.
        name: returns what an item is called.
    """
    for number, item in enumerate(items, 1):
        say(f"{what} {number}/{len(items)}: {name(item)}")
        yield item
