"""What every layer makes of every example, read from inside a pipeline through gradients."""

from dataclasses import replace

import jax

from jaxpipe.partition.leaf import Leaf


@jax.custom_vjp
def record(y, _):
    """y; the second argument's "gradients" are y itself and the gradient at y."""
    return y


record.defvjp(lambda y, _: (y, y), lambda y, dy: (dy, {"y": y, "dy": dy}))


def recording(decoder):
    """The model with tables beside every layer's parameters, `{"layer": ..., "tables": ...}`.

    The tables `y` and `dy`, `[examples, tokens, D]`, may hold anything: their gradients are the
    layer's outputs and the gradients at them. A batch also has `example [M, B, L]`: for every token
    which example it is of.
    """
    devices, functions = decoder.devices, decoder.functions
    (kind,) = functions.by_name.values()
    table = Leaf(summed=("tp",) if devices.sequence else ())

    def layer(params, x, context):
        output = kind.layer(params["layer"], x, context)
        example, begin = context.rows["example"][:, 0], _begin(decoder, output.y, context.rows)
        place = {
            name: jax.lax.dynamic_slice_in_dim(table[example], begin, output.y.shape[1], 1)
            for name, table in params["tables"].items()
        }
        return output._replace(y=record(output.y, place))

    leaves = {"layer": kind.leaves, "tables": {"y": table, "dy": table}}
    kinds = replace(kind, layer=layer, leaves=leaves)
    return replace(functions, kinds=kinds, reads=(*functions.reads, "example"))


def _begin(decoder, y, rows):
    """Where in the sequence this device's part of the stream begins."""
    devices, sequence = decoder.devices, decoder.sequence
    part = y.shape[1]
    own = part * (devices.size if devices.sequence else 1)
    begin = sequence.start(own) + (devices.index() * part if devices.sequence else 0)
    return begin + rows["slice"][0] * own * sequence.size if decoder.slices > 1 else begin
