"""The recipes in `deploy/`: their YAML is valid, and the command line knows the options that they use."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagewire.cli.console.options import engine_args
from pagewire.cli.main import build_parser

RECIPES = sorted((Path(__file__).parents[2] / "deploy").glob("*.md"))


def blocks(language: str) -> Iterator[str]:
    for path in RECIPES:
        yield from re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def texts(value: Any) -> Iterator[str]:
    """All strings in a YAML document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts(item)


def commands() -> list[str]:
    """All that call `pagewire`."""
    sources = [*blocks("sh"), *(text for block in blocks("yaml") for text in texts(yaml.safe_load(block)))]
    joined = "\n".join(sources).replace("\\\n", " ")
    return re.findall(r"(?:^|\s)pagewire ((?:serve|worker|core) [^&|\n]+)", joined)


def test_there_are_recipes_for_all_launchers() -> None:
    recipes = [yaml.safe_load(block) for block in blocks("yaml")]
    kinds = {recipe.get("kind", recipe.get("type")) for recipe in recipes}
    assert kinds == {"LeaderWorkerSet", "RayCluster", "InferenceService", "service", None}  # None: SkyPilot's
    assert {command.split()[0] for command in commands()} == {"serve", "worker"}


@pytest.mark.parametrize("command", commands())
def test_commands_are_known(command: str) -> None:
    words = shlex.split(command.replace("$(POD_IP)", "10.0.0.1").replace("$(LWS_LEADER_ADDRESS)", "leader"))
    options = build_parser().parse_args(words)
    if words[0] == "serve":
        options.model = options.model_tag
        assert engine_args(options).tensor_parallel_size == 2
    else:
        assert options.join.startswith("tcp://")
