"""The diagrams of README and the site, as SVG for light and dark pages: `python -m docs.site.diagrams`."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "images"
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Colours:
    """Colours of a page: text, quieter text, lines, and a fill and an edge for each kind of process."""

    text: str
    quiet: str
    line: str
    fills: dict[str, tuple[str, str]]


LIGHT = Colours(
    "#1f2328",
    "#59636e",
    "#6e7781",
    {
        "frontend": ("#ddf4ff", "#0969da"),
        "core": ("#fff1d6", "#bf8700"),
        "worker": ("#dafbe1", "#1a7f37"),
        "plain": ("#f6f8fa", "#8c959f"),
    },
)
DARK = Colours(
    "#e6edf3",
    "#9198a1",
    "#8b949e",
    {
        "frontend": ("#0c2d4d", "#4493f8"),
        "core": ("#3b2a05", "#d29922"),
        "worker": ("#0f2d1a", "#3fb950"),
        "plain": ("#21262d", "#6e7681"),
    },
)


@dataclass
class Drawing:
    """An SVG picture in the making. Sizes are in pixels."""

    width: int
    height: int
    colours: Colours
    parts: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, width: int, height: int, kind: str, title: str, *lines: str) -> None:
        """Draw a process: its title, and below it what it does."""
        fill, edge = self.colours.fills[kind]
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{edge}"/>'
        )
        self.text(x + 14, y + 25, title, weight=600)
        for number, line in enumerate(lines):
            self.text(x + 14, y + 47 + 19 * number, line, size=13, quiet=True)

    def text(
        self,
        x: int,
        y: int,
        text: str,
        *,
        size: int = 15,
        weight: int = 400,
        quiet: bool = False,
        middle: bool = False,
    ) -> None:
        """Draw a line of text. middle: `x` is its middle."""
        colour = self.colours.quiet if quiet else self.colours.text
        anchor = ' text-anchor="middle"' if middle else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}"{anchor}>'
            f"{escape(text)}</text>"
        )

    def arrow(self, x1: int, y1: int, x2: int, y2: int, label: str = "", *, both: bool = False) -> None:
        """Draw an arrow with a label above its middle."""
        start = ' marker-start="url(#back)"' if both else ""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{self.colours.line}" stroke-width="1.5"'
            f' marker-end="url(#head)"{start}/>'
        )
        if label:
            self.text(
                (x1 + x2) // 2, min(y1, y2) - 8 + abs(y2 - y1) // 2, label, size=13, quiet=True, middle=True
            )

    def svg(self, title: str) -> str:
        """Return the picture. title: for readers who do not see it."""
        line = self.colours.line
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}"'
            f' height="{self.height}" role="img" font-family="{FONT}"><title>{escape(title)}</title><defs>'
            f'<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{line}"/></marker>'
            f'<marker id="back" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M8 0 L0 4 L8 8 z" fill="{line}"/></marker></defs>'
        )
        return "\n".join([head, *self.parts, "</svg>\n"])


def processes(colours: Colours) -> str:
    """The processes and the messages between them."""
    drawing = Drawing(880, 330, colours)
    drawing.box(10, 20, 230, 82, "frontend", "Your program", "LLM, AsyncLLM", "no torch")
    drawing.box(10, 122, 230, 82, "frontend", "HTTP server", "OpenAI, Anthropic, Ollama", "no torch")
    drawing.box(10, 224, 230, 82, "frontend", "Another frontend", "comes and goes", "no torch")
    drawing.box(
        350,
        82,
        220,
        162,
        "core",
        "Engine core",
        "scheduling",
        "KV-cache state",
        "grammars, drafts",
        "metrics",
        "no torch",
    )
    drawing.box(680, 20, 190, 82, "worker", "Worker, rank 0", "model, KV memory", "kernels, sampling")
    drawing.box(680, 122, 190, 82, "worker", "Worker, rank 1", "its part of each layer", "or some layers")
    drawing.box(680, 224, 190, 82, "worker", "Worker, rank N", "on this machine", "or another")
    for y, end in ((61, 130), (163, 163), (265, 196)):
        drawing.arrow(240, y, 350, end, both=True)
        drawing.arrow(570, end, 680, y, both=True)
    drawing.text(296, 40, "requests, tokens", size=13, quiet=True, middle=True)
    drawing.text(625, 40, "plans, results", size=13, quiet=True, middle=True)
    drawing.text(
        460, 300, "msgspec structs over ZeroMQ: no pickle, no code", size=13, quiet=True, middle=True
    )
    return drawing.svg("Frontends, the engine core and workers, and the messages between them")


WAY = (
    ("frontend", "1 tokenize", "text or messages", "to a Request"),
    ("core", "2 admit", "check, wait in the", "lobby, take blocks"),
    ("core", "3 plan", "rows of the next", "step: StepPlan"),
    ("worker", "4 run", "all layers over", "the batch"),
    ("worker", "5 draw", "f(seed, position):", "StepResult"),
    ("core", "6 commit", "append, stop,", "free blocks"),
    ("frontend", "7 detokenize", "deltas to a", "RequestOutput"),
)


def request(colours: Colours) -> str:
    """The way of one request, from text to text."""
    drawing = Drawing(1090, 190, colours)
    width, gap = 132, 20
    for number, (kind, title, *lines) in enumerate(WAY):
        x = 15 + number * (width + gap)
        drawing.box(x, 30, width, 90, kind, title, *lines)
        if number:
            drawing.arrow(x - gap + 1, 75, x - 1, 75)
    back, first = 15 + 5 * (width + gap) + width // 2, 15 + 2 * (width + gap) + width // 2
    drawing.parts.append(
        f'<path d="M{back} 120 V150 H{first} V122" fill="none" stroke="{colours.line}" stroke-width="1.5"'
        ' marker-end="url(#head)"/>'
    )
    drawing.text(
        (back + first) // 2,
        172,
        "until it ends: step N+1 is planned while N runs",
        size=13,
        quiet=True,
        middle=True,
    )
    for kind, x, name in (
        ("frontend", 30, "frontend"),
        ("core", 140, "engine core"),
        ("worker", 270, "worker"),
    ):
        fill, edge = colours.fills[kind]
        drawing.parts.append(
            f'<rect x="{x}" y="160" width="14" height="14" rx="3" fill="{fill}" stroke="{edge}"/>'
        )
        drawing.text(x + 22, 172, name, size=13, quiet=True)
    return drawing.svg("The way of one request through frontend, engine core and worker")


def main() -> None:
    """Write the pictures."""
    for name, draw in {"processes": processes, "request": request}.items():
        for shade, colours in {"light": LIGHT, "dark": DARK}.items():
            (IMAGES / f"{name}-{shade}.svg").write_text(draw(colours), "utf-8")


if __name__ == "__main__":
    main()
