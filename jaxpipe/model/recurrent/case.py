"""Which ways of sharing a sequence a recurrence supports. Importing this imports no jax."""

from collections.abc import Iterator

from jaxpipe.model.attention.case import AttentionCase


def unmet_by_recurrence(
    case: AttentionCase, mixer: str, setting: str, heads: int, tp: int
) -> Iterator[str]:
    """Yield a sentence if a recurrence cannot run over a sequence that devices share as in a case.

    Args:
      case: what is asked of the layers with attention, of the same model.
      mixer: what has the recurrence, with an article.
      setting: name of the setting that says into how many equal shares its heads divide.
      heads: its value.
      tp: devices that share a layer.
    """
    sequence, own = case.sequence, max(heads // tp, 1)
    if sequence.ring > 1:
        yield (
            f"parallel.cp_method='ring' gives each of the parallel.cp={sequence.size} devices an "
            f"early and a late part of a sequence, but {mixer} passes its state on from each "
            f"device to the next: set parallel.cp_method=gather."
        )
    elif sequence.heads and own % sequence.size:
        yield (
            f"parallel.cp={sequence.size} devices exchange {own} heads of {mixer} "
            f"({setting}={heads}, parallel.tp={tp}), and each needs an equal share: set "
            f"parallel.cp_method=gather."
        )
