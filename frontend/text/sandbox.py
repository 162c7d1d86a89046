"""Jinja's sandbox for chat templates, with limits of time and memory.

Templates come with models, or with requests where that is allowed, and are not trusted. Jinja's sandbox gives them
access to plain data only. The limits here keep them from blocking a frontend or filling its memory: each loop and
call checks the time, and operations that can make a long text from a short one compute its length first.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes, pass_environment, pass_eval_context
from jinja2.ext import Extension
from jinja2.filters import do_join, do_sum, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pagewire.frontend.text.growth import (
    MAX_BITS,
    OF_ITEMS,
    OF_TEXT,
    begin,
    check_growth,
    check_join,
    check_num_items,
    check_time,
    check_value_size,
    count_items,
    count_value,
    end,
    spend,
    text_size,
)

MAX_SOURCE_CHARS = (
    1 << 17
)  # characters of a template; the longest templates of known models have a fifth of this
MAX_TIME_FORMAT = 1000  # characters


def compile_source(source: str) -> jinja2.Template:
    """Compile a template with the checks of time and size.

    Raises:
        ValueError: the template is too long, or invalid.
    """
    if len(source) > MAX_SOURCE_CHARS:
        raise ValueError(
            f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are allowed"
        )
    sandbox = sandbox_environment()
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
    begin()
    parts, size = [], 0
    try:
        for part in template.generate(variables):
            size += len(part)
            check_value_size(size)
            parts.append(part)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template rejects the conversation: {error.message or error}") from error
    except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"the chat template fails on the conversation: {error}") from error
    finally:
        end()
    return "".join(parts)


# ---------------------------------------------------------------- limits


def bound_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter with the checks of time and size."""

    @functools.wraps(function)  # copies Jinja's attributes, too
    def call(*args: Any, **kwargs: Any) -> Any:
        check_time()
        place = 1 if hasattr(function, "jinja_pass_arg") else 0
        if place < len(args):
            args = (*args[:place], bounded_subject(name, args[place]), *args[place + 1 :])
            check_growth(name, args[place], (*args[place + 1 :], *kwargs.values()))
        return count_value(function(*args, **kwargs))

    return call


def bounded_subject(name: str, subject: Any) -> Any:
    """The value to call a filter on, after a check of its size; an iterator stops where it yields too much."""
    if name in OF_ITEMS and isinstance(subject, Iterator):
        return count_items(subject)
    if name in OF_TEXT and not isinstance(subject, (str, Iterator)):
        text_size(subject)
    return subject


@pass_eval_context
def join_items(
    context: nodes.EvalContext, items: Any, d: str = "", attribute: str | int | None = None
) -> Any:
    """Jinja's filter `join`, with the length checked before."""
    items = items if isinstance(items, str) else list(count_items(items))
    if attribute is None:
        check_join(items, str(d))
    else:
        items = list(map(make_attrgetter(context.environment, attribute), items))
        check_join(items, str(d))
    return do_join(context, items, d)


@pass_environment
def add_up(environment: Sandbox, numbers: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    """Jinja's filter `sum`, for numbers only: it would join lists as well."""
    if not isinstance(start, (int, float)):
        raise ValueError("it adds up what are no numbers")
    return do_sum(environment, numbers, attribute, start)


def concatenate_items(items: list[Any]) -> str:
    """Concatenate the operands of `~`, with the length checked before."""
    check_value_size(sum(map(text_size, items)))
    return cast(str, count_value("".join(map(str, items))))


def slice_value(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """Return `value[start:stop:step]`, and count it: code of Jinja's own would not."""
    return count_value(value[start:stop:step])


@pass_eval_context
def count_written(context: nodes.EvalContext, value: Any) -> Any:
    """Count a value that is written, in macros and blocks, too; Jinja converts it to a text.

    It takes the context so that Jinja cannot call it, nor what makes the value, while it compiles.
    """
    spend(4 * text_size(value))
    return value


class Metered(NodeTransformer):
    """Rewrites loops, `~` and slices to use the filters `metered`, `concatenated` and `sliced`."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        """Rewrite a loop."""
        self.generic_visit(node)
        size = nodes.Const(4 * sum(len(part.data) for part in node.find_all(nodes.TemplateData)))
        node.iter = nodes.Filter(node.iter, "metered", [size], [], None, None, lineno=node.lineno)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        """Rewrite a slice."""
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = [part or nodes.Const(None) for part in (node.arg.start, node.arg.stop, node.arg.step)]
        return nodes.Filter(node.node, "sliced", bounds, [], None, None, lineno=node.lineno)

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
                check = (
                    check_value_size if isinstance(left, str) or isinstance(right, str) else check_num_items
                )
                check(sizes[0] * sizes[1])
        elif operator == "%" and isinstance(left, str):
            check_growth("%", left, right if isinstance(right, tuple) else (right,))
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, type(left)):
            (check_value_size if isinstance(left, str) else check_num_items)(len(left) + len(right))
        return count_value(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function, a macro or a method.

        Raises:
            ValueError: the time is over, or the result would be too long.
        """
        check_time()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        name, subject = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if isinstance(subject, str) and name == "join" and args and isinstance(args[0], Iterator):
            args = (list(count_items(args[0])), *args[1:])
        check_growth(name, subject, (*args, *kwargs.values()))
        return count_value(super().call(__context, __obj, *args, **kwargs))


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's body, as if the tag were absent."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=1)
def sandbox_environment() -> Sandbox:
    """Return the environment that chat templates expect: transformers' options, filters and functions."""
    sandbox = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
        finalize=count_written,
        optimized=False,  # what it would compute while it compiles has no limits
    )
    del (
        sandbox.globals["lipsum"],
        sandbox.filters["pprint"],
        sandbox.filters["urlize"],
    )  # no prompt needs them
    sandbox.filters |= {"tojson": to_json, "join": join_items, "sum": add_up}
    sandbox.filters |= {name: bound_filter(name, function) for name, function in sandbox.filters.items()}
    sandbox.filters |= {"metered": count_items, "concatenated": concatenate_items, "sliced": slice_value}
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
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    parts, size = [], 0
    for part in encoder.iterencode(
        value
    ):  # a part at a time only with an indent, which can make it much longer
        size += len(part)
        check_value_size(size)
        parts.append(part)
    return "".join(parts)


def raise_exception(message: str) -> NoReturn:
    """Reject the conversation (a function for templates)."""
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    """Return the formatted local time (a function for templates)."""
    if len(form) > MAX_TIME_FORMAT:
        raise ValueError(f"it formats the time with more than {MAX_TIME_FORMAT} characters")
    return datetime.now().strftime(form)
