"""Linux namespaces of scripts/bench/namespaces.py, for tests: skipped where there are none."""

import pytest
from bench import namespaces
from bench.namespaces import children

from utils.errors import UserError

__all__ = ["Namespaces", "children"]


class Namespaces(namespaces.Namespaces):
    """A set of namespaces of these kinds; the test is skipped where they are not allowed."""

    def __init__(self, kinds: tuple[str, ...]):
        try:
            super().__init__(kinds)
        except UserError as fault:
            pytest.skip(str(fault))
