"""How Hugging Face stores models: the interface of a family's module, and shared helpers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class HuggingFaceTensor(NamedTuple):
    """Where Hugging Face stores one of our parameters.

    Attributes:
      name: the tensor's name after the prefix of its layer. With `{}` in it there is one tensor for
        every index of our first dim, which replaces `{}`; the other attributes then hold for each.
      transposed: whether the tensor's last two dims are ours exchanged.
      part, parts: our parameter is part number `part` of `parts` equal parts of the tensor, which
        lie along our last dim.
      interleaved: whether these parts alternate, entry by entry, instead of following one another.
    """

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1
    interleaved: bool = False


class HuggingFace(Protocol):
    """How Hugging Face stores an architecture: a module, or an object, with these names.

    Attributes:
      ARCHITECTURES: the names that config.json may give the model.
      MODELS: the models that the module covers, in words.
      BASE: prefix of tensor names. If no name has it, the checkpoint is of the model without its
        head, and all names lack it.
      PREFIX: prefix of the names of layer i, as `PREFIX.format(i)`.
      LAYER, ENDS: location of every parameter of a layer, and of embedding and head, by our path.
      FUSED: location of some layer parameters in checkpoints that lack the tensors of `LAYER`.
      VARIABLES: location of the model's state that is no parameter, by its name: one tensor in
        every sparse layer. A module of a family without any may leave it out.
      BUFFERS: endings of the names of tensors that hold no parameters.
      CHOICES: fields of `[model]` that have one value in all models of the architecture.
      HEAD, EMBED: names of one tensor if the model is `tied`, which some checkpoints store twice.
    """

    ARCHITECTURES: tuple[str, ...]
    MODELS: str
    BASE: str
    PREFIX: str
    LAYER: Mapping[str, HuggingFaceTensor]
    FUSED: Mapping[str, HuggingFaceTensor]
    ENDS: Mapping[str, HuggingFaceTensor]
    BUFFERS: tuple[str, ...]
    CHOICES: Mapping[str, Any]
    HEAD: str
    EMBED: str

    def describes(self, model: Any) -> bool:
        """Whether the architecture has all choices of a model of the family."""

    def tied(self, model: Any) -> bool:
        """Whether the head is the transposed embedding."""

    def ignores(self, name: str, model: Any) -> bool:
        """Whether to leave a tensor out that `model` has no place for.

        A module may lack it: then any such tensor is an error.
        """

    def with_defaults(self, theirs: Mapping[str, Any]) -> Mapping[str, Any]:
        """A config.json with transformers' defaults for absent fields, as far as they matter.

        Raises `ValueError` as `expected` does.
        """

    def expected(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `[model]` that a config.json implies.

        Raises `ValueError`, with the end of a sentence that begins with the file, where it
        describes a model that the family does not support.
        """

    def trained(self, theirs: Mapping[str, Any], model: Any) -> dict[str, Any]:
        """The fields of `[model]` that only training reads, as a model's config.json has them.

        A run may have other values: an import reports these fields but does not compare them.
        """

    def written(self, model: Any, dtype: str, max_positions: int) -> dict[str, Any]:
        """The config.json of a model.

        Raises `ValueError` with a sentence where it cannot describe the model.
        """


def architecture(theirs: Mapping[str, Any], known: Sequence[str]) -> str:
    """The architecture that a config.json names; raises `ValueError` if it is not in `known`."""
    names = theirs.get("architectures") or [None]
    if names[0] not in known:
        some, last = ", ".join(known[:-1]), known[-1]
        raise ValueError(
            f"names the architecture {names[0]} but only {f'{some} and {last}' if some else last} "
            f"can be imported: take a checkpoint of one of these."
        )
    return names[0]


def of_text(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json in which the fields of a multimodal model's text model are not nested."""
    own = theirs.get("text_config") or {}
    if not isinstance(own, Mapping):
        raise ValueError(f"has text_config={own!r}, which is no table: take the whole file.")
    outer = {name: value for name, value in theirs.items() if name != "text_config"}
    return {**outer, **own, "architectures": theirs.get("architectures")}


def sizes(theirs: Mapping[str, Any], ours: Mapping[str, str]) -> dict[str, Any]:
    """Sizes by our names, for fields that have no default.

    `ours` maps Hugging Face's names to ours. Raises `ValueError` where a field is missing or null,
    or no integer.
    """
    for name in ours:
        if theirs.get(name) is None:
            raise ValueError(
                f"has no {name}, which has no default: add it, or take the whole file."
            )
        if not isinstance(theirs[name], int):
            raise ValueError(f"has {name}={theirs[name]!r}, no integer: take the whole file.")
    return {own: theirs[name] for name, own in ours.items()}


def check_only(theirs: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `ValueError` where a field has a value not in `allowed`; the first is the default."""
    for name, values in allowed.items():
        if theirs.get(name, values[0]) not in values:
            raise ValueError(
                f"has {name}={theirs[name]!r} but this model has only {name}={values[0]!r}: take "
                f"another checkpoint."
            )
