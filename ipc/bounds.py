"""Values checked against annotated types, with errors that name the field, what it must be, and the value.

A bound stands once, in the annotation: `Annotated[int, msgspec.Meta(ge=1)]`. msgspec reads it for JSON schemas.
`check_fields` checks a struct by its annotations; `convert_value` checks one value as `msgspec.convert` does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Sized
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from pagewire.ipc.errors import FieldTypeError, FieldValueError
from pagewire.ipc.quoting import MAX_QUOTED, quoted

MAX_INT = 2**63 - 1
MAX_PROCESSORS = 64  # logits processors of an engine, and names of them in a request
NO_BOUNDS = Meta()
Check = Callable[[str, Any], Any]  # (name, value) -> the value, a number as `int` or `float`


def meta_of(kind: Any) -> Meta:
    """The bounds and the description in an annotation; an empty `Meta` if it has none."""
    if get_origin(kind) is Annotated:
        return next((item for item in get_args(kind)[1:] if isinstance(item, Meta)), Meta())
    return Meta()


def plain(kind: Any) -> Any:
    """A type without its annotations."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def interval(meta: Meta) -> str:
    """The numbers that the bounds allow: "at least 1", "1 or 2", "in (0.0, 1.0]"."""
    low = meta.ge if meta.ge is not None else meta.gt
    high = meta.le if meta.le is not None else meta.lt
    if isinstance(low, int) and meta.gt is None and meta.lt is None:
        if high is None:
            return f"at least {low}"
        if high == low + 1:
            return f"{low} or {high}"
    left = "(-inf" if low is None else f"({low}" if meta.gt is not None else f"[{low}"
    right = "inf)" if high is None else f"{high})" if meta.lt is not None else f"{high}]"
    return f"in {left}, {right}"


def within(value: float, meta: Meta) -> bool:
    """True if the bounds allow the value."""
    return (
        (meta.ge is None or value >= meta.ge)
        and (meta.gt is None or value > meta.gt)
        and (meta.le is None or value <= meta.le)
        and (meta.lt is None or value < meta.lt)
    )


# ---------------------------------------------------------------- structs


def check_fields(struct: msgspec.Struct) -> None:
    """Check every field of a struct against its annotation; numbers in it become `int` and `float`.

    Fields of other types than bool, int, float, str, and lists and dicts of these are left alone.

    Raises:
        TypeError: a value of another type. ValueError: it is out of its bounds.
    """
    for name, default, check in field_checks(type(struct)):
        value = getattr(struct, name)
        if value is not default and (checked := check(name, value)) is not value:
            setattr(struct, name, checked)


def check_field(kind: type[msgspec.Struct], name: str, value: Any) -> None:
    """Check a value against the annotation of one field.

    Raises:
        TypeError, ValueError: as `check_fields`.
    """
    for field, default, check in field_checks(kind):
        if field == name and value is not default:
            check(name, value)


@cache
def field_checks(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any, Check], ...]:
    """(name, default, check) of every field that has a check."""
    checks = ((field.name, field.default, check_for(field.type)) for field in msgspec.structs.fields(kind))
    return tuple((name, default, check) for name, default, check in checks if check is not None)


