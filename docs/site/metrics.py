"""The page about metrics: names, types and descriptions, read from the code that makes them.

Nothing runs: the yields of the two modules are found in their syntax trees, so that metrics of features that are
off (adapters, tenants, drafts) are there as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCES = {
    "Of a core": ROOT / "engine_core/metrics/metrics.py",
    "Of a router": ROOT / "frontend/route/metrics.py",
}
KINDS = {"counter", "gauge", "histogram", "vector"}
INTRODUCTION = """\
# Metrics

What `/metrics` answers in Prometheus' text format, and `get_metrics()` as objects. A `vllm:` name means what it
means in vLLM; metrics of this engine alone begin with `pagewire:`. Every metric has the labels `model_name` and
`engine`. A dashboard for Grafana is in `frontend/server/operate/grafana.json`; `deploy/compose.yaml` starts it with
Prometheus. The page is made from the code.
"""


class DocumentedMetric(NamedTuple):
    """A metric: its name, type, description, and the labels that it has beside those of all metrics."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Its line of the table."""
        labels = ", ".join(f"`{label}`" for label in self.labels)
        return f"| `{self.name}` | {self.kind} | {labels} | {self.text.replace('|', '/')} |"


def markdown() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for title, path in SOURCES.items():
        parts.append(f"## {title}\n\n| name | type | labels | |\n|---|---|---|---|")
        parts += [metric.line for metric in read(path)]
        parts.append("")
    return "\n".join(parts)


def read(path: Path) -> list[DocumentedMetric]:
    """Return the metrics of a module, each name once."""
    functions = [
        node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)
    ]
    found = [metric for function in functions for metric in in_function(function)]
    return list({metric.name: metric for metric in found}.values())


def in_function(function: ast.FunctionDef) -> Iterator[DocumentedMetric]:
    """Yield the metrics of a function, in its order, with texts that were assigned to names before."""
    known: dict[str, ast.expr] = {}
    for node in in_order(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                known |= assigned(target, node.value)
        elif isinstance(node, ast.Yield) and (metric := yielded(node.value, known)) is not None:
            yield metric


def in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes in the order of the source."""
    for child in ast.iter_child_nodes(node):
        yield child
        yield from in_order(child)


def assigned(target: ast.expr, value: ast.expr) -> dict[str, ast.expr]:
    """Return what an assignment gives to which names."""
    if isinstance(target, ast.Name):
        return {target.id: value}
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = zip(target.elts, value.elts, strict=True)
        return {name.id: part for name, part in pairs if isinstance(name, ast.Name)}
    return {}


def yielded(value: ast.expr | None, known: dict[str, ast.expr]) -> DocumentedMetric | None:
    """Return the metric of `yield gauge(name, text, value, labels)` or of `yield "gauge", name, text, value`."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in KINDS:
        kind, parts = value.func.id, value.args
    elif isinstance(value, ast.Tuple) and isinstance(value.elts[0], ast.Constant):
        kind, parts = str(value.elts[0].value), value.elts[1:]
    else:
        return None
    labels = resolved(parts[3], known) if len(parts) > 3 else None
    names = (
        [key.value for key in labels.keys if isinstance(key, ast.Constant)]
        if isinstance(labels, ast.Dict)
        else []
    )
    return DocumentedMetric(string(parts[0], known), kind, string(parts[1], known), tuple(map(str, names)))


def resolved(node: ast.expr, known: dict[str, ast.expr]) -> ast.expr:
    """Return what a name was assigned, or the node itself."""
    return known.get(node.id, node) if isinstance(node, ast.Name) else node


def string(node: ast.expr, known: dict[str, ast.expr]) -> str:
    """Return the text of a constant, of a name that has one, or of an f-string of these.

    Raises:
        ValueError: it is something else, so this reader has to learn it.
    """
    node = resolved(node, known)
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(string(part, known) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return string(node.value, known)
    raise ValueError(f"line {node.lineno}: neither a text nor the name of one")
