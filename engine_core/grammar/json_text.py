r"""Rewrites a Lark grammar of texts to the grammar of the same texts as they stand between the quotes of JSON.

There a quote, a backslash and the control characters are escapes, which all begin with a backslash, and other
characters are themselves. llguidance's lexer looks one byte ahead, so a lexeme that may go on with an escape cannot
come before another that begins with one: a regular expression with escapes becomes rules, whose lexemes are single
characters, or runs of characters where the expression repeats one class. Terminals become rules, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from pagewire.engine_core.schedule.attachments import GrammarError

ESCAPED = [*map(chr, range(0x20)), '"', "\\"]
PLAIN = r'[^\x00-\x1f"\\]'  # a character that stands for itself in a JSON string
MAX_DEPTH = 50  # of groups in a regular expression
# A character or a class in a regular expression.
CLASS = re.compile(
    r"\[\^?\]?(?:\[:\w+:\]|\\[xu]\{\w+\}|\\.|[^\]\\\[])*\]|\\[xu]\{[0-9a-fA-F]+\}|\\x[0-9a-fA-F]{2}"
    r"|\\u[0-9a-fA-F]{4}|\\[pP](?:\{\w+\}|\w)|\\[dDsSwWnrtfv]|\\[^A-Za-z0-9]|[^\\\[]",
    re.DOTALL,
)
REPEATED = re.compile(
    r"(\((?:\?:)?)?(\((?:\?:)?)?(?P<class>\.|\[(?:\\.|[^\]\\])+\]|\\[sSdDwW])(?(2)\))(?P<number>[*+])(?(1)\))"
)
QUANTIFIER = re.compile(r"([*+?])[?+]?|\{(\d+)(,?)(\d*)\}\??")
GROUP = re.compile(r"\((?:\?:|\?P?<\w+>|(?!\?))")
# Categories of Unicode that have none of the characters that are escaped.
LETTERS = re.compile(r"\\p(?:\{(?:L|Lu|Ll|Lt|Lm|Lo|N|Nd|Nl|No|M|Mn|Mc|Sc|Sk|So|Sm|Alphabetic)\}|[LNMS])")
POSIX = {
    "alpha": "a-zA-Z",
    "digit": "0-9",
    "alnum": "a-zA-Z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "word": r"\w",
    "space": r"\s",
    "punct": r"!-/:-@\[-`{-~",
    "xdigit": "0-9a-fA-F",
    "blank": r" \t",
}
TOKEN = re.compile(
    r"""
      (?P<space> [^\S\n]+ | \#[^\n]* | //[^\n]* )
    | (?P<range> "(?:\\.|[^"\\])" \s* \.\. \s* "(?:\\.|[^"\\])" )
    | (?P<string> "(?:\\.|[^"\\\n])*" i? )
    | (?P<regex> /(?:\\.|[^/\\\n])+/ [imslux]* )
    | (?P<import> %import [ \t]+ common [^\n]* )
    | (?P<ignore> %ignore \b )
    | (?P<terminal> _?[A-Z][_A-Z0-9-]* (?: \.-?\d+ (?= \s*: ) )? )
    | (?P<other> [?!]?_?[a-z][_a-z0-9-]* | \d+ | -> | ~(?=\s*\d) | \.\.(?=\s*\d) | \{\d*,?\d*\} | [\n:|()\[\]*+?] )
    """,
    re.VERBOSE,
)
# The terminals of Lark's library `common`, as regular expressions.
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "NUMBER": r"([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z_0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}


def json_text_grammar(lark: str) -> str:
    """Return the grammar of the JSON strings, without quotes, whose values follow a grammar in Lark's notation.

    Raises:
        GrammarError: the grammar uses something that cannot be rewritten.
    """
    written: list[str] = []
    ignoring = False
    for kind, text in tokens(lark):
        if kind == "import":
            written.append(imported(text))
        elif kind == "ignore":
            ignoring = True
            written.append(text)
        elif kind == "terminal":
            if ignoring:
                raise GrammarError(
                    f"grammar: %ignore {text}: give its regular expression, as in %ignore /[ ]+/"
                )
            written.append(rule_of(text))
        elif kind == "regex":
            pattern, _, flags = text[1:].rpartition("/")
            written.append(
                whole_regex(pattern, flags) if ignoring else RegexRewriter(pattern, flags).expression()
            )
        elif kind == "range":
            first, last = (chr_of(part) for part in re.findall(r'"(?:\\.|[^"\\])"', text))
            written.append(RegexRewriter(f"[{in_class(first)}-{in_class(last)}]").expression())
        elif kind == "string":
            written.append(string(text))
        else:
            ignoring &= text != "\n"
            written.append(text)
    return "".join(written)


def tokens(lark: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each token of a grammar; comments become a space.

    Raises:
        GrammarError: there is something else than rules, terminals, and imports of Lark's library `common`.
    """
    place = 0
    while place < len(lark):
        match = TOKEN.match(lark, place)
        if match is None or match.lastgroup is None:
            raise GrammarError(
                f"grammar: {lark[place : place + 20]!r} cannot be in the grammar of a text that the model writes "
                "as a JSON string"
            )
        yield match.lastgroup, " " if match.lastgroup == "space" else match[0]
        place = match.end()


