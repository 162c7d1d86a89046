"""The version of pagewire, which frontends and cores tell each other when they meet."""

from __future__ import annotations

__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)
