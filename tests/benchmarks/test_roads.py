"""How decoders run, as benchmarks.roads tells it."""

from __future__ import annotations

from tests.benchmarks.loading import load

roads = load("roads")


def test_a_stack_and_a_module_are_told_apart() -> None:
    llama, ctrl = roads.roads(["llama", "ctrl"])
    assert (llama.layers, llama.decodes) == ("stack", True)
    assert ctrl.layers.startswith("module: the base has ") and not ctrl.decodes
    assert roads.summary([llama, ctrl]).startswith("**Of 2 decoders 1 run as a stack, 0 as")
