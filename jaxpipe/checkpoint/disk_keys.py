"""Keys on disk that have changed, so that checkpoints of earlier formats are read.

Format 1 stored the parameters that belong to no layer, and their moments, under `ends`. Since
format 2 the key is `embed_head`, as in memory.
"""

from collections.abc import Mapping
from typing import Any

import jax

Tree = Any
EMBED_HEAD = "embed_head"


def embed_head_key(meta: Mapping[str, Any]) -> str:
    """The key of embedding, final norm and head in a checkpoint with this metadata.

    >>> embed_head_key({"format": 1}), embed_head_key({"format": 2})
    ('ends', 'embed_head')
    """
    return "ends" if meta["format"] == 1 else EMBED_HEAD


def rename_embed_head(keyed: Tree, old: str, new: str) -> Tree:
    """A state in keyed form in which every tree of parameters has the key `new` in place of `old`.

    >>> rename_embed_head({"params": {"ends": {"norm": 1}, "layers": {}}}, "ends", "embed_head")
    {'params': {'embed_head': {'norm': 1}, 'layers': {}}}
    """

    def is_parameters(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == {old, "layers"}

    return jax.tree.map(
        lambda node: {new: node[old], "layers": node["layers"]} if is_parameters(node) else node,
        keyed,
        is_leaf=lambda node: is_parameters(node) or hasattr(node, "shape"),
    )
