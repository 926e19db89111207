"""The mapping between jaxpipe's parameter names and Hugging Face's tensor names."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import jax
import numpy as np

from jaxpipe.checkpoint.hf.safetensors_directory import Shape, TensorFiles
from jaxpipe.config import ConfigError
from jaxpipe.model import FAMILIES, ModelConfig
from jaxpipe.model.published import HuggingFace, HuggingFaceTensor

Tree = Any
VARIABLES = "variables"


@dataclass(frozen=True)
class NamedParameter:
    """A jaxpipe parameter, such as `("layers", "3", "attn", "wq")`, and Hugging Face's tensor.

    The model's state that is no parameter is named alike, as `("variables", "router_bias")`.
    """

    path: tuple[str, ...]
    shape: Shape  # jaxpipe's
    hf_tensor: HuggingFaceTensor  # with its full name
    indices: tuple[int, ...] = ()  # of the tensors along the first dim, if stacked; (): 0, 1, ...
    widths: tuple[int, ...] = ()  # last dims of all parameters in its tensor; (): it is alone
    groups: int = 1  # in which these alternate
    # in which a variable is exported: float32, or int64 of numbers of experts; None: any float
    hf_dtype: np.dtype | None = None

    @property
    def is_integer(self) -> bool:
        """Whether its values are numbers of experts."""
        return self.hf_dtype is not None and self.hf_dtype.kind == "i"

    @property
    def is_variable(self) -> bool:
        """Whether it is state of the model that is no parameter."""
        return self.path[0] == VARIABLES

    @property
    def stored_path(self) -> tuple[str, ...]:
        """Its path in a checkpoint."""
        return self.path if self.is_variable else ("params", *self.path)

    @property
    def is_stacked(self) -> bool:
        """Whether Hugging Face has one tensor per index of the first dim (experts)."""
        return "{}" in self.hf_tensor.name

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Names of the Hugging Face tensors, in order."""
        name = self.hf_tensor.name
        if not self.is_stacked:
            return (name,)
        return tuple(map(name.format, self.indices or range(self.shape[0])))

    @property
    def hf_shape(self) -> Shape:
        """Shape of each Hugging Face tensor."""
        *others, last = self.shape[1:] if self.is_stacked else self.shape
        last = sum(self.widths) or last
        shape = *others, last
        if self.hf_tensor.transposed:
            shape = *others[:-1], last, others[-1]
        for dim in self.hf_tensor.ones:
            shape = *shape[:dim], 1, *shape[dim:]
        return shape

    @property
    def has_experts(self) -> bool:
        """Whether its first dim is that of experts: it is as large as many other parameters."""
        return len(self.shape) > 2

    def from_hf(self, read: Callable[..., np.ndarray]) -> np.ndarray:
        """The parameter from `read(name)`, or expert by expert from `read(name, expert)`."""
        if self.is_stacked:
            parts = map(read, self.hf_names)
        elif self.has_experts:
            parts = map(read, repeat(self.hf_names[0]), range(self.shape[0]))
        else:
            return self._slice_tensor(read(self.hf_names[0]))
        first = self._slice_tensor(next(parts))
        stacked = np.empty(self.shape, first.dtype)
        stacked[0] = first
        for index, part in enumerate(map(self._slice_tensor, parts), 1):
            stacked[index] = part
        return stacked

    def _slice_tensor(self, tensor: np.ndarray) -> np.ndarray:
        tensor = tensor.squeeze(self.hf_tensor.ones)
        fused = tensor.swapaxes(-1, -2) if self.hf_tensor.transposed else tensor
        if not self.widths:
            return fused
        grouped = fused.reshape(*fused.shape[:-1], self.groups, -1)
        begin = sum(self.widths[: self.hf_tensor.part]) // self.groups
        own = grouped[..., begin : begin + self.shape[-1] // self.groups]
        return own.reshape(*fused.shape[:-1], self.shape[-1])

    def to_hf(self, parameter: np.ndarray) -> np.ndarray:
        """A tensor of Hugging Face's, from the parameter or those that it shares the tensor with.

        Of stacked parameters it is that of one index.
        """
        parameter = parameter.swapaxes(-1, -2) if self.hf_tensor.transposed else parameter
        return np.expand_dims(parameter, self.hf_tensor.ones)

    def join(self, parts: list[np.ndarray]) -> np.ndarray:
        """The parameters that share its tensor, in their order, as one."""
        if not self.widths:
            return parts[0]
        grouped = [part.reshape(*part.shape[:-1], self.groups, -1) for part in parts]
        return np.concatenate(grouped, axis=-1).reshape(*parts[0].shape[:-1], -1)


def hf_format(model: ModelConfig) -> HuggingFace:
    """How Hugging Face stores a model; `ConfigError` where no known architecture describes it."""
    try:
        return FAMILIES[model.family].format_of(model)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def list_parameters(model: ModelConfig, form: HuggingFace | None = None) -> list[NamedParameter]:
    """All parameters of a model: embedding, final norm and head, layer by layer, then variables.

    `form` has the names; None: those of `hf_format`.
    """
    form = form or hf_format(model)
    built, key = FAMILIES[model.family].build(model), jax.random.key(0)
    embed_head = _shapes_by_path(jax.eval_shape(built.init_embed_head, key))
    order = built.functions.layer_kinds(model.pipeline_layers)
    layers = {
        kind: _shapes_by_path(jax.eval_shape(partial(built.init_layer, index=0, kind=kind), key))
        for kind in set(order)
    }
    parameters = [
        NamedParameter(("embed_head", *path), shape, form.ENDS["/".join(path)])
        for path, shape in embed_head.items()
    ]
    for i, kind in enumerate(order):
        for path, shape in layers[kind].items():
            number, within = model.block_of(i, path)
            tensor = form.LAYER["/".join(within)]
            named_tensor = tensor.within(form.PREFIX.format(number))
            parameters.append(NamedParameter(("layers", str(i), *path), shape, named_tensor))
    variables = _list_variables(model, form, built.functions.variables or {})
    return _with_widths(parameters, model) + variables


def _with_widths(parameters: list[NamedParameter], model: ModelConfig) -> list[NamedParameter]:
    """The parameters with the widths, and the groups, of those that share a tensor."""
    shared: dict[str, dict[int, int]] = {}
    for parameter in parameters:
        tensor = parameter.hf_tensor
        shared.setdefault(tensor.name, {})[tensor.part] = parameter.shape[-1]

    def widths(parameter: NamedParameter) -> tuple[int, ...]:
        parts = shared[parameter.hf_tensor.name]
        return tuple(parts[number] for number in sorted(parts)) if len(parts) > 1 else ()

    def groups(parameter: NamedParameter) -> int:
        name = parameter.hf_tensor.groups
        return getattr(model, name) if name else 1

    return [replace(one, widths=widths(one), groups=groups(one)) for one in parameters]


def _list_variables(model: ModelConfig, form: HuggingFace, variables: Tree) -> list[NamedParameter]:
    """The variables that Hugging Face stores, one tensor for each of their layers."""
    return [
        NamedParameter(
            (VARIABLES, name),
            variables[name].shape,
            tensor._replace(name=form.PREFIX + tensor.name),
            model.variable_layers(name),
            hf_dtype=np.dtype(np.int64 if variables[name].dtype.kind == "i" else np.float32),
        )
        for name, tensor in getattr(form, "VARIABLES", {}).items()
        if name in variables
    ]


def locate_parameters(
    model: ModelConfig, form: HuggingFace, files: TensorFiles
) -> list[NamedParameter]:
    """The parameters of a model with the tensor names of `form` that `files` use.

    Names lack their first part (`BASE`) where the files are of the model without its head. Some
    parameters may have other tensors, such as all experts in one (`FUSED`).
    """
    names = set(files.names)
    bare = not any(name.startswith(form.BASE) for name in names)

    def locate(parameter: NamedParameter) -> NamedParameter:
        part, path = parameter.path[0], parameter.path[1:]
        prefix = ""
        if part == "layers":
            number, path = model.block_of(int(path[0]), path[1:])
            prefix = form.PREFIX.format(number)
        other = None if parameter.is_variable else form.FUSED.get("/".join(path))
        choices = [parameter]
        if other is not None:
            choices.append(replace(parameter, hf_tensor=other.within(prefix)))
        if bare:
            choices = [_remove_prefix(form.BASE, choice) for choice in choices]
        return next((choice for choice in choices if choice.hf_names[0] in names), choices[0])

    return _with_widths([locate(parameter) for parameter in list_parameters(model, form)], model)


def _remove_prefix(base: str, parameter: NamedParameter) -> NamedParameter:
    """The parameter with the prefix `base` removed from its tensor name."""
    return replace(
        parameter,
        hf_tensor=parameter.hf_tensor._replace(name=parameter.hf_tensor.name.removeprefix(base)),
    )


def _shapes_by_path(tree: Tree) -> dict[tuple[str, ...], Shape]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {tuple(part.key for part in path): leaf.shape for path, leaf in leaves}
