"""The outputs of every layer for every example, read from inside a pipeline through gradients."""

from dataclasses import replace

import jax

from jaxpipe.core.contract.parameter import ParamSpec


@jax.custom_vjp
def record(y, _):
    """Return y; the second argument's "gradients" are y itself and the gradient at y."""
    return y


record.defvjp(lambda y, _: (y, y), lambda y, dy: (dy, {"y": y, "dy": dy}))


def recording(decoder):
    """Return the model with tables in every layer's parameters, `{"layer": ..., "tables": ...}`.

    The tables `y` and `dy`, `[examples, tokens, D]`, may have any content: their gradients are the
    layer's outputs and the gradients at them. A batch also has `example [M, B, L]`: the example
    that every token belongs to.
    """
    devices, functions = decoder.sharing.devices, decoder.functions
    (kind,) = functions.kinds_by_name.values()
    table = ParamSpec(partial_grad_axes=("tp",) if devices.sequence else ())

    def layer(params, x, context):
        output = kind.layer(params["layer"], x, context)
        example, begin = context.rows["example"][:, 0], _begin(decoder, output.y, context.rows)
        place = {
            name: jax.lax.dynamic_slice_in_dim(table[example], begin, output.y.shape[1], 1)
            for name, table in params["tables"].items()
        }
        return output._replace(y=record(output.y, place))

    leaves = {"layer": kind.param_specs, "tables": {"y": table, "dy": table}}
    kinds = replace(kind, layer=layer, param_specs=leaves)
    return replace(functions, kinds=kinds, batch_keys=(*functions.batch_keys, "example"))


def _begin(decoder, y, rows):
    """Return the position in the sequence at which this device's shard of the stream starts."""
    sharing = decoder.sharing
    devices, sequence = sharing.devices, sharing.sequence
    part = y.shape[1]
    own = part * (devices.size if devices.sequence else 1)
    begin = sequence.start(own) + (devices.index() * part if devices.sequence else 0)
    return begin + rows["slice"][0] * own * sequence.size if sharing.slices > 1 else begin
