"""Markdown of models and strangers: what is shown, what growing texts cost, and texts that are made to do harm."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("selenium", reason="the page is tested through Selenium, which is not installed")

from tests.end_to_end.page.browser import Page

TEXT = """# Title

A **bold** line
and ~~another~~, with `code`, $x^2$ and \\(y\\).

1. one
   - [ ] inner
   - [x] done

2. two

   ```python
   def f():
       return 1
   ```

> said
> - a list
>   of two lines

| a | b |
|:-:|--:|
| 1 | \\| |

$$
\\frac{a}{b}
$$
***
[link](https://example.org/a) ![picture](https://example.org/b.png) &amp; \\*stars\\*

- a

2
3. three

    indented

```
never closed
"""

# Made to be slow, deep or large, each some ten thousand characters.
ATTACKS = {
    "quotes": ">" * 4000,
    "spaced quotes": "> " * 20000,
    "spaces": "a" + " " * 20000 + "b",
    "leading spaces": " " * 20000 + "b",
    "stars": "*" * 50000,
    "opened": "*a " * 20000,
    "nested": "*" * 20000 + "a" + "*" * 20000,
    "brackets": "[" * 50000,
    "closed brackets": "[" * 10000 + "a" + "]" * 10000,
    "pictures": "![" * 30000,
    "links": "[a](" * 20000,
    "backticks": " ".join("`" * n for n in range(1, 400)),
    "columns": "|a" * 10000 + "|\n" + "|-" * 10000 + "|\n|b|",
    "deep lists": "\n".join(" " * (2 * n) + "- a" for n in range(400)),
    "lists in a line": "- " * 10000,
    "numbers": "1. " * 10000,
    "mixed": "> - 1. " * 5000,
    "dollars": "$a " * 20000,
    "formulas": "\\(" * 20000,
    "displayed": "$$\n" * 5001,
    "deep formula": "$" + "{" * 900 + "a" + "}" * 900 + "$",
    "roots": "$$" + "\\sqrt" * 1500 + "{a}$$",
    "inherited": "$$\\constructor{a}\\begin{constructor}\\end{constructor}$$ \\(\\toString\\)",
    "hashes": "# a " + " #" * 20000,
    "lines": "a\n" * 20000,
    "struck": "~~a ".join(["x"] * 20000),
    "code": "```python\n" + '"' * 20001,
    "entities": "&#" * 20000,
    "nulls": "\0" * 5000,
}

SHOWN = """
const { show } = await import("/page/text/markdown.js");
const shown = (text) => {
    const parent = document.createElement("div");
    show(parent, text);
    return parent;
};
"""


@pytest.mark.parametrize("name", ATTACKS)
def test_no_text_stops_the_page(page: Page, name: str) -> None:
    """Each is shown, laid out, and not lost; nothing is nested deeper than browsers can lay out."""
    result = page.run(
        SHOWN
        + """
        const parent = shown(given[0]);
        document.querySelector("#welcome").append(parent);
        const height = parent.getBoundingClientRect().height;
        let deepest = 0;
        const walker = document.createTreeWalker(parent, NodeFilter.SHOW_ELEMENT);
        while (walker.nextNode()) {
            let depth = 0;
            for (let node = walker.currentNode; node !== parent; node = node.parentNode) depth += 1;
            deepest = Math.max(deepest, depth);
        }
        const letters = (text) => (text.match(/[ab]/g) ?? []).length;
        const elements = parent.querySelectorAll("*").length;
        const [kept, wanted] = [letters(parent.textContent), letters(given[0])];
        parent.remove();
        return { height, deepest, elements, kept, given: wanted };
        """,
        ATTACKS[name],
    )
    assert not isinstance(result, str), result
    assert result["deepest"] <= 150
    assert result["elements"] <= 70_000
    assert result["kept"] >= result["given"] or name in ("links", "entities", "pictures")
    assert result["height"] > 0 or not ATTACKS[name].strip("\0")


def test_what_grows_is_as_what_came_at_once(page: Page) -> None:
    """In pieces of each size, and with other ends of lines."""
    result = page.run(
        SHOWN
        + """
        const whole = shown(given[0]).innerHTML;
        const wrong = [];
        for (let size = 1; size < 40; size += 1) {
            const grown = document.createElement("div");
            for (let end = size; end < given[0].length + size; end += size) {
                show(grown, given[0].slice(0, end));
                const once = shown(given[0].slice(0, end)).innerHTML;
                if (grown.innerHTML !== once) { wrong.push([size, end]); break; }
            }
        }
        const windows = shown(given[0].replaceAll("\\n", "\\r\\n")).innerHTML;
        const [other] = [shown("# other\\n\\ntext")];
        show(other, given[0]);
        return { wrong, windows: windows === whole, replaced: other.innerHTML === whole };
        """,
        TEXT,
    )
    assert result == {"wrong": [], "windows": True, "replaced": True}