def rule_of(terminal: str) -> str:
    """Return the name of the rule that takes a terminal's place; a priority is dropped: rules have none."""
    return "terminal_" + terminal.partition(".")[0].strip("_").replace("-", "_").lower()


def imported(text: str) -> str:
    """Return the rules for the terminals that a line imports.

    Raises:
        GrammarError: there is no such terminal.
    """
    listed = re.fullmatch(r"%import\s+common\s*(?:\.\s*(\w+)\s*(?:->\s*(\w+))?|\(([\w\s,]*)\))\s*", text)
    if listed is None:
        raise GrammarError(f"grammar: {text!r} must be %import common.NAME")
    names = [listed[1]] if listed[1] else [name.strip() for name in listed[3].split(",")]
    if unknown := [name for name in names if name not in COMMON]:
        raise GrammarError(f"grammar: the library common has no terminal {unknown[0]!r}")
    return "\n".join(
        f"{rule_of(listed[2] or name)}: {RegexRewriter(COMMON[name]).expression()}" for name in names
    )


def chr_of(quoted: str) -> str:
    """Return the character that a string of one character stands for."""
    character: str = json.loads(quoted)
    return character


def string(text: str) -> str:
    """Return the expression of a string; escapes are the same in either case."""
    ignores_case = text.endswith("i")
    try:
        value: str = json.loads(text.removesuffix("i"))
    except ValueError:
        raise GrammarError(f"grammar: the string {text} has an escape that JSON has not") from None
    if not ignores_case:
        return literal(value)
    parts = [literal(part) + ("" if part in ESCAPED else "i") for part in split_escapes(value)]
    return f"({' '.join(parts)})" if parts else '""'


def split_escapes(value: str) -> list[str]:
    """Return the parts of a text: each character that is escaped, and what is between."""
    parts = re.split(r'([\x00-\x1f"\\])', value)
    return [part for part in parts if part]


def literal(value: str) -> str:
    """Return the expression of a text as it stands in JSON."""
    return json.dumps(json.dumps(value, ensure_ascii=False)[1:-1], ensure_ascii=False)


def lexeme_of(characters: Sequence[str]) -> list[str]:
    """Return the lexeme of the escapes of some characters; none if there are no characters."""
    return [f"/{'|'.join(re.escape(json.dumps(each)[1:-1]) for each in characters)}/"] if characters else []


def whole_regex(pattern: str, flags: str) -> str:
    """Return an expression that is between lexemes as one lexeme, which must not have any escape.

    Raises:
        GrammarError: it has.
    """
    rewriter = RegexRewriter(pattern, flags)
    rewriter.expression()
    if not rewriter.has_escapes:
        return f"/{pattern}/{flags}"
    if rewriter.only_class is None:
        raise GrammarError(f"grammar: %ignore /{pattern}/ must repeat one class of characters")
    plain, escapes = rewriter.only_class
    members = [*plain, *(lexeme[1:-1] for lexeme in lexeme_of(escapes))]
    return f"/{'|'.join(members)}/"


def in_class(character: str) -> str:
    """Return a character as it may stand in a class of a regular expression."""
    return rf"\x{{{ord(character):x}}}"


