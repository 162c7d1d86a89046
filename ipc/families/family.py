"""Families of models with code of their own, or needs, as configurations and weights of other modules.

A family is a table: how its config.json becomes that of a module which transformers has, and which part of which
tensor each weight of that module is. So the model runs without a line of its repository's code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagewire.ipc.quoting import quoted

Config = Mapping[str, Any]
Rows = tuple[range, ...]
"""Rows of a tensor, in the order in which a weight has them."""
Layout = Callable[[Config, int], tuple[Rows, ...]]
"""A function of the module's configuration and a layer's number to the rows of each weight in a tensor."""

MAX_HEADS = 1 << 12  # of attention; the largest models have 128
FOREIGN = frozenset(
    {"auto_map", "architectures", "model_type", "attn_implementation", "_attn_implementation"}
)
"""Settings that are the repository's own code, or name it."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A weight of a module: a tensor of the checkpoint, or some of its rows.

    unit_rows: each row is divided by its length.
    """

    tensor: str
    rows: Rows | None = None
    unit_rows: bool = False

    @property
    def num_rows(self) -> int | None:
        """The number of its rows; None if they are all that the tensor has."""
        return None if self.rows is None else sum(map(len, self.rows))


@dataclass(frozen=True)
class Split:
    """A tensor of a layer that holds several weights: their modules, and where the rows of each are."""

    modules: tuple[str, ...]
    layout: Layout


@dataclass(frozen=True)
class Family:
    """A family of models, and the module that computes what its own code does.

    architectures, model_types: its names in config.json. settings: of its configuration, gives the module's.
    layers: where its checkpoint has the layers. layer, top: names within a layer and outside of layers, and the
    module's names for them; a name that is not listed is the same in both. has_unit_head: of its configuration,
    True where the rows of the output layer are divided by their lengths. unused: tensors that follow from it.
    beside: how the names of tensors begin that only pictures or sound need.
    """

    name: str
    architectures: frozenset[str]
    model_types: frozenset[str]
    settings: Callable[[Config], dict[str, Any]]
    layers: str = "model.layers"
    layer: Mapping[str, str | Split] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=dict)
    own_layers: str = "model.layers"
    has_unit_head: Callable[[Config], bool] = lambda _: False
    unused: frozenset[str] = frozenset()
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class ForeignModel:
    """A model of a family. values: the content of its config.json; config: the same as its module has it."""

    family: Family
    values: Config
    config: dict[str, Any]

    @classmethod
    def of(cls, family: Family, values: Config) -> ForeignModel:
        """The model that a config.json describes.

        Raises:
            ValueError: the family is not served, or not with these settings.
        """
        try:
            return cls(family, values, family.settings(values))
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            text = f"a {family.name} model needs other settings than config.json has ({error!r:.100})"
            raise ValueError(text) from error

    def excerpts(self, names: Iterable[str]) -> dict[str, Excerpt]:
        """The weights of the module by name, in these tensors of the checkpoint."""
        pattern = re.compile(rf"{re.escape(self.family.layers)}\.(\d{{1,4}})\.(.+)\.(\w+)")
        found: dict[str, Excerpt] = {}
        for name in set(names) - self.family.unused:
            if name.startswith(self.family.beside):
                continue
            if (match := pattern.fullmatch(name)) is None:
                found |= self._outside(name)
                continue
            number, module, leaf = match.groups()
            own = self.family.layer.get(module, module)
            prefix = f"{self.family.own_layers}.{number}"
            if isinstance(own, str):
                found[f"{prefix}.{own}.{leaf}"] = Excerpt(name)
                continue
            rows = own.layout(self.config, int(number))
            found |= {
                f"{prefix}.{part}.{leaf}": Excerpt(name, of_part)
                for part, of_part in zip(own.modules, rows, strict=True)
            }
        return found

    def _outside(self, name: str) -> dict[str, Excerpt]:
        module, _, leaf = name.rpartition(".")
        own = self.family.top.get(module, module)
        is_unit = own == "lm_head" and self.family.has_unit_head(self.values)
        return {f"{own}.{leaf}" if module else name: Excerpt(name, unit_rows=is_unit)}


def module_settings(
    values: Config, model_type: str, architecture: str, renamed: Mapping[str, str] | None = None, **own: Any
) -> dict[str, Any]:
    """A family's settings under the names of a module, without those that mean its own code.

    renamed: the module's names of settings by the family's. own: further settings, which replace the family's.
    """
    names = renamed or {}
    kept = {name: value for name, value in values.items() if name not in FOREIGN and name not in names}
    given = {own_name: values[name] for name, own_name in names.items() if name in values}
    return kept | given | own | {"model_type": model_type, "architectures": [architecture]}


def llama(values: Config, renamed: Mapping[str, str] | None = None, **own: Any) -> dict[str, Any]:
    """The settings of a Llama; see `module_settings`."""
    return module_settings(values, "llama", "LlamaForCausalLM", renamed, **own)


def demand(values: Config, **needed: Any) -> None:
    """Refuse a configuration with other values of these settings, where it has them.

    Raises:
        ValueError: says which setting.
    """
    for name, value in needed.items():
        if (given := values.get(name, value)) != value:
            text = f"{name} {quoted(given)} of its configuration is not served, but {value!r} is"
            raise ValueError(f"{text}; trust_remote_code runs the repository's own code")


def heads(config: Config) -> tuple[int, int, int]:
    """Query heads, key heads, and the size of a head, of a module's configuration.

    Raises:
        ValueError: there are more heads than any model has, or they do not divide each other.
    """
    queries = int(config["num_attention_heads"])
    keys = int(config.get("num_key_value_heads") or queries)
    size = int(config.get("head_dim") or config["hidden_size"] // max(1, queries))
    if not 1 <= keys <= queries <= MAX_HEADS or queries % keys or size < 1:
        raise ValueError(f"the configuration has {quoted(queries)} heads for {quoted(keys)} heads of keys")
    return queries, keys, size


def one_below_the_other(config: Config, _: int) -> tuple[Rows, ...]:
    """The rows of queries, keys and values in a tensor that holds all queries first, and all values last."""
    queries, keys, size = heads(config)
    ends = queries * size, (queries + keys) * size, (queries + 2 * keys) * size
    return (range(ends[0]),), (range(ends[0], ends[1]),), (range(ends[1], ends[2]),)


def by_group(config: Config, _: int) -> tuple[Rows, ...]:
    """The rows of queries, keys and values in a tensor that holds the heads of each key together: queries first."""
    queries, keys, size = heads(config)
    of_group = queries // keys + 2
    starts = [group * of_group * size for group in range(keys)]
    last = (of_group - 2) * size
    return (
        tuple(range(start, start + last) for start in starts),
        tuple(range(start + last, start + last + size) for start in starts),
        tuple(range(start + last + size, start + last + 2 * size) for start in starts),
    )


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
