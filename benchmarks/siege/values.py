"""Random values of any type that messages and bodies have: right ones, those at and beyond bounds, wrong ones."""

from __future__ import annotations

import random
import string
from typing import Any

import msgspec
from msgspec import inspect

from .attack import log_uniform

MAX_TEXT = 1 << 20  # characters of the longest text
MAX_LIST = 200_000  # items of the longest list
MAX_DEPTH = 500  # levels of the deepest value: Python's own encoder must be able to write it
DISTINCT = 16  # items of a long list that are drawn; the others repeat them

INTEGERS = (0, 1, -1, 2, 64, 65, 1024, 2**31 - 1, 2**31, 2**53, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-320, 1e308, -1e308, 2.0, -2.0, 100.0)
PIECES = (
    *(
        "a",
        " ",
        "\n",
        "\0",
        "\x1b[2J",
        "é",
        "中",
        "👩‍👩‍👧",
        "\u202e",
        "\u0301",
        "ﷺ",
        "\ufeff",
        "\u2028",
        "<|im_end|>",
    ),
    *("the ", "{{", "{%", "%s", "\\", '"', "'", "[", "(", "a?", "../", "\r\n", "%00", "$(id)", "token_id:1 "),
)


class Values:
    """Draws values.

    wild: the share of parts that are of another type. large: that of parts that are long.
    packed: values are such as msgpack can hold: integers have 64 bits.
    """

    def __init__(
        self, rng: random.Random, wild: float = 0.1, large: float = 0.05, packed: bool = False
    ) -> None:
        self._rng, self._wild, self._large, self._packed = rng, wild, large, packed

    def of(self, kind: inspect.Type, depth: int = 0) -> Any:
        """A value of `kind`, in plain Python; a struct as the map or the list that it is encoded as."""
        if self._rng.random() < self._wild:
            return self.anything()
        match kind:
            case inspect.Metadata():
                return self.of(kind.type, depth)
            case inspect.UnionType():
                return self.of(self._rng.choice(kind.types), depth)
            case inspect.LiteralType():
                return self._rng.choice(kind.values)
            case inspect.EnumType():
                return self._rng.choice(list(kind.cls)).value
            case inspect.StructType():
                return self.struct(kind, depth)
            case inspect.ListType() | inspect.VarTupleType() | inspect.TupleType():
                return self._list(kind, depth)
            case inspect.DictType():
                items = self._list(inspect.ListType(kind.value_type), depth)
                return {self._key(kind.key_type, index): item for index, item in enumerate(items)}
        return self._scalar(kind)

    def struct(self, kind: inspect.StructType, depth: int = 0, given: float = 0.3) -> Any:
        """A struct with all its required fields and a share `given` of the others."""
        values: dict[str, Any] = {}
        for field in kind.fields:
            if field.required or kind.array_like or self._rng.random() < given:
                values[field.encode_name] = self.of(field.type, depth + 1)
        if kind.array_like:
            return list(values.values())
        return {kind.tag_field: kind.tag, **values} if kind.tag_field else values

    def _scalar(self, kind: inspect.Type) -> Any:
        match kind:
            case inspect.BoolType():
                return self._rng.random() < 0.5
            case inspect.IntType() | inspect.FloatType():
                return self._number(kind)
            case inspect.StrType():
                return self.text()
            case inspect.BytesType() | inspect.ByteArrayType():
                return self._rng.randbytes(self.size(1 << 16))
            case inspect.CustomType():  # a tensor
                return ["int32", [self._rng.choice((0, 1, 4))], self._rng.randbytes(4)]
            case inspect.AnyType() | inspect.RawType():
                return self.anything()
        return None

    def _number(self, kind: inspect.IntType | inspect.FloatType) -> float:
        low = kind.ge if kind.ge is not None else kind.gt
        high = kind.le if kind.le is not None else kind.lt
        whole = isinstance(kind, inspect.IntType)
        bounds = [bound for bound in (low, high) if bound is not None]
        choice = self._rng.random()
        if bounds and choice < 0.3:
            step = 1 if whole else self._rng.choice((0.0, 1e-9, 1.0))
            return self._rng.choice(bounds) + self._rng.choice((-step, 0, step))
        if choice < 0.5:
            return self._rng.choice(INTEGERS) if whole else self._rng.choice(FLOATS)
        start = 0 if low is None else low
        if whole:
            return self._rng.randint(int(start), int(start) + (10 if choice < 0.9 else 5000))
        return start + self._rng.random() * ((1.0 if high is None else high) - start)

    def _list(self, kind: inspect.Type, depth: int) -> list[Any]:
        if isinstance(kind, inspect.TupleType):
            return [self.of(item, depth + 1) for item in kind.item_types]
        assert isinstance(kind, (inspect.ListType, inspect.VarTupleType))
        count = self.size(MAX_LIST) if depth < 3 else self._rng.randrange(3)
        items = [self.of(kind.item_type, depth + 1) for _ in range(min(count, DISTINCT))]
        if count > DISTINCT:
            items = [_varied(items[index % DISTINCT], index) for index in range(count)]
        return items if len(str(items[:DISTINCT])) * count / DISTINCT < 1 << 22 else items[:DISTINCT]

    def _key(self, kind: inspect.Type, index: int) -> Any:
        if isinstance(kind, inspect.IntType):
            return index
        return self._rng.choice((str(index), str(index), f"{self._rng.choice(PIECES)}{index}"))

    def size(self, limit: int) -> int:
        """A length: small, but for a share `large`, which is up to `limit`."""
        if self._rng.random() < self._large:
            return log_uniform(self._rng, 10, limit)
        return self._rng.choice((0, 1, 1, 2, 3, 8))

    def text(self) -> str:
        """Words, controls, marks and symbols, alone or repeated."""
        size = self.size(MAX_TEXT)
        if self._rng.random() < 0.4:
            piece = self._rng.choice(PIECES)
            return (piece * (size // len(piece) + 1))[:size]
        letters = self._rng.choices(string.printable, k=min(size, 64))
        return ("".join(letters) * (size // 64 + 1))[:size]

    def anything(self) -> Any:
        """A value of any type: to stand where another was expected."""
        rng = self._rng
        pick = rng.randrange(12)
        if pick < 6:
            return (None, rng.random() < 0.5, rng.choice(INTEGERS), rng.choice(FLOATS), self.text(), [])[pick]
        if pick == 6:
            return {
                self.text()[:40]: self.text()[:40],
                "type": rng.choice(("text", "function", "object", "")),
            }
        if pick == 7:
            return nested(rng, self.size(MAX_DEPTH))
        if pick == 8 and not self._packed:
            return rng.choice((10**400, -(10**4000), float("nan"), float("inf"), "\ud800"))
        if pick == 9:
            return [rng.choice(INTEGERS)] * self.size(MAX_LIST)
        return rng.choice(([[]], {}, [None], [{}], "", [""], {"": None}, [0], ["\0"]))


def nested(rng: random.Random, depth: int) -> Any:
    """A value that is nested to a given depth, in lists or maps."""
    value: Any = rng.choice((0, "x", None))
    as_list = rng.random() < 0.5
    for _ in range(depth):
        value = [value] if as_list else {"a": value}
    return value


def _varied(item: Any, index: int) -> Any:
    """An item of a long list that differs from those before it, where that is easy."""
    if isinstance(item, str):
        return f"{item[:20]}{index}"
    return item


def type_of(kind: Any) -> inspect.Type:
    """The description of a type."""
    return inspect.type_info(kind)


def struct_type(kind: type[msgspec.Struct]) -> inspect.StructType:
    """The description of a struct."""
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    return described
