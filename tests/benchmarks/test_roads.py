"""How decoders run, as benchmarks.roads tells it."""

from __future__ import annotations

from tests.benchmarks.loading import load

roads = load("roads")


def test_a_stack_and_a_module_are_told_apart() -> None:
    found = {road.name: road for road in roads.roads(["llama", "diffllama"])}
    llama, diffllama = found["llama"], found["diffllama"]
    assert (llama.layers, llama.decodes) == ("stack", True)
    assert diffllama.layers.startswith("module: attention has ") and not diffllama.decodes
    assert roads.summary([llama, diffllama]).startswith("**Of 2 decoders 1 run as a stack, 0 as")
