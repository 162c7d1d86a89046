"""How far one reads to understand a step: what importing its two main files loads of ours."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADED = """
import importlib, sys
importlib.import_module(sys.argv[1])
ours = [(name, module) for name, module in sys.modules.items() if name.startswith("pagewire.")]
print(*(name for name, module in ours if not hasattr(module, "__path__")))
"""


@pytest.mark.parametrize(
    ("module", "most"), [("pagewire.workers.network.network", 40), ("pagewire.kernels.stack", 30)]
)
def test_a_network_reaches_data_and_kernels_alone(module: str, most: int) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED, module], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert module in loaded and len(loaded) <= most, sorted(loaded)
    folders = ("kernels.cpu", "kernels.cuda", "workers.module", "workers.device", "ipc")
    assert [
        name for name in loaded if name.startswith(tuple(f"pagewire.{folder}." for folder in folders))
    ] == []
