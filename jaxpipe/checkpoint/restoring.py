"""Read a checkpoint of this run or another, which need not have the same layout."""

from collections.abc import Callable, Mapping
from typing import Any

import orbax.checkpoint as ocp

from jaxpipe.checkpoint.compatibility import Check, check_same_arrays, drop_absent_variables
from jaxpipe.checkpoint.disk_keys import EMBED_HEAD, embed_head_key, rename_embed_head
from jaxpipe.checkpoint.exclusion import Exclusion, leaves_by_name, replace_leaves
from jaxpipe.checkpoint.integrity import (
    check_files,
    has_checksums,
    read_meta,
    succeed_on_all_processes,
)
from jaxpipe.checkpoint.keying import StateKeying
from jaxpipe.checkpoint.memory import return_freed_memory
from jaxpipe.checkpoint.orbax_port.handler import StateRestore, make_state_handler
from jaxpipe.config import ConfigError
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage.files import AnyPath

Tree = Any
Meta = dict[str, Any]


def read_state(
    path: AnyPath,
    keying: StateKeying,
    like: Tree,
    exclusion: Exclusion | None = None,
    say: Callable[[str], None] = print,
    check: Check | None = None,
    *,
    group: Group,
) -> tuple[Tree, Meta]:
    """Read one checkpoint. All of the group call it; each reads the shards of its own devices.

    Returns `(state, meta)` with the state in the form of `like`, a state in stage-stacked form or
    its shapes, of which some entries may be absent: they are not read. Parameters of `exclusion`
    are initialised anew. Variables that the checkpoint does not have, or has with other shapes, are
    omitted; if `like` has only parameters and variables, so are those of a run, which belong to its
    training, and those of an import are read. `check` gets the path and the metadata before any
    array is read.

    Raises:
      DamagedError: checksums, or files that are missing or cannot be decoded, prove damage.
      ConfigError: the checkpoint is of another model or a newer format, or cannot be read for
        another reason. Either error is raised on all processes, whichever process found it.
    """
    with succeed_on_all_processes(group, path):
        meta = read_meta(path)
        if meta.get("kind") == "params" and not like.keys() <= {"params", "variables"}:
            raise ConfigError(
                f"checkpoint {path} holds parameters only: set checkpoint.parameters_only=true to "
                f"start from them."
            )
        if like.keys() == {"params", "variables"} and meta.get("kind") != "params":
            like = {"params": like["params"]}
        sizes = check(path, meta) if check else {}
        if has_checksums(meta):
            check_files(path / "state", group.index, group.count)
    if not has_checksums(meta):
        say(
            f"checkpoint {path} was saved by a version that wrote no checksums: nothing proves "
            f"that its arrays are undamaged"
        )
    with succeed_on_all_processes(group, path, checked=has_checksums(meta)):
        return _read_arrays(path, keying, like, exclusion, embed_head_key(meta), sizes), meta


def _read_arrays(
    path: AnyPath, keying: StateKeying, like: Tree, exclusion: Exclusion | None, key: str,
    sizes: Mapping[str, Any],
) -> Tree:  # fmt: skip
    """Read the arrays of a checkpoint that stores embedding, final norm and head under `key`.

    `sizes` are settings in which it differs (`Check`).
    """

    def on_disk(keyed: Tree) -> Tree:
        return rename_embed_head(keyed, EMBED_HEAD, key)

    handler = make_state_handler()
    stored = rename_embed_head(handler.metadata(path / "state").tree, key, EMBED_HEAD)
    like = drop_absent_variables(stored, like)
    shapes = keying.keyed_shapes(like)  # as on disk, without padding
    left_out: frozenset[str] = frozenset()
    if exclusion:
        left_out = exclusion.match_names(shapes) | exclusion.absent_names(shapes, stored)
    check_same_arrays(shapes, stored, path, left_out=left_out, sizes=sizes)
    with return_freed_memory():
        state = handler.restore(
            path / "state",
            args=StateRestore(
                on_disk(replace_leaves(shapes, left_out, lambda _: ocp.PLACEHOLDER)),
                restore_args=on_disk(keying.restore_args(like)),
                partial_restore=True,
            ),
        )
        state = rename_embed_head(state, key, EMBED_HEAD)
        if exclusion and left_out:
            new = leaves_by_name(keying.to_padded_keyed(exclusion.init_state()))
            state = replace_leaves(state, left_out, lambda name: new[name])
        return keying.to_stage_stacked(state, like)