class RegexRewriter:
    """Rewrites one regular expression to an expression of rules.

    Attributes:
        has_escapes: some text that matches is written with an escape.
        only_class: of an expression that repeats one class, what `_members` returns.

    Raises:
        GrammarError: the expression is malformed, or has something that cannot be rewritten.
    """

    def __init__(self, pattern: str, flags: str = "") -> None:
        if set(flags) - set("isu"):
            raise GrammarError(
                f"grammar: the flags {flags} of /{pattern}/ are not supported: only i, s and u"
            )
        self._pattern, self._flags, self._place = pattern, flags, 0
        self.has_escapes = False
        self.only_class: tuple[list[str], list[str]] | None = None

    def expression(self) -> str:
        """Return the expression of all texts that match: one lexeme if none of them has an escape."""
        self._place = 0
        rewritten = self._alternatives(0)
        if self._place < len(self._pattern):
            raise self._error("unbalanced ')'")
        if not self.has_escapes:
            return f"/{self._pattern}/{self._flags}"
        if (run := self._run()) is not None:
            return run
        return f"({rewritten})"

    def _run(self) -> str | None:
        """Return the expression of a class that is repeated without bounds; None: the expression is another one."""
        if (match := REPEATED.fullmatch(self._pattern)) is None:
            return None
        self.only_class = plain, escapes = self._members(match["class"])
        runs = [f"/{part}+/{self._flags}" for part in plain]
        return f"({' | '.join([*runs, *lexeme_of(escapes)])}){match['number']}"

    def _alternatives(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} groups in each other")
        choices = [self._sequence(depth)]
        while self._next("|"):
            choices.append(self._sequence(depth))
        return " | ".join(choices)

    def _sequence(self, depth: int) -> str:
        parts = []
        while self._place < len(self._pattern) and self._pattern[self._place] not in "|)":
            parts.append(self._atom(depth) + self._quantifier())
        return " ".join(parts) or '""'

    def _quantifier(self) -> str:
        """Return the repetition that comes next; "" if there is none. Lazy ones match the same texts."""
        match = QUANTIFIER.match(self._pattern, self._place)
        if match is None:
            return ""
        self._place = match.end()
        return match[1] or f"{{{match[2]}{match[3]}{match[4]}}}"

    def _atom(self, depth: int) -> str:
        character = self._pattern[self._place]
        if character == "(":
            match = GROUP.match(self._pattern, self._place)
            if match is None:
                raise self._error("a group with '(?' that is neither (?:...) nor named")
            self._place = match.end()
            inner = self._alternatives(depth + 1)
            if not self._next(")"):
                raise self._error("unbalanced '('")
            return f"({inner})"
        if character in "^$*+?{":
            raise self._error(f"{character!r} where no character, class or group comes before")
        match = CLASS.match(self._pattern, self._place)
        if match is None:
            raise self._error(f"{self._pattern[self._place : self._place + 10]!r}")
        self._place = match.end()
        plain, escapes = self._members(match[0])
        members = [*(f"/{part}/{self._flags}" for part in plain), *lexeme_of(escapes)]
        return members[0] if len(members) == 1 else f"({' | '.join(members)})"

    def _members(self, each: str) -> tuple[list[str], list[str]]:
        """Return the patterns of a class's characters that stand for themselves, and its other characters."""
        try:
            escaped = members_of(each, self._flags)
        except ValueError:
            raise self._error(f"the class {each}") from None
        self.has_escapes |= bool(escaped)
        if escaped and (each in escaped or (each.startswith("\\") and each[1:] not in "DSWs")):
            return [], escaped  # one character, not a class
        inner = ("[\\s\\S]" if "s" in self._flags else "[^\\n]") if each == "." else each
        if inner in ("{", "}", "-", "&", "~", "^", "]", "[", '"'):
            inner = re.escape(inner)
        return [f"[{inner}&&{PLAIN}]"], escaped

    def _next(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._place)
        self._place += len(text) if found else 0
        return found

    def _error(self, what: str) -> GrammarError:
        return GrammarError(
            f"grammar: /{self._pattern}/ has {what}, which a text in a JSON string cannot have here"
        )


def members_of(each: str, flags: str) -> list[str]:
    """Return the characters of a class that are escaped in JSON.

    Raises:
        ValueError: the class is not understood.
    """
    pattern = re.sub(r"\\[xu]\{([0-9a-fA-F]+)\}", lambda match: f"\\U{int(match[1], 16):08x}", each)
    pattern = re.sub(r"\[:(\w+):\]", lambda match: POSIX.get(match[1], r"\p"), pattern)
    pattern = LETTERS.sub(r"\\u20ac", pattern)  # it stands for all characters that are not escaped
    try:
        compiled = re.compile(pattern, re.DOTALL if "s" in flags else 0)
    except (re.error, OverflowError):
        raise ValueError(each) from None
    return [character for character in ESCAPED if compiled.fullmatch(character)]
