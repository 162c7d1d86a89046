"""Values checked against annotated types, with errors that name the field, what it must be, and the value.

A bound stands once, in the annotation: `Annotated[int, msgspec.Meta(ge=1)]`. msgspec reads it for JSON schemas.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin

import msgspec


def meta_of(kind: Any) -> msgspec.Meta:
    """The bounds and the description in an annotation; an empty `Meta` if it has none."""
    if get_origin(kind) is Annotated:
        return next((item for item in get_args(kind)[1:] if isinstance(item, msgspec.Meta)), msgspec.Meta())
    return msgspec.Meta()


def interval(meta: msgspec.Meta) -> str:
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


def converted(name: str, value: Any, kind: Any) -> Any:
    """The value as `msgspec.convert` makes it of the type: tuples become lists, integers become floats.

    Raises:
        TypeError: a value of another type. ValueError: it is out of its bounds.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem = str(error)
    if ", got `" not in problem and " - at " not in problem:
        raise ValueError(f"{name} must be {interval(meta_of(kind))}, got {value!r}")
    hint = "; code never crosses a socket: give a name" if callable(value) else ""
    raise TypeError(f"{name}: {problem[0].lower()}{problem[1:]}{hint}")
