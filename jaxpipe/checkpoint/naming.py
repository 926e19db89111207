"""The mapping between jaxpipe's parameter names and Hugging Face's tensor names."""

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
    """A jaxpipe parameter, such as `("layers", "3", "attn", "wq")`, and Hugging Face's tensor."""

    path: tuple[str, ...]
    shape: Shape  # jaxpipe's
    theirs: Theirs  # with its full name

    @property
    def stacked(self) -> bool:
        """Whether Hugging Face has one tensor per index of the first dim (experts)."""
        return "{}" in self.theirs.name

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the Hugging Face tensors, in order."""
        name = self.theirs.name
        return tuple(map(name.format, range(self.shape[0]))) if self.stacked else (name,)

    @property
    def their_shape(self) -> Shape:
        """Shape of each Hugging Face tensor."""
        *others, last = self.shape[1:] if self.stacked else self.shape
        last *= self.theirs.parts
        return (*others[:-1], last, others[-1]) if self.theirs.transposed else (*others, last)

    def ours(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """The parameter from `read(name)`: a view of one tensor, or several tensors stacked."""
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
    """Hugging Face's names of a model's family; `ConfigError` where they are not known."""
    try:
        return FAMILIES[model.family].published
    except LookupError as error:
        raise ConfigError(f"{error}: use a model of another family.") from error


def parameters(model: ModelConfig) -> list[Parameter]:
    """All parameters of a model: embedding, final norm and head first, then layer by layer."""
    theirs = huggingface_of(model)
    built, key = FAMILIES[model.family].build(model), jax.random.key(0)
    ends = _paths(jax.eval_shape(built.init_ends, key))
    order = built.functions.layer_kinds(model.n_layers)
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
    """The parameters of a model with the tensor names that `files` use.

    Names lack their first part (`BASE`) where the files are of the model without its head. Experts
    may be fused into one tensor (`FUSED`).
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
    """The parameter with the prefix `base` removed from its tensor name."""
    return replace(own, theirs=own.theirs._replace(name=own.theirs.name.removeprefix(base)))


def _paths(tree: Tree) -> dict[tuple[str, ...], Shape]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {tuple(part.key for part in path): leaf.shape for path, leaf in leaves}
