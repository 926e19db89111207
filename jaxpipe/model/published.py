"""How Hugging Face writes models: what a family says of it, and what families have in common."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Theirs(NamedTuple):
    """Where Hugging Face has one of our leaves.

    Attributes:
      name: the tensor's, behind what all of a layer begin with. With `{}` in it there is a tensor
        for every index of our first dim, which stands there, and all else is said of each.
      transposed: whether its last two dims are ours exchanged.
      part, parts: ours is this one of so many equal parts of it, which lie along our last dim.
    """

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1


class HuggingFace(Protocol):
    """How Hugging Face writes a family: a module of these names.

    `MODELS` says which models it has. `ENDS` and `LAYER` give for every leaf, by our path, where
    theirs is; names of layer i begin with `PREFIX.format(i)`. Where no name begins with `BASE`, the
    file is of the model without its head, and all names lack it. Tensors that end with one of
    `BUFFERS` hold no parameters. `EMBED` and `HEAD` are their names of one tensor where `tied` says
    so, which some checkpoints hold twice. `FUSED` gives for some leaves of a layer where they are
    in checkpoints that do not have the tensors of `LAYER`. `ARCHITECTURES` are the names that
    config.json may give the model.
    """

    ARCHITECTURES: tuple[str, ...]
    MODELS: str
    BASE: str
    PREFIX: str
    LAYER: Mapping[str, Theirs]
    FUSED: Mapping[str, Theirs]
    ENDS: Mapping[str, Theirs]
    BUFFERS: tuple[str, ...]
    HEAD: str
    EMBED: str

    def tied(self, model: Any) -> bool:
        """Whether the head is the embedding."""

    def with_defaults(self, theirs: Mapping[str, Any]) -> Mapping[str, Any]:
        """A config.json with what its absent fields mean to transformers, as far as it matters.

        Raises `ValueError` as `expected` does.
        """

    def expected(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `[model]` that a config.json asks for.

        Raises `ValueError` with the end of a sentence that begins with the file, where it describes
        a model that the family does not have.
        """

    def trained(self, theirs: Mapping[str, Any], model: Any) -> dict[str, Any]:
        """Fields of `[model]` that only training reads, as a config.json of this model has them.

        A run may have others: an import reports them and compares none.
        """

    def written(self, model: Any, dtype: str, max_positions: int) -> dict[str, Any]:
        """The config.json of a model.

        Raises `ValueError` with a sentence where it cannot describe the model.
        """


def architecture(theirs: Mapping[str, Any], known: Sequence[str]) -> str:
    """The architecture that a config.json names; `ValueError` where it is none of those known."""
    names = theirs.get("architectures") or [None]
    if names[0] not in known:
        some, last = ", ".join(known[:-1]), known[-1]
        raise ValueError(
            f"names the architecture {names[0]} but only {f'{some} and {last}' if some else last} "
            f"can be imported: take a checkpoint of one of these."
        )
    return names[0]


def sizes(theirs: Mapping[str, Any], ours: Mapping[str, str]) -> dict[str, Any]:
    """Sizes by our names, which have no default that a checkpoint could mean.

    `ours` has our names by theirs. Raises `ValueError` where one is missing.
    """
    for name in ours:
        if name not in theirs:
            raise ValueError(
                f"has no {name}, which has no default: add it, or take the whole file."
            )
    return {own: theirs[name] for name, own in ours.items()}


def check_only(theirs: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `ValueError` where a field has another value than allowed; the first is the default."""
    for name, values in allowed.items():
        if theirs.get(name, values[0]) not in values:
            raise ValueError(
                f"has {name}={theirs[name]!r} but this model has only {name}={values[0]!r}: take "
                f"another checkpoint."
            )
