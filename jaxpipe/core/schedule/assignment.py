"""Assignment of layers to stages: even, weighted by embedding and head, pinned, or by list."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from jaxpipe.core.schedule.action import ScheduleError


def assign_layers(
    layers: int,
    stages: int,
    policy: str | Sequence[int] = "even",
    *,
    weights: tuple[int, int] = (1, 1),
    pinned: tuple[int, int] = (0, 0),
) -> tuple[int, ...]:
    """Return the number of layers per stage, in order.

    Args:
      layers: layers of the model, the sum of the result.
      stages: number of stages.
      policy: "even" gives the remainder to the first stages; "weighted" counts embedding and head
        as layers of the first and last stage, then splits evenly, with a layer in each stage; a
        sequence is the result itself, in which the first stage may have 0 layers, the embedding
        alone, and the last one, the head alone.
      weights: layers that the embedding and the head count as under "weighted".
      pinned: layers of the first and of the last stage, 0 for not pinned; the remaining layers are
        split evenly under either policy.

    Raises `ScheduleError` where another stage would be empty or a list does not fit.

    >>> assign_layers(32, 3)
    (11, 11, 10)
    >>> assign_layers(80, 4, "weighted")
    (20, 21, 20, 19)
    >>> assign_layers(5, 4, "weighted")
    (1, 1, 2, 1)
    >>> assign_layers(8, 4, pinned=(1, 1))
    (1, 3, 3, 1)
    >>> assign_layers(8, 4, [0, 4, 4, 0])
    (0, 4, 4, 0)
    """
    first, last = pinned
    if isinstance(policy, str) and (stages < 1 or layers < stages):
        raise ScheduleError(
            f"{layers} layers cannot fill {stages} stages: every stage needs a layer; "
            f"use between 1 and {layers} stages."
        )
    if not isinstance(policy, str):
        counts = tuple(policy)
        if first or last:
            raise ScheduleError(
                f"layer split {list(counts)} says every stage, so first={first} and last={last} "
                f"must be 0: leave out the pins or the list."
            )
        _check_list(counts, layers, stages)
    elif first or last:
        counts = _split_with_pins(layers, stages, first, last)
    elif policy == "even":
        counts = _split_evenly(layers, stages)
    elif policy == "weighted":
        counts = _split_with_weights(layers, stages, weights)
    else:
        raise ScheduleError(
            f"unknown layer split {policy!r}: use 'even', 'weighted' or a list of {stages} counts."
        )
    if (stage := _empty_stage(counts)) is not None:
        raise ScheduleError(
            f"layer split {policy!r} of {layers} layers over {stages} stages leaves stage {stage} "
            f"without one: only the first and the last stage may have none, which a list says; "
            f"change the list or the pins, or use fewer stages."
        )
    return counts


def compute_layer_assignment(
    n_layers: int, pp_size: int, policy: str | Sequence[int] = "even"
) -> list[tuple[int, int]]:
    """Return the layers of every stage as (start, end), end exclusive, under `assign_layers`.

    >>> compute_layer_assignment(32, 3)
    [(0, 11), (11, 22), (22, 32)]
    """
    return list(pairwise(accumulate(assign_layers(n_layers, pp_size, policy), initial=0)))


def _split_evenly(items: int, stages: int) -> tuple[int, ...]:
    base, extra = divmod(items, stages)
    return tuple(base + (s < extra) for s in range(stages))


def _split_with_weights(layers: int, stages: int, weights: tuple[int, int]) -> tuple[int, ...]:
    """Split evenly, with embedding and head as `weights` further layers of their stages."""
    counts = list(_split_evenly(layers + sum(weights), stages))
    counts[0] -= weights[0]
    counts[-1] -= weights[1]
    while min(counts) < 1:  # embedding or head weigh more than the share of a stage
        fewest, most = (counts.index(of(counts)) for of in (min, max))
        counts[fewest] += 1
        counts[most] -= 1
    return tuple(counts)


def _split_with_pins(layers: int, stages: int, first: int, last: int) -> tuple[int, ...]:
    pins = (first > 0) + (last > 0)
    rest, middle = layers - first - last, stages - pins
    if rest < middle or (middle <= 0 and rest != 0):
        raise ScheduleError(
            f"pinning {first} layers to the first and {last} to the last of {stages} stages leaves "
            f"{rest} of {layers} layers for {max(middle, 0)} stages: change the pins."
        )
    inner = _split_evenly(rest, middle) if middle else ()
    return (*([first] if first else []), *inner, *([last] if last else []))


def _empty_stage(counts: Sequence[int]) -> int | None:
    """Return a stage that has no layer, and neither the embedding nor the head alone."""
    ends = (0, len(counts) - 1) if any(counts) else ()
    least = [count + (stage in ends) for stage, count in enumerate(counts)]
    return least.index(min(least)) if min(least) < 1 else None


def _check_list(counts: tuple[int, ...], layers: int, stages: int) -> None:
    if len(counts) != stages or sum(counts) != layers:
        raise ScheduleError(
            f"layer split {list(counts)} has {len(counts)} entries with sum {sum(counts)}: it "
            f"needs {stages} entries (one per stage) with sum {layers} (the layers)."
        )
