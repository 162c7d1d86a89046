"""The page about Python: every public name of the package `pagewire`, by what it is for.

The names stand here as directives; mkdocstrings puts docstrings and signatures in their place, from the sources.
"""

from __future__ import annotations

import pagewire

GROUPS = {
    "Engines": ("LLM", "AsyncLLM", "LLMEngine", "EngineArgs", "AsyncEngineArgs"),
    "Parameters": (
        "SamplingParams",
        "StructuredOutputsParams",
        "BeamSearchParams",
        "PoolingParams",
        "PoolerConfig",
        "LoRARequest",
        "PromptAdapterRequest",
    ),
    "Outputs": (
        "RequestOutput",
        "CompletionOutput",
        "BeamSearchOutput",
        "BeamSearchSequence",
        "PoolingRequestOutput",
        "PoolingOutput",
    ),
}
INTRODUCTION = """\
# Python

What `from pagewire import ...` has. [In a program](../guide/python.md) shows how the parts work together.
"""


def markdown() -> str:
    """Return the page."""
    names = [name for name in pagewire.__all__ if not name.startswith("__")]
    grouped = {name for group in GROUPS.values() for name in group}
    rest = [name for name in names if name not in grouped]
    errors = [name for name in rest if name.endswith("Error")]
    groups = GROUPS | {"Errors": errors, "More": [name for name in rest if name not in errors]}
    parts = [INTRODUCTION]
    for title, members in groups.items():
        parts.append(f"## {title}\n")
        parts += [directive(name) for name in members]
    return "\n".join(parts)


def directive(name: str) -> str:
    """Return the directive of a public name; an alias of a class that has another name is a sentence."""
    value = getattr(pagewire, name)
    own = getattr(value, "__name__", name)
    if own != name and hasattr(pagewire, own):
        return f"### {name}\n\nAnother name of `{own}`.\n"
    return f"::: {pagewire._HOME_OF[name]}.{name}\n"
