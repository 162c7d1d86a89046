"""The files of the page: how they are served, and what they must not hold. (A browser runs them in
tests/end_to_end/page.)"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from pagewire.frontend.server import page
from pagewire.frontend.server.page import FILES, page_routes

SCRIPTS = {path: body.decode() for path, (_, body) in FILES.items() if path.endswith(".js")}
HTML = FILES["/"][1].decode()
VENDOR = Path(page.__file__).parent / "vendor"
FIELDS = ("input", "select", "textarea")


class Tags(HTMLParser):
    """All tags of a document, with the label that each lies in, if any."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.in_label: list[bool] = []
        self._labels = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._labels += tag == "label"
        self.tags.append((tag, dict(attrs)))
        self.in_label.append(self._labels > 0)

    def handle_endtag(self, tag: str) -> None:
        self._labels -= tag == "label"


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=page_routes()))


@pytest.fixture(scope="module")
def document() -> Tags:
    parser = Tags()
    parser.feed(HTML)
    return parser


@pytest.mark.parametrize("path", FILES)
def test_each_file_is_served_as_what_it_is(client: TestClient, path: str) -> None:
    script = "text/javascript"
    kinds = {"html": "text/html", "js": script, "mjs": script, "css": "text/css", "svg": "image/svg+xml"}
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.content == FILES[path][1]
    suffix = "html" if path == "/" else path.rpartition(".")[2]
    assert answer.headers["content-type"].partition(";")[0] == kinds[suffix]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_what_the_browser_has_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/page/page.js")
    etag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = client.get("/page/page.js", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert client.get("/page/page.js", headers={"if-none-match": '"other"'}).status_code == 200
    assert client.get("/").headers["etag"] != etag


def test_only_what_is_shipped_is_found(client: TestClient) -> None:
    for path in (
        "/page/",
        "/page/__init__.py",
        "/page/../page.js",
        "/page/%2e%2e/app.py",
        "/page/index.html",
        "/page.js",
    ):
        assert client.get(path).status_code == 404
    assert client.post("/").status_code == 405
    assert client.head("/").content == b""


def test_the_policy_allows_this_server_alone(client: TestClient) -> None:
    policy = dict(
        part.split(" ", 1) for part in client.get("/").headers["content-security-policy"].split("; ")
    )
    assert policy.pop("default-src") == policy.pop("base-uri") == policy.pop("form-action") == "'none'"
    assert policy.pop("frame-ancestors") == policy.pop("trusted-types") == "'none'"
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert set(policy) == {"script-src", "style-src", "img-src", "connect-src"}
    assert policy.pop("img-src") == "'self' data:"  # what a user attaches
    assert set(policy.values()) == {"'self'"}


def test_the_document_obeys_the_policy(document: Tags) -> None:
    for tag, attributes in document.tags:
        assert "style" not in attributes and not any(name.startswith("on") for name in attributes), tag
        assert tag != "style"
        assert tag != "script" or attributes.get("src")
        address = attributes.get("src") or attributes.get("href") or "#"
        # Relative, so that the page works below a root path.
        assert address.startswith("#") or f"/{address}" in FILES, address


def test_scripts_make_no_html_of_text_and_know_their_document(document: Tags) -> None:
    ids = [attributes["id"] for _, attributes in document.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for path, script in SCRIPTS.items():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script
        ), path
        for imported in re.findall(r'from "(\.[\w./-]+)"', script):
            assert posixpath.normpath(posixpath.join(posixpath.dirname(path), imported)) in FILES
        used = re.findall(r'\$\("([\w-]+)"\)', script)
        icons = [f"icon-{name}" for name in re.findall(r'\b(?:icon|button)\("([\w-]+)"[,)]', script)]
        assert set(used + icons) <= set(ids), path


def test_vendored_files_are_as_published() -> None:
    """Their checksums are those of the packages (.ci/vendored.py compares them with the packages themselves), and
    nothing in them makes code or HTML of text. Every file of theirs has its entry, and every license its text.
    """
    entries = json.loads((VENDOR / "vendored.json").read_text())
    served = {path.removeprefix("/page/vendor/") for path in FILES if path.startswith("/page/vendor/")}
    assert served == {entry["file"] for entry in entries} != set()
    licenses = (VENDOR / "LICENSES.txt").read_text()
    for entry in entries:
        _, body = FILES["/page/vendor/" + entry["file"]]
        assert hashlib.sha256(body).hexdigest() == entry["sha256"]
        assert not re.search(
            rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", body
        )
        assert entry["version"].encode() in body[:200]
        assert f"{entry['name']} {entry['version']} ({entry['license']})" in licenses
        for name, license_name in entry["bundles"].items():
            assert f"{name} ({license_name}), within {entry['name']}" in licenses


def test_every_control_has_a_name_for_screen_readers(document: Tags) -> None:
    targets = {
        attributes["for"] for tag, attributes in document.tags if tag == "label" and "for" in attributes
    }
    fields = 0
    for (tag, attributes), in_label in zip(document.tags, document.in_label, strict=True):
        if tag in FIELDS:
            fields += 1
            assert in_label or "aria-label" in attributes or attributes.get("id") in targets, attributes
        if tag in ("main", "nav", "dialog"):
            assert "aria-label" in attributes or "aria-labelledby" in attributes, tag
    assert fields > 8


def test_files_are_short_and_shipped(document: Tags) -> None:
    """A file has one duty. The first load names every style sheet."""
    long = {path: script.count("\n") for path, script in SCRIPTS.items() if script.count("\n") > 400}
    assert long == {}
    sheets = {
        f"/{attributes['href']}" for _, attributes in document.tags if attributes.get("rel") == "stylesheet"
    }
    assert sheets == {path for path in FILES if path.endswith(".css")}
