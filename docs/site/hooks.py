"""What the site has beside the files of `docs/`: documents of the repository's root, and pages made from code.

`mkdocs.yml` names this file. Links work in both places: in the repository they lead to files, on the site to pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.site import http_api, metrics, python_api

ROOT = Path(__file__).parents[2]
OF_THE_ROOT = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture/index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Documents of the repository's root, and their pages."""
MADE = {
    "reference/python.md": python_api.markdown,
    "reference/http.md": http_api.markdown,
    "reference/metrics.md": metrics.markdown,
}
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
PICTURE = re.compile(
    r"<picture>.*?srcset=\"(?P<dark>.*?)\".*?alt=\"(?P<alt>.*?)\" src=\"(?P<light>.*?)\".*?</picture>", re.S
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave pages that are made by commands out of the navigation where they are not there (yet)."""
    there = {*OF_THE_ROOT.values(), *MADE}
    config.nav = pruned(config.nav, lambda page: page in there or (ROOT / "docs" / page).exists())
    return config


def pruned(nav: list, exists) -> list:  # type: ignore[no-untyped-def,type-arg]
    """Return a navigation without pages that do not exist."""
    kept = []
    for entry in nav:
        [(title, target)] = entry.items()
        if isinstance(target, list):
            kept.append({title: pruned(target, exists)})
        elif exists(target):
            kept.append(entry)
    return kept


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents of the root and the pages that are made."""
    for source, page in OF_THE_ROOT.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=with_links(both_pictures(text), source, page)))
    for page, made in MADE.items():
        files.append(File.generated(config, page, content=made()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to documents of the root to their pages, and let the site's switch choose pictures."""
    path = page.file.src_uri
    if path in OF_THE_ROOT.values():
        return markdown
    return with_links(both_pictures(markdown), f"docs/{path}", path)


def with_links(text: str, source: str, page: str) -> str:
    """Return text whose links, relative to `source` in the repository, are relative to `page` on the site."""

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        on_site = OF_THE_ROOT.get(target) or target.removeprefix("docs/")
        return posixpath.relpath(on_site, posixpath.dirname(page) or ".")

    return LINK.sub(moved, text)


def both_pictures(text: str) -> str:
    """Return text in which the site's own switch between light and dark chooses a picture."""
    return PICTURE.sub(r"![\g<alt>](\g<light>#only-light)\n![\g<alt>](\g<dark>#only-dark)", text)
