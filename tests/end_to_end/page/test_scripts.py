"""The parts of the page's scripts that are pure, in a real browser."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("selenium", reason="the page is tested through Selenium, which is not installed")

from tests.end_to_end.page.browser import Page


def test_events_are_the_same_however_they_are_cut(page: Page) -> None:
    result = page.run(
        """
        const { EventParser } = await import("/page/net/sse.js");
        const text = ": hello\\r\\ndata: {\\"a\\": 1}\\r\\n\\r\\nevent: x\\rdata:one\\rdata: two\\r\\r" +
            "id: 3\\n\\ndata\\n\\ndata: é€😀\\n\\ndata: [DONE]\\n\\ndata: never ended";
        const pieces = (size) => {
            const parser = new EventParser();
            const events = [];
            for (let at = 0; at < text.length; at += size) events.push(...parser.feed(text.slice(at, at + size)));
            return JSON.stringify(events);
        };
        return [...Array(text.length).keys()].map((n) => pieces(n + 1));
        """
    )
    assert len(set(result)) == 1
    assert [(event["event"], event["data"]) for event in json.loads(result[0])] == [
        ("message", '{"a": 1}'),
        ("x", "one\ntwo"),
        ("message", ""),
        ("message", "é€😀"),
        ("message", "[DONE]"),
    ]


def test_metrics_are_read_and_counted(page: Page) -> None:
    result = page.run(
        """
        const { History, parse, quantile, read } = await import("/page/engine/metrics.js");
        const scrape = (tokens, fast, slow) => `# HELP vllm:x A comment.
vllm:num_requests_running{model_name="a",engine="0"} 2.0
vllm:num_requests_running{model_name="a",engine="1"} 3.0
vllm:generation_tokens_total{model_name="a \\\\"quoted\\\\" {name}"} ${tokens}
vllm:gpu_cache_usage_perc 0.25
vllm:prefix_cache_queries_total ${2 * tokens}
vllm:prefix_cache_hits_total ${tokens}
vllm:time_to_first_token_seconds_bucket{le="0.1"} ${fast}
vllm:time_to_first_token_seconds_bucket{le="1.0"} ${fast + slow}
vllm:time_to_first_token_seconds_bucket{le="+Inf"} ${fast + slow}
`;
        const history = new History(60);
        history.push(read(parse(scrape(1000, 50, 50))), 10);
        history.push(read(parse(scrape(1300, 60, 50))), 12);
        const last = (points) => points.at(-1)[1];
        const before = [last(history.rate("generated")), last(history.share("hits", "queries")),
            last(history.quantile("ttft", 0.5)), last(history.gauge("running")), last(history.gauge("kv"))];
        history.push(read(parse(scrape(5, 1, 0))), 13); // the core began anew
        return {
            before,
            anew: history.scrapes.length,
            label: parse(scrape(1, 1, 1)).get("vllm:generation_tokens_total")[0].labels.model_name,
            missing: history.last.waiting ?? null,
            quantiles: [0, 0.25, 0.5, 0.95, 1].map((q) => quantile([[1, 10], [2, 20], [Infinity, 20]], q)),
            beyond: quantile([[1, 0], [Infinity, 5]], 0.5),
            nothing: Number.isNaN(quantile([], 0.5)) && Number.isNaN(quantile([[1, 0]], 0.5)),
        };
        """
    )
    assert result["before"] == [150, 0.5, pytest.approx(0.05), 5, 0.25]
    assert result["anew"] == 1
    assert result["label"] == 'a "quoted" {name}'
    assert result["missing"] is None
    assert result["quantiles"] == [0, 0.5, 1, 1.9, 2]
    assert result["beyond"] == 1
    assert result["nothing"] is True


def test_what_is_slow_to_show_is_shown_less_often(page: Page) -> None:
    """Work that took 100 ms waits for 300 ms; what took no time, for a frame. Asked often, it is done once."""
    result = page.run(
        """
        const { paced } = await import("/page/dom.js");
        const { now } = performance;
        const { requestAnimationFrame: frame, setTimeout: wait } = window;
        let [clock, took, pauses, done] = [1000, 100, [], 0];
        performance.now = () => clock;
        window.requestAnimationFrame = (run) => (pauses.push("frame"), wait(run, 0));
        window.setTimeout = (run, pause) => (pauses.push(pause), wait(run, 0));
        const ask = paced(() => ((done += 1), (clock += took)));
        const passed = () => new Promise((resolve) => wait(resolve, 50));
        for (const [next, pause] of [[0, 0], [0, 100], [100, 200], [0, 16]]) {
            clock += pause;
            ask();
            ask();
            await passed();
            took = next;
        }
        ask();
        ask.cancel();
        window.requestAnimationFrame = frame;
        window.setTimeout = wait;
        performance.now = now;
        return { pauses, done };
        """
    )
    assert result == {"pauses": ["frame", 200, "frame", "frame", 300], "done": 4}


def test_markdown_makes_few_elements_and_no_others(page: Page) -> None:
    result = page.run(
        """
        const { show } = await import("/page/text/markdown.js");
        const text = given[0];
        const [whole, grown] = [document.createElement("div"), document.createElement("div")];
        show(whole, text);
        for (let end = 1; end <= text.length; end += 1) show(grown, text.slice(0, end));
        const tags = new Set([...whole.querySelectorAll("*")].map((node) => node.localName));
        return {
            same: whole.innerHTML === grown.innerHTML,
            tags: [...tags].sort(),
            links: [...whole.querySelectorAll("a")].map((a) => a.getAttribute("href")),
            code: whole.querySelector("pre").textContent,
            items: [...whole.querySelectorAll("ol > li")].map((item) => item.firstChild.textContent),
            nested: whole.querySelector("ol > li ul > li")?.textContent,
            text: whole.textContent,
        };
        """,
        "# Title\n\nA **bold** and *slanted* `co*d*e`, 2 * 3 * 4, snake_case_name, $5 and $6.\n\n"
        "1. one\n   - inner\n2. two\n\n> said\n> - a list\n\n```py\nif a < b:\n    <b>x</b>\n```\n"
        "<img src=x onerror=alert(1)><script>alert(2)</script>\n"
        "[good](https://example.org/a) [bad](javascript:alert(3)) [data](data:text/html,x)",
    )
    assert result["same"] is True
    assert (
        " ".join(result["tags"]) == "a blockquote br button code div em h3 li ol p pre span strong svg ul use"
    )
    assert result["links"] == ["https://example.org/a"]
    assert result["code"] == "if a < b:\n    <b>x</b>"
    assert result["items"] == ["one", "two"]
    assert result["nested"] == "inner"
    for literal in (
        "2 * 3 * 4",
        "snake_case_name",
        "$5 and $6",
        "co*d*e",
        "<img src=x onerror=alert(1)>",
        "[bad](javascript:",
    ):
        assert literal in result["text"]


def test_tables_have_cells_and_sides(page: Page) -> None:
    result = page.run(
        """
        const { show } = await import("/page/text/markdown.js");
        const [whole, grown] = [document.createElement("div"), document.createElement("div")];
        show(whole, given[0]);
        for (let end = 1; end <= given[0].length; end += 1) show(grown, given[0].slice(0, end));
        const told = (cell) => `${cell.localName} ${cell.className} ${cell.textContent}`;
        const row = (tr) => [...tr.children].map(told);
        return {
            same: whole.innerHTML === grown.innerHTML,
            rows: [...whole.querySelectorAll("tr")].map(row),
            after: whole.lastChild.textContent,
        };
        """,
        "| name | `size` |\n|---|--:|\n| a \\| b | **1** |\n| short |\n\nAfter it a | b",
    )
    assert result["same"] is True
    assert result["rows"] == [
        ["th left name", "th right size"],
        ["td left a | b", "td right 1"],
        ["td left short", "td right "],
    ]
    assert result["after"] == "After it a | b"


def test_code_is_coloured_and_stays_what_it_is(page: Page) -> None:
    sources = {
        "python": 'def f(x):  # "not a string"\n    return f"{x}" + \'a\\\'b\' * 0x1F\n"""open',
        "js": "const a = `x ${1}`; // done\n/* never closed",
        "json": '{"a": [1, true, null]}',
        "unknown": "if x: 1",
        "": "plain",
    }
    result = page.run(
        """
        const { coloured } = await import("/page/text/code.js");
        return Object.fromEntries(Object.entries(given[0]).map(([language, source]) => {
            const node = document.createElement("code");
            node.append(...coloured(source, language));
            return [language, {
                text: node.textContent,
                spans: [...node.children].map((span) => `${span.className} ${span.textContent}`),
            }];
        }));
        """,
        sources,
    )
    assert {language: found["text"] for language, found in result.items()} == sources
    assert result["python"]["spans"] == [
        "c-keyword def",
        "c-call f",
        'c-comment # "not a string"',
        "c-keyword return",
        'c-string f"{x}"',
        "c-string 'a\\'b'",
        "c-number 0x1F",
        'c-string """open',
    ]
    assert result["js"]["spans"][0] == "c-keyword const"
    assert result["js"]["spans"][-1] == "c-comment /* never closed"
    assert result["unknown"]["spans"] == result[""]["spans"] == []


