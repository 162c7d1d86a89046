"""The version of pagewire; frontends and cores exchange it when a frontend attaches."""

from __future__ import annotations

__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)