def check_for(kind: Any) -> Check | None:
    """The check of a type; None: values of this type are not checked here."""
    meta, kind = meta_of(kind), plain(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is bool:
        return check_bool
    if kind is int:
        return partial(check_integer, meta=meta)
    if kind is float:
        return partial(check_float, meta=meta)
    if kind is str:
        return partial(check_string, meta=meta)
    if origin is list:
        return check_for_list(arguments[0], meta)
    if origin is dict and (each := check_for(arguments[1])) is not None:
        return partial(
            check_items, kinds=arguments, check_key=check_for(arguments[0]), check_value=each, meta=meta
        )
    if origin in (Union, UnionType):
        return check_for_union(arguments)
    return None


def check_for_list(kind: Any, meta: Meta) -> Check | None:
    """The check of a list. kind: the type of its elements; of those not checked here, only the number is."""
    if (each := check_for(kind)) is not None:
        return partial(check_each, kind=kind, check=each, meta=meta)
    return partial(check_list, meta=meta) if meta.max_length is not None else None


def check_for_union(kinds: tuple[Any, ...]) -> Check | None:
    """The check of a type that may be None, or a string or something else."""
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    checks = {plain(kind) is str: check_for(kind) for kind in kinds}
    if None in checks.values() or len(checks) != len(kinds):
        return None
    text, other = checks.get(True), checks.get(False)

    def either(name: str, value: Any) -> Any:
        if value is None:
            return None
        check = text if text is not None and (other is None or isinstance(value, str)) else other
        assert check is not None, "a union has members"
        return check(name, value)

    return either


def check_bool(name: str, value: Any) -> bool:
    """Refuse what is not True or False."""
    if not isinstance(value, bool):
        raise FieldTypeError(name, f"must be a bool, got {quoted(value)}")
    return value


def check_integer(name: str, value: Any, meta: Meta) -> int:
    """Refuse what is not an integer of 64 bits within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise FieldTypeError(name, f"must be an integer, got {quoted(value)}")
    if not within(value, meta):
        raise FieldValueError(name, f"must be {interval(meta)}, got {quoted(value)}")
    if not -MAX_INT - 1 <= value <= MAX_INT:
        raise FieldValueError(name, f"must be in [-2**63, 2**63 - 1], got {quoted(value)}")
    return value


def check_float(name: str, value: Any, meta: Meta) -> float:
    """Refuse what is not a finite number within the bounds. 2**70 and a number of numpy are numbers, too."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FieldTypeError(name, f"must be a number, got {quoted(value)}")
    finite = -sys.float_info.max <= value <= sys.float_info.max  # math.isfinite fails for huge integers
    if not finite or not within(value, meta):
        raise FieldValueError(name, f"must be {interval(meta)}, got {quoted(value)}")
    return float(value)


def check_string(name: str, value: Any, meta: Meta = NO_BOUNDS) -> str:
    """Refuse what is not a string of Unicode text, or is too long."""
    if not isinstance(value, str):
        raise FieldTypeError(name, f"must be a string, got {quoted(value)}")
    check_length(name, value, meta, "characters")
    check_text(name, value)
    return value


def check_length(name: str, value: Sized, meta: Meta, things: str) -> None:
    """Refuse what has more than `meta.max_length` things.

    Raises:
        ValueError: it has; the text has both numbers.
    """
    if meta.max_length is not None and len(value) > meta.max_length:
        raise FieldValueError(name, f"must have at most {meta.max_length} {things}, got {len(value)}")


def check_text(name: str, text: str) -> None:
    """Refuse a string that is not Unicode text: JSON can spell lone surrogates, UTF-8 cannot.

    Raises:
        ValueError: it holds one.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FieldValueError(name, f"must hold valid Unicode text, got {quoted(text)}") from None


def check_list(name: str, value: Any, meta: Meta) -> list[Any]:
    """Refuse what is not a list, or is too long."""
    if not isinstance(value, list):
        raise FieldTypeError(name, f"must be a list, got {quoted(value)}")
    check_length(name, value, meta, "entries")
    return value


def check_each(name: str, value: Any, kind: Any, check: Check, meta: Meta) -> list[Any]:
    """Refuse what is not a list whose elements pass a check, or is too long. kind: the type of an element."""
    python_type = get_origin(plain(kind)) or plain(kind)
    if isinstance(value, list):
        check_length(name, value, meta, "entries")
        if all_within(value, kind):
            return value
    if not isinstance(value, list) or any(
        isinstance(item, bool) or not isinstance(item, python_type) for item in value
    ):
        raise FieldTypeError(name, f"must be a list of {python_type.__name__}, got {quoted(value)}")
    each = name if name.startswith("each of ") or python_type is str else f"each of {name}"
    for item in value:
        check(each, item)
    return value


def check_items(
    name: str, value: Any, kinds: tuple[Any, ...], check_key: Check | None, check_value: Check, meta: Meta
) -> dict[Any, Any]:
    """Refuse what is not a dict whose keys and values pass their checks, or is too long. kinds: of both."""
    if not isinstance(value, dict):
        raise FieldTypeError(name, f"must map token ids to numbers, got {quoted(value)}")
    check_length(name, value, meta, "entries")
    if all_within(value.keys(), kinds[0]) and all_within(value.values(), kinds[1]):
        return value
    if check_key is not None:
        for key in value:
            check_key(f"each key of {name}", key)
    return {key: check_value(f"{name}[{key}]", item) for key, item in value.items()}


def all_within(values: Collection[Any], kind: Any) -> bool:
    """True if all values are valid integers or floats of a type, found without a call for each of them.

    False leaves it open: one may be invalid, and the check of single values says which and why.
    """
    meta, python_type = meta_of(kind), plain(kind)
    if not values:
        return True
    if python_type not in (int, float) or set(map(type, values)) != {python_type}:
        return False
    if python_type is float and not math.isfinite(sum(values)):  # as it is with NaN, which has no order
        return False
    low, high = min(values), max(values)
    return (
        within(low, meta)
        and within(high, meta)
        and (python_type is float or -MAX_INT <= low <= high <= MAX_INT)
    )


# ---------------------------------------------------------------- names


def unknown_name(kind: str, name: Any, known: Iterable[str]) -> str:
    """The error message for an unknown name, with the nearest known one: unknown option 'a'; did you mean 'b'?"""
    from difflib import get_close_matches  # few programs have errors

    near = get_close_matches(str(name)[:MAX_QUOTED], known, n=1, cutoff=0.8)
    return f"unknown {kind} {quoted(name)}" + (f"; did you mean {near[0]!r}?" if near else "")


# ---------------------------------------------------------------- single values


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Refuse what is not an integer of 64 bits in [low, high].

    Raises:
        TypeError: not an integer. ValueError: out of range.
    """
    check_integer(name, value, Meta(ge=low, le=high))


def check_number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    """Refuse what is not a finite number in [low, high], or in (low, high] with `above`.

    Raises:
        TypeError: not a number. ValueError: out of range.
    """
    most = None if high == math.inf else high
    check_float(name, value, Meta(gt=low, le=most) if above else Meta(ge=low, le=most))


def convert_value(name: str, value: Any, kind: Any) -> Any:
    """The value as `msgspec.convert` makes it of the type: tuples become lists, integers become floats.

    Raises:
        TypeError: a value of another type. ValueError: it is out of its bounds.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem = str(error)
    if ", got `" not in problem and " - at " not in problem:
        raise FieldValueError(name, f"must be {interval(meta_of(kind))}, got {quoted(value)}")
    hint = "; code never crosses a socket: give a name" if callable(value) else ""
    raise FieldTypeError(name, f": {problem[0].lower()}{problem[1:]}{hint}")


def check_num_logprobs(name: str, number: int | None, most: int, vocab_size: int) -> None:
    """Check a number of log probabilities per token: -1 and numbers over the vocabulary ask for all of it.

    most: what the engine allows (`max_logprobs`); -1: any number.

    Raises:
        ValueError: the engine allows fewer.
    """
    if number is None or most == -1:
        return
    asked = vocab_size if number == -1 else min(number, vocab_size)
    if asked > most:
        every = f", all {vocab_size} of the vocabulary," if asked == vocab_size else ""
        raise FieldValueError(
            name,
            f"={number}{every} is over this engine's max_logprobs={most} (start it with more, or with -1)",
        )
