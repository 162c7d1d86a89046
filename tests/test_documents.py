"""What documents say exists: links, commands and their options, Python names, make targets, packages.

The commands themselves run in tests/end_to_end/test_documents.py.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import pagewire
from pagewire.cli.commands import build_parser
from pagewire.ipc.options.engine_args import EngineArgs
from tests.benchmarks.loading import load_file
from tests.documents import DOCUMENTS, ROOT, Block, blocks

LANGUAGES = {"", "sh", "python", "yaml", "text", "json", "ini", "toml", "nginx"}
FOREIGN = re.compile(
    r"\b(docker|kubectl|ray|helm|sky|llama|dstack)\b"
)  # lines of other programs have other options
TAKE_OPTIONS = {"LLM", "EngineArgs", "AsyncEngineArgs"}
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@cache
def options_of() -> dict[str, set[str]]:
    """The options of each command, those of its subcommands included."""

    def options(parser: argparse.ArgumentParser) -> set[str]:
        found = set(parser._option_string_actions)
        for inner in subparsers(parser).values():
            found |= options(inner)
        return found

    return {name: options(parser) for name, parser in subparsers(build_parser()).items()}


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return {
        name: inner
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, inner in action.choices.items()
    }


def unknown(words: list[str]) -> list[str]:
    """What of a `pagewire` command the command line does not know."""
    if len(words) < 2 or words[1].startswith(("-", "...")):
        return []
    if (known := options_of().get(words[1])) is None:
        return [words[1]]
    return [word for word in words[2:] if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]


def texts(value: object) -> list[str]:
    """All strings in a YAML document."""
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in texts(item)]
    return [value] if isinstance(value, str) else []


def test_links_lead_to_files() -> None:
    link = re.compile(r"(?:\]\(|src=\"|srcset=\")([^)#:\s\"]+)(?:#[\w-]+)?[)\"]")
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in DOCUMENTS
        for target in link.findall(re.sub(r"```.*?```", "", document.read_text("utf-8"), flags=re.S))
        if not (document.parent / target).exists()
    ]
    assert broken == []


def test_blocks_have_a_language_and_a_reason() -> None:
    wrong = [
        block.place
        for block in blocks(*LANGUAGES)
        if block.marker and not re.match(r"(not run|file): \S", block.marker)
    ]
    fences = sum(len(re.findall(r"^ *```\w", document.read_text("utf-8"), re.M)) for document in DOCUMENTS)
    assert wrong == [] and len(blocks(*LANGUAGES - {""})) == fences, "a block has another language"


def test_commands_of_blocks_are_known() -> None:
    """Those of shell blocks are parsed whole, so their values count as well."""
    commands = [
        (block, words) for block in blocks("sh") for words in block.commands if "pagewire" in words[:1]
    ]
    parser, wrong = build_parser(), []
    for block, words in commands:
        try:
            parser.parse_args(words[1:])
        except (SystemExit, Exception) as error:
            wrong.append(f"{block.place}: {error}")
    assert wrong == [] and len(commands) > 20


def test_commands_in_text_are_known() -> None:
    wrong = []
    for document in DOCUMENTS:
        prose = re.sub(r"^ *```.*?^ *```$", "", document.read_text("utf-8"), flags=re.M | re.S)
        for code in CODE.findall(prose):
            words = code.split()
            if words[0] == "pagewire":
                wrong += [f"{document.relative_to(ROOT)}: {code}: {word}" for word in unknown(words)]
    for block in blocks("yaml"):
        lines = [
            line
            for part in yaml.safe_load_all(block.text)
            for text in texts(part)
            for line in text.split("\n")
        ]
        for line in lines:
            for command in re.findall(r"pagewire ((?:serve|worker|core|route) [^&|]+)", line):
                wrong += [f"{block.place}: {word}" for word in unknown(["pagewire", *command.split()])]
    assert wrong == []


def test_options_in_text_are_known() -> None:
    """An option, alone or with its value, is one of some command, or of a program that its line names."""
    known = {option for options in options_of().values() for option in options} | {"--version"}
    known |= set(
        re.findall(
            r"--[a-z][\w-]+", "".join(path.read_text("utf-8") for path in (ROOT / "benchmarks").rglob("*.*y"))
        )
    )
    wrong = []
    for document in DOCUMENTS:
        for line in document.read_text("utf-8").splitlines():
            if FOREIGN.search(line):
                continue
            for code in CODE.findall(line):
                wrong += [f"{document.relative_to(ROOT)}: {code}"] * (
                    code.startswith("--") and re.split(r"[ =]", code)[0].replace("_", "-") not in known
                )
    assert wrong == []


def defined(module: str) -> set[str] | None:
    """The names at the top of one of our modules or packages; None: there is none of this name."""
    path = ROOT.joinpath(*module.split(".")[1:])
    face = ROOT.joinpath("pagewire", *module.split(".")[1:])
    if face.with_suffix(".py").exists() or (face / "__init__.py").exists():  # it only re-exports
        return set(importlib.import_module(module).__all__)
    for source in (path.with_suffix(".py"), path / "__init__.py"):
        if source.exists():
            break
    else:
        return set() if path.is_dir() else None
    names = {part.name for part in path.glob("*") if part.is_dir()} | {
        part.stem for part in path.glob("*.py")
    }
    for node in ast.parse(source.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
            }
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_python_names_exist() -> None:
    wrong = []
    for block in blocks("python"):
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pagewire":
                names = defined(node.module or "")
                wrong += [
                    f"{block.place}: {node.module}.{alias.name}"
                    for alias in node.names
                    if names is None or alias.name not in names
                ]
    assert wrong == []


def test_keywords_exist() -> None:
    """Those of the public names' calls: what `LLM(...)` takes, and what the parameters' classes have."""
    options = {field.name for field in dataclasses.fields(EngineArgs)}
    wrong = []
    for block in blocks("python"):
        for node in ast.walk(ast.parse(block.text)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if (name := node.func.id) not in pagewire.__all__:
                continue
            known = set(inspect.signature(getattr(pagewire, name)).parameters) | (
                options if name in TAKE_OPTIONS else set()
            )
            wrong += [f"{block.place}: {name}({word.arg}=" for word in node.keywords if word.arg not in known]
    assert wrong == []


def called(pattern: str) -> list[tuple[Path, str]]:
    """What a pattern finds in code, of blocks and within the text."""
    return [
        (document, match)
        for document in DOCUMENTS
        for code in [
            *CODE.findall(document.read_text("utf-8")),
            *(block.text for block in blocks_in(document)),
        ]
        for match in re.findall(pattern, code)
    ]


@cache
def blocks_in(document: Path) -> list[Block]:
    return [block for block in blocks("sh") if block.document == document]


def test_make_targets_modules_and_extras_exist() -> None:
    makefile, project = (ROOT / "Makefile").read_text("utf-8"), (ROOT / "pyproject.toml").read_text("utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.M))
    wrong = [
        f"{document.name}: make {name}"
        for document, names in called(r"(?:^|\n)make ((?:[a-z][\w-]* ?)+)")
        for name in names.split()
        if name not in targets
    ]
    wrong += [
        f"{document.name}: python -m {module}"
        for document, module in called(r"python -m ((?:benchmarks|docs)\.[\w.]+)")
        if not any(
            ROOT.joinpath(*module.rstrip(".").split(".")).with_suffix(end).exists() for end in ("", ".py")
        )
    ]
    extras = set(re.findall(r"^(\w+) = \[", project.partition("[project.optional-dependencies]")[2], re.M))
    wrong += [
        f"{document.name}: [{extra}]"
        for document, found in called(r"(?:pagewire|'\.)\[([\w,]+)\]")
        for extra in found.split(",")
        if extra not in extras
    ]
    assert wrong == []


def page_maker(name: str) -> Any:
    """A module of docs/site, which makes a page when the site is built."""
    return load_file(f"docs.site.{name}", ROOT / "docs" / "site" / f"{name}.py")


def test_pages_made_from_code_leave_nothing_out() -> None:
    """All operations, all metrics, all public names."""
    http_api, metrics, python_api = page_maker("http_api"), page_maker("metrics"), page_maker("python_api")
    made = re.compile(r"^\| `((?:vllm|pagewire):\w+)`", re.M)
    written = {
        name
        for path in metrics.SOURCES.values()
        for name in re.findall(r"\"((?:vllm|pagewire):\w+)\"", path.read_text("utf-8"))
    }
    assert set(made.findall(metrics.markdown())) == written and len(written) > 60
    operations = http_api.markdown()
    assert all(f"`{path}`" in operations for path in http_api.document()["paths"])
    names = python_api.markdown()
    assert [
        name for name in pagewire.__all__ if not re.search(rf"[. ]{name}\n", names) and name[:2] != "__"
    ] == []
