"""Every parameter of a model under both names: ours, and that of Hugging Face's tensor."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpipe.checkpoint.safetensors_directory import Shape, TensorFiles
from jaxpipe.config import ConfigError
from jaxpipe.model import FAMILIES, ModelConfig
from jaxpipe.model.published import HuggingFace, Theirs

Tree = Any


@dataclass(frozen=True)
class Parameter:
    """One parameter under both names: `("layers", "3", "attn", "wq")` and theirs."""

    path: tuple[str, ...]
    shape: Shape  # ours
    theirs: Theirs  # with its whole name

    @property
    def stacked(self) -> bool:
        """Whether it is many tensors, one for every index of its first dim."""
        return "{}" in self.theirs.name

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors that have it, in order."""
        name = self.theirs.name
        return tuple(map(name.format, range(self.shape[0]))) if self.stacked else (name,)

    @property
    def their_shape(self) -> Shape:
        """The shape of each of the tensors."""
        *others, last = self.shape[1:] if self.stacked else self.shape
        last *= self.theirs.parts
        return (*others[:-1], last, others[-1]) if self.theirs.transposed else (*others, last)

    def ours(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """This parameter of the tensors that `read` reads: a view of one, or many put together."""
        if not self.stacked:
            return self._part(read(self.names[0]))
        first, *others = self.names
        part = self._part(read(first))
        whole = np.empty(self.shape, part.dtype)
        whole[0] = part
        for index, name in enumerate(others, start=1):
            whole[index] = self._part(read(name))
        return whole

    def _part(self, tensor: np.ndarray) -> np.ndarray:
        whole = tensor.swapaxes(-1, -2) if self.theirs.transposed else tensor
        width = self.shape[-1]
        return whole[..., self.theirs.part * width :][..., :width]


def huggingface_of(model: ModelConfig) -> HuggingFace:
    """How Hugging Face writes the family of a model; `ConfigError` where that is not known."""
    try:
        return FAMILIES[model.family].published
    except LookupError as error:
        raise ConfigError(f"{error}: use a model of another family.") from error


def parameters(model: ModelConfig) -> list[Parameter]:
    """All parameters of a model: the ends, then layer by layer."""
    theirs = huggingface_of(model)
    built, key = FAMILIES[model.family].build(model), jax.random.key(0)
    ends = _paths(jax.eval_shape(built.init_ends, key))
    order = built.functions.kinds_of(model.n_layers)
    layers = {
        kind: _paths(jax.eval_shape(partial(built.init_layer, index=0, kind=kind), key))
        for kind in set(order)
    }
    found = [
        Parameter(("ends", *path), shape, theirs.ENDS["/".join(path)])
        for path, shape in ends.items()
    ]
    for i, kind in enumerate(order):
        for path, shape in layers[kind].items():
            own = theirs.LAYER["/".join(path)]
            whole = own._replace(name=theirs.PREFIX.format(i) + own.name)
            found.append(Parameter(("layers", str(i), *path), shape, whole))
    return found


def located(model: ModelConfig, files: TensorFiles) -> list[Parameter]:
    """The parameters of a model by the names that they have in these files.

    Files of a model without its head lack the first part of all names; experts may be one tensor.
    """
    form, names = huggingface_of(model), set(files.names)
    bare = not any(name.startswith(form.BASE) for name in names)

    def found(own: Parameter) -> Parameter:
        _, index, *path = own.path
        fused = form.FUSED.get("/".join(path)) if own.path[0] == "layers" else None
        choices = [own]
        if fused is not None:
            whole = fused._replace(name=form.PREFIX.format(index) + fused.name)
            choices.append(replace(own, theirs=whole))
        if bare:
            choices = [_without(form.BASE, choice) for choice in choices]
        return next((choice for choice in choices if choice.names[0] in names), choices[0])

    return [found(own) for own in parameters(model)]


def _without(base: str, own: Parameter) -> Parameter:
    """A parameter as files of the model without its head name it."""
    return replace(own, theirs=own.theirs._replace(name=own.theirs.name.removeprefix(base)))


def _paths(tree: Tree) -> dict[tuple[str, ...], Shape]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {tuple(part.key for part in path): leaf.shape for path, leaf in leaves}