def test_only_the_end_of_a_growing_text_is_read_again(page: Page) -> None:
    """The characters that are parsed for an answer in so many pieces, and the elements that stay the same ones."""
    result = page.run(
        SHOWN
        + """
        const { default: MarkdownIt } = await import("/page/vendor/markdown-it.esm.min.mjs");
        const parse = MarkdownIt.prototype.parse;
        let read = 0;
        MarkdownIt.prototype.parse = function (text, env) {
            read += text.length;
            return parse.call(this, text, env);
        };
        const parent = document.createElement("div");
        let [text, first] = ["", null];
        for (let n = 0; n < 300; n += 1) {
            for (const word of ["A paragraph ", "of **three** ", `parts, number ${n}.\\n\\n`]) {
                text += word;
                show(parent, text);
            }
            first ??= parent.firstChild;
        }
        MarkdownIt.prototype.parse = parse;
        return { read: read / text.length, same: first === parent.firstChild, blocks: parent.children.length };
        """
    )
    assert 1 <= result["read"] < 8  # 300 paragraphs in 900 pieces: 450 if all were read again
    assert result["same"] is True and result["blocks"] == 300


def test_halves_of_characters_are_shown(page: Page) -> None:
    """JavaScript's texts can have them, and so can what a file of JSON says."""
    links = page.run(
        SHOWN
        + """
        const half = String.fromCharCode(0xd800);
        const parent = shown(`a ${half} **${half}** [b](https://e.org/${half}) $${half}$ ${half}`);
        return [...parent.querySelectorAll("a")].map((link) => link.getAttribute("href"));
        """
    )
    assert links == ["https://e.org/%EF%BF%BD"]


def told(page: Page, text: str) -> Any:
    """The HTML of a text."""
    return page.run(SHOWN + "return shown(given[0]).innerHTML", text)


def test_what_answers_have(page: Page) -> None:
    assert told(page, "- [ ] a\n- [x] **b**\n- [c] d\n") == (
        '<ul><li><span class="task" role="img" aria-label="To do">☐</span>a</li>'
        '<li><span class="task" role="img" aria-label="Done">☑</span><strong>b</strong></li><li>[c] d</li></ul>'
    )
    link = '<a href="{0}" target="_blank" rel="noopener noreferrer">{1}</a>'
    assert (
        told(page, "![a *b*](https://e.org/x.png)") == f"<p>{link.format('https://e.org/x.png', 'a b')}</p>"
    )
    assert told(page, "<https://e.org/>") == f"<p>{link.format('https://e.org/', 'https://e.org/')}</p>"
    assert (
        told(page, "[![a](https://e.org/x.png)](https://e.org)")
        == f"<p>{link.format('https://e.org', 'a')}</p>"
    )
    for address in (
        "javascript:alert(1)",
        "JAVASCRIPT:x",
        "data:text/html,x",
        "/metrics",
        "#chat",
        "//e.org",
        "file:///x",
    ):
        assert "<a" not in told(page, f"[a]({address}) ![a]({address}) <{address}>"), address
    assert told(page, "text\n---\nmore") == "<p>text</p><hr><p>more</p>"
    assert told(page, "[1]: https://e.org\n\n[1]") == "<p>[1]: https://e.org</p><p>[1]</p>"
    assert told(page, "3. a\n4. b") == '<ol start="3"><li>a</li><li>b</li></ol>'
    assert told(page, "a\nb\\\nc") == "<p>a<br>b<br>c</p>"
    assert told(page, "<b>&lt;</b>") == "<p>&lt;b&gt;&lt;&lt;/b&gt;</p>"


def test_what_lies_too_deep_is_shown_as_it_is(page: Page) -> None:
    deep = ">" * 60 + "deep"
    html = told(page, f"before\n\n{deep}\n\nafter")
    assert html == f'<p>before</p><p class="plain-text">{deep.replace(">", "&gt;")}</p><p>after</p>'


def test_code_that_turns_the_direction_of_text_says_so(page: Page) -> None:
    assert "turn the direction" in told(page, "```py\nif a: \u202e# b\n```")
    assert "turn the direction" not in told(page, "```py\nif a: # \u05d0\n```")