def test_formulas_are_mathml_or_their_source(page: Page) -> None:
    result = page.run(
        """
        const { formula } = await import("/page/text/formula.js");
        const bare = (node) => node.localName === "code" ? `source ${node.textContent}` : outline(node.firstChild);
        const outline = (node) => node.children.length
            ? `${node.localName}(${[...node.children].map(outline).join(" ")})` : node.textContent;
        return given[0].map((source) => bare(formula(source, true)));
        """,
        [
            r"\frac{a}{b^2}",
            r"\sum_{i=1}^n x_i",
            r"\sqrt[3]{x} \le \alpha",
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
            r"\mathbb{R} \text{ is real}",
            r"f'(x) - 1",
            r"\left( \frac{1}{2} \right)",
            r"\unknown{x}",
            r"\frac{a}",
            "{",
        ],
    )
    assert result == [
        "mfrac(a msup(b 2))",
        "mrow(munderover(∑ mrow(i = 1) n) msub(x i))",
        "mrow(mroot(x 3) ≤ \u03b1)",
        "mrow(( mtable(mtr(mtd(1) mtd(2)) mtr(mtd(3) mtd(4))) ))",
        "mrow(\u211d \u00a0is\u00a0real)",
        "mrow(msup(f \u2032) ( x ) \u2212 1)",
        "mrow(( mfrac(1 2) ))",
        r"source \unknown{x}",
        r"source \frac{a}",
        "source {",
    ]


