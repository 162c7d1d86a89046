"""Jinja's sandbox for chat templates, with limits of time and memory.

Templates come with models, or with requests where that is allowed, and are not trusted. Jinja's sandbox gives them
access to plain data only. The limits here keep them from blocking a frontend or filling its memory: each loop and
call checks the time, and operations that can make a long text from a short one compute its length first.
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

MAX_SOURCE_CHARS = (
    1 << 17
)  # characters of a template; the longest templates of known models have a fifth of this
MAX_CHARS = 1 << 24  # characters of a text, or items of a list
MAX_BITS = 1 << 12  # bits of an integer
MAX_SECONDS = 5.0  # processor time of one rendering
WIDE_FORMAT = re.compile(
    r"\d{5}|%[^a-zA-Z%]*\*|\{[^}]*\{"
)  # formats with a width of many digits or a computed one

clock = threading.local()  # `end`: the thread time at which its rendering must end; None: no limit


def compile_source(source: str) -> jinja2.Template:
    """Compile a template with the checks of time and size.

    Raises:
        ValueError: the template is too long, or invalid.
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
    """Render a template and return the text.

    Raises:
        ValueError: the template rejects the conversation, fails on it, or exceeds the limits of time or size.
    """
    clock.end = time.thread_time() + MAX_SECONDS
    parts, size = [], 0
    try:
        for part in template.generate(variables):
            size += len(part)
            check_size(size)
            parts.append(part)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template rejects the conversation: {error.message or error}") from error
    except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"the chat template fails on the conversation: {error}") from error
    finally:
        clock.end = None
    return "".join(parts)


# ---------------------------------------------------------------- limits


def check_time() -> None:
    """Raise ValueError if this thread's rendering has exceeded its time."""
    end = getattr(clock, "end", None)
    if end is not None and time.thread_time() > end:
        raise ValueError(f"it takes more than {MAX_SECONDS:g} s")


def check_size(size: int) -> None:
    """Raise ValueError for a text or a list that is too long."""
    if size > MAX_CHARS:
        raise ValueError(f"it creates a text of more than {MAX_CHARS} characters")


def checked(value: Any) -> Any:
    """Return the value; raise ValueError if it is too long."""
    if isinstance(value, (str, list, tuple)):
        check_size(len(value))
    return value


def check_growth(name: str, subject: Any, arguments: tuple[Any, ...]) -> None:
    """Check the length of the result before a method or filter is called on `subject`.

    Raises:
        ValueError: the result would be too long.
    """
    for number in arguments:
        if isinstance(number, int):
            check_size(number)  # it may be a width
    if not isinstance(subject, str) or not arguments:
        return
    first = arguments[0]
    if name == "replace" and isinstance(first, str) and len(arguments) > 1:
        check_size(subject.count(first) * len(str(arguments[1])))
    elif name in ("format", "format_map") and WIDE_FORMAT.search(subject):
        raise ValueError("it formats with a width that is too large, or not a literal number")
    elif name == "join":
        check_join(first, subject)
    elif name in ("indent", "expandtabs"):
        width = first if isinstance(first, int) else len(str(first))
        check_size(width * (subject.count("\n") + subject.count("\t") + 1))


def check_join(items: Any, separator: str) -> None:
    """Check the length of the joined items.

    Raises:
        ValueError: the text would be too long.
    """
    if isinstance(items, (str, list, tuple)):
        check_size(len(separator) * len(items) + sum(len(item) for item in items if isinstance(item, str)))


def bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter with the checks of time and size."""

    @functools.wraps(function)  # copies Jinja's attributes, too
    def call(*args: Any, **kwargs: Any) -> Any:
        check_time()
        given = args[1:] if hasattr(function, "jinja_pass_arg") else args
        check_growth(name, given[0], (*given[1:], *kwargs.values()))
        return checked(function(*args, **kwargs))

    return call


def metered(items: Iterable[Any]) -> Iterator[Any]:
    """Yield a loop's items, checking the time at each."""
    for item in items:
        check_time()
        yield item


@pass_eval_context
def join(context: nodes.EvalContext, items: Any, d: str = "", attribute: str | int | None = None) -> Any:
    """Jinja's filter `join`, with the length checked before."""
    items = items if isinstance(items, str) else list(items)
    if attribute is None:
        check_join(items, d)
    return do_join(context, items, d, attribute)


def concatenated(items: list[Any]) -> str:
    """Concatenate the operands of `~`, with the length checked before."""
    texts = [str(item) for item in items]
    check_size(sum(map(len, texts)))
    return "".join(texts)


class Metered(NodeTransformer):
    """Rewrites loops and `~` to use the filters `metered` and `concatenated`."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        """Rewrite a loop."""
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "metered", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        """Rewrite `a ~ b`."""
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(items, "concatenated", [], [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with operators and calls checked against the limits."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return `left operator right`.

        Raises:
            ValueError: the result would be too long.
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
            ValueError: the time is over, or the result would be too long.
        """
        check_time()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        name, subject = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        check_growth(name, subject, (*args, *kwargs.values()))
        return checked(super().call(__context, __obj, *args, **kwargs))


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's body, as if the tag were absent."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=1)
def environment() -> Sandbox:
    """Return the environment that chat templates expect: transformers' options, filters and functions."""
    sandbox = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
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
    """Return JSON without escapes for HTML, which Jinja's own filter adds."""
    if indent is not None and indent > 100:
        raise ValueError("it indents JSON by more than 100")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> NoReturn:
    """Reject the conversation (a function for templates)."""
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    """Return the formatted local time (a function for templates)."""
    return datetime.now().strftime(form)
