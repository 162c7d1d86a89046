"""Where chat templates run: Jinja's sandbox, with limits.

Templates come with models, or with requests where that is allowed, and are not trusted. Jinja's sandbox keeps them
from everything but plain data. Here they are also kept from stalling a frontend, or filling its memory: each loop
and call looks at the clock, and whatever makes long texts of short ones is asked beforehand how long.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_eval_context
from jinja2.ext import Extension
from jinja2.filters import do_join
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARS = 1 << 17  # of a template; the longest that models come with have a fifth of it
MAX_CHARS = 1 << 24  # of a text, or items of a list
MAX_BITS = 1 << 12  # of an integer
MAX_SECONDS = 5.0  # of processor time for one rendering
WIDE_FORMAT = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|\{[^}]*\{")  # a width of many digits, or one that is computed

clock = threading.local()


def compile_source(source: str) -> jinja2.Template:
    """A template, ready to render.

    Raises:
        ValueError: it is too long, or not valid.
    """
    if len(source) > MAX_SOURCE_CHARS:
        raise ValueError(
            f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are allowed"
        )
    sandbox = environment()
    try:
        tree = Metered().visit(sandbox.parse(source))
        code = sandbox.compile(tree)
    except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the chat template is not valid: {error}") from error
    return jinja2.Template.from_code(sandbox, code, sandbox.make_globals(None))


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The text.

    Raises:
        ValueError: the template refuses the conversation, fails on it, or takes too much time or room.
    """
    clock.end = time.thread_time() + MAX_SECONDS
    parts, size = [], 0
    try:
        for part in template.generate(variables):
            size += len(part)
            check_size(size)
            parts.append(part)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses the conversation: {error.message or error}") from error
    except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"the chat template fails on the conversation: {error}") from error
    finally:
        clock.end = None
    return "".join(parts)


# ---------------------------------------------------------------- limits


def check_time() -> None:
    """Raise ValueError when the rendering of this thread has taken its time."""
    end = getattr(clock, "end", None)
    if end is not None and time.thread_time() > end:
        raise ValueError(f"it takes more than {MAX_SECONDS:g} s")


def check_size(size: int) -> None:
    """Raise ValueError for a text or a list that is too long."""
    if size > MAX_CHARS:
        raise ValueError(f"it makes a text of more than {MAX_CHARS} characters")


def checked(value: Any) -> Any:
    """The value, if it is not too long."""
    if isinstance(value, (str, list, tuple)):
        check_size(len(value))
    return value


def check_growth(name: str, subject: Any, arguments: tuple[Any, ...]) -> None:
    """Refuse a method or filter that would make a far longer text than it is given.

    Raises:
        ValueError: it would.
    """
    for number in arguments:
        if isinstance(number, int):
            check_size(number)  # a width
    if not isinstance(subject, str) or not arguments:
        return
    first = arguments[0]
    if name == "replace" and isinstance(first, str) and len(arguments) > 1:
        check_size(subject.count(first) * len(str(arguments[1])))
    elif name in ("format", "format_map") and WIDE_FORMAT.search(subject):
        raise ValueError("it formats with a width that is too large, or not given as a number")
    elif name == "join":
        check_join(first, subject)
    elif name in ("indent", "expandtabs"):
        width = first if isinstance(first, int) else len(str(first))
        check_size(width * (subject.count("\n") + subject.count("\t") + 1))


def check_join(items: Any, separator: str) -> None:
    """Refuse to join what would be too long.

    Raises:
        ValueError: it would.
    """
    if isinstance(items, (str, list, tuple)):
        check_size(len(separator) * len(items) + sum(len(item) for item in items if isinstance(item, str)))


def bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that keeps to the limits."""

    @functools.wraps(function)  # with Jinja's own marks on it
    def call(*args: Any, **kwargs: Any) -> Any:
        check_time()
        given = args[1:] if hasattr(function, "jinja_pass_arg") else args
        check_growth(name, given[0], (*given[1:], *kwargs.values()))
        return checked(function(*args, **kwargs))

    return call


def metered(items: Iterable[Any]) -> Iterator[Any]:
    """What a loop goes through."""
    for item in items:
        check_time()
        yield item


@pass_eval_context
def join(context: nodes.EvalContext, items: Any, d: str = "", attribute: str | int | None = None) -> Any:
    """Jinja's filter, where the length is known before."""
    items = items if isinstance(items, str) else list(items)
    if attribute is None:
        check_join(items, d)
    return do_join(context, items, d, attribute)


def concatenated(items: list[Any]) -> str:
    """What `~` makes."""
    texts = [str(item) for item in items]
    check_size(sum(map(len, texts)))
    return "".join(texts)


class Metered(NodeTransformer):
    """Makes loops and `~` go through `metered` and `concatenated`."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        """A loop."""
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "metered", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        """`a ~ b`."""
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(items, "concatenated", [], [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, whose operators and calls keep to the limits."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`.

        Raises:
            ValueError: that would be too long.
        """
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise ValueError("it computes with numbers that are too large")
        elif operator == "*":
            sizes = [len(side) if isinstance(side, (str, list, tuple)) else side for side in (left, right)]
            if all(isinstance(size, int) for size in sizes):
                check_size(sizes[0] * sizes[1])
        elif operator == "%" and isinstance(left, str):
            check_growth("format", left, (right,))
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, type(left)):
            check_size(len(left) + len(right))
        return checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function, a macro or a method.

        Raises:
            ValueError: that takes too much time or room.
        """
        check_time()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        name, subject = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        check_growth(name, subject, (*args, *kwargs.values()))
        return checked(super().call(__context, __obj, *args, **kwargs))


class Generation(Extension):
    """`{% generation %}` marks what the assistant says, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's body, as if it stood there without the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=1)
def environment() -> Sandbox:
    """What chat templates are written for."""
    sandbox = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    del sandbox.globals["lipsum"]
    sandbox.filters |= {"tojson": to_json, "join": join}
    sandbox.filters |= {name: bounded(name, function) for name, function in sandbox.filters.items()}
    sandbox.filters |= {"metered": metered, "concatenated": concatenated}
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = strftime_now
    return sandbox


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter would escape it for HTML."""
    if indent is not None and indent > 100:
        raise ValueError("it indents JSON too far")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> NoReturn:
    """How templates refuse a conversation."""
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    """The local time."""
    return datetime.now().strftime(form)
