"""The picture of a terminal in README: commands that are run here, and what they print, as SVG.

python -m docs.site.terminal
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "images" / "terminal.svg"
COLUMNS = 96
PAGEWIRE = str(Path(sys.executable).with_name("pagewire"))
GENERATE = ["generate", 'The "with" statement is used to', "--max-tokens", "60"]
QUESTION = (
    b'{"model": "demo", "messages": [{"role": "user", "content": "Pick one."}], '
    b'"guided_choice": ["yes", "no"]}'
)
# As rich's own, without fonts from a foreign host.
FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>A terminal in which pagewire generates text and serves it over HTTP</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, 'Fira Code', Menlo, Consolas, 'DejaVu Sans Mono', monospace;
    font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: ui-sans-serif, sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


def in_terminal(arguments: list[str]) -> str:
    """Return what a command prints to a terminal, with its colours.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    primary, secondary = pty.openpty()
    environment = os.environ | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    with subprocess.Popen(
        [PAGEWIRE, *arguments], stdout=secondary, stderr=secondary, env=environment
    ) as process:
        os.close(secondary)
        printed = bytearray()
        try:
            while chunk := os.read(primary, 65536):
                printed += chunk
        except OSError:  # the command has ended, and its terminal with it
            pass
    os.close(primary)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments, bytes(printed))
    return last_of_each_line(printed.decode().replace("\r\n", "\n"))


def last_of_each_line(text: str) -> str:
    """Return text as it stands in the end, where lines were written over (progress)."""
    text = re.sub(r"\x1b\[\d*[KJ]|\x1b\[\?\d+[hl]", "", text)
    return "\n".join(line.rpartition("\r")[2] for line in text.split("\n")).strip("\n")


def over_http() -> tuple[str, str]:
    """Start a server, ask it, and return the line of its start and the message of the answer."""
    command = [PAGEWIRE, "serve", "demo", "--port", "8000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        ready = server.stdout.readline().strip()
        request = Request(
            "http://127.0.0.1:8000/v1/chat/completions", QUESTION, {"Content-Type": "application/json"}
        )
        with urlopen(request) as answer:
            message = json.load(answer)["choices"][0]["message"]
        server.terminate()
    return ready, json.dumps(message)


def main() -> None:
    """Run the commands and write the picture."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)

    def prompt(line: str) -> None:
        console.print(Text("$ ", style="bold green") + Text(line, style="bold"))

    prompt("pagewire generate 'The \"with\" statement is used to' --max-tokens 60")
    console.print(Text.from_ansi(in_terminal(GENERATE)))
    ready, answer = over_http()
    prompt("pagewire serve demo &")
    console.print(Text(ready))
    prompt("curl -s http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '")
    console.print(Text(f"    {QUESTION.decode()}' | jq .choices[0].message"))
    console.print(Text(answer))
    svg = console.export_svg(title="pagewire", theme=MONOKAI, code_format=FORMAT, unique_id="t")
    PICTURE.write_text(re.sub(r"[ \t]+\n", "\n", svg), "utf-8")


if __name__ == "__main__":
    main()