def test_failed_questions_are_not_sent_along(page: Page) -> None:
    """The messages of a request, by what the conversation has."""
    result = page.run(
        """
        const { add, branch, choose, create, path, prune, sent, siblings } =
            await import("/page/chat/conversation.js");
        const talk = create();
        const say = (content) => add(talk, { role: "user", content });
        const answer = (content, more = {}) => add(talk, { role: "assistant", content, ...more });
        const first = say("one");
        answer("1");
        say("fails");
        answer("", { error: "400" });
        say("cut");
        answer("half of", { error: "lost" });
        say("call");
        answer("", { calls: [{ id: "c", name: "f", arguments: "{}" }] });
        add(talk, { role: "tool", call: "c", content: "7" });
        answer("", { note: "Stopped" });
        const last = say("last");
        const told = ({ content, tool_calls }) => content ?? tool_calls[0].function.name;
        const texts = (messages) => messages.map(told);
        const all = texts(sent(talk));
        talk.since = last.id;
        const since = texts(sent(talk));
        talk.since = null;
        const end = talk.leaf;
        talk.leaf = null; // another version of the first question
        const other = say("other");
        const versions = siblings(talk, first).length;
        const apart = path(talk).map(({ content }) => content);
        choose(talk, first);
        const back = talk.leaf === end;
        const copy = branch(talk, path(talk)[1]);
        prune(talk, other);
        const picture = "data:image/png;base64,AAAA";
        add(talk, { role: "user", content: "see", pictures: [picture] });
        return {
            all, since, versions, apart, back,
            copied: path(copy).map(({ content }) => content), own: copy.id !== talk.id,
            left: siblings(talk, first).length,
            parts: sent(talk).at(-1).content,
        };
        """
    )
    assert result["all"] == ["one", "1", "cut", "half of", "last"]
    assert result["since"] == ["last"]
    assert (result["versions"], result["apart"], result["back"]) == (2, ["other"], True)
    assert result["copied"] == ["one", "1"] and result["own"] is True
    assert result["left"] == 1
    assert [part["type"] for part in result["parts"]] == ["image_url", "text"]
