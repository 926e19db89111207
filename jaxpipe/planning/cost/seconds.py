"""Seconds of the operations of one device, and the costs of stages that follow."""

from functools import cache, partial
from itertools import accumulate, pairwise

import msgspec

from jaxpipe.core.schedule import Costs

_SHARED = ("F", "B", "W", "exchange")


class Copies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of copies with the host in F, B and W of one of a stage's first `layers` layers.

    BW copies what B does.
    """

    layers: int
    F: float
    B: float
    W: float

    def beside(self, copy: float, compute: float, count: int) -> float:
        """Seconds of `count` layers with their copies, which may overlap compute of other layers.

        The first copy starts after a layer's compute, or the last ends before one; the time is the
        same.

        >>> copies = Copies(layers=2, F=3.0, B=3.0, W=0.0)
        >>> [copies.beside(copies.F, compute, 4) for compute in (4.0, 1.0)]
        [16.0, 7.0]
        """
        copied, plain = min(self.layers, count), count * compute
        if not copied:
            return plain
        return max(plain, compute + copy + (copied - 1) * max(compute, copy))


NO_COPIES = Copies(layers=0, F=0.0, B=0.0, W=0.0)


class Recomputation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that ops take longer in a stage's first `layers` layers (`train.remat_layers`).

    F writes fewer residuals, so its number may be below 0.
    """

    layers: int
    F: float
    B: float
    W: float
    BW: float

    def of_stage(self, count: int, *, split: bool) -> tuple[float, ...]:
        """Seconds of F, B and W of a stage of `count` layers; without `split`, of halves of BW."""
        gradient = (self.B, self.W) if split else (self.BW / 2, self.BW / 2)
        return tuple(min(self.layers, count) * op for op in (self.F, *gradient))


NO_RECOMPUTATION = Recomputation(layers=0, F=0.0, B=0.0, W=0.0, BW=0.0)


class LayerSeconds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of F, B and W of one layer, and of BW; None: as long as B and W.

    R is a recomputation ahead of B, which is not part of B and BW; 0: there is none.
    """

    F: float
    B: float
    W: float
    BW: float | None = None
    R: float = 0.0

    @property
    def whole_backward(self) -> float:
        """Seconds of BW."""
        return self.B + self.W if self.BW is None else self.BW

    def beside(self, more: "LayerSeconds") -> "LayerSeconds":
        """Add the seconds of `more`."""
        both = None
        if self.BW is not None or more.BW is not None:
            both = self.whole_backward + more.whole_backward
        f, b, w, r = (getattr(self, op) + getattr(more, op) for op in ("F", "B", "W", "R"))
        return LayerSeconds(f, b, w, both, r)

    @property
    def in_backward(self) -> "LayerSeconds":
        """The seconds if B and BW do what R does."""
        both = None if self.BW is None else self.BW + self.R
        return LayerSeconds(self.F, self.B + self.R, self.W, both)


NO_EXCHANGE = LayerSeconds(F=0.0, B=0.0, W=0.0)


class LayerShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one layer takes, in mean layers: compute of F, B and W, and all-to-alls over ep."""

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    exchange: float = 1.0


class OpSeconds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one microbatch or slice on one device.

    Attributes:
      layer: the mean layer, compute alone unless measured.
      transfer: a message to each of both neighbours at once, as every tick sends them.
      copies: of residuals that are offloaded to the host; computed, never measured.
      again: what a stage's first layers take longer than `layer`; computed, never measured.
      exchange: all-to-alls of a layer over ep that its compute does not hide; 0 if `layer` is
        measured and so contains them.
      sharing: waits of a layer for replicas: those that share its sequences, and those that have
        the other shards of its parameters where every action gathers them; 0 if `layer` is
        measured.
      tensor: collectives of a layer over tp that its compute does not hide; 0 if `layer` is
        measured and so contains them.
      shares: what every layer takes, in mean layers; empty: all are alike.
      network, shards, groups: seconds per byte that a device sends around a ring of all replicas,
        of its group of replicas, and of one replica of each group; never measured.
      host, memory: seconds per byte to or from its host, and of its own memory; never measured.
    """

    layer: LayerSeconds
    head: float  # loss, its gradient and the gradients of its weights
    transfer: float
    embed: float = 0.0
    embed_gradient: float = 0.0  # the embedding's share of B
    copies: Copies = NO_COPIES
    again: Recomputation = NO_RECOMPUTATION
    exchange: LayerSeconds = NO_EXCHANGE
    sharing: LayerSeconds = NO_EXCHANGE
    tensor: LayerSeconds = NO_EXCHANGE
    shares: tuple[LayerShare, ...] = ()
    network: float = 0.0
    shards: float = 0.0
    groups: float = 0.0
    host: float = 0.0
    memory: float = 0.0

    def sending(self, size: int, message: int) -> float:
        """Seconds to send `size` bytes to a neighbour, if `message` bytes take `transfer`."""
        return self.transfer * size / message

    @property
    def least_in_halves(self) -> "OpSeconds":
        """Lower bounds of the seconds of the same layers in halves (`parallel.overlap_halves`).

        Halves compute for at least as long. They wait for the part of their collectives that takes
        longer than the compute of the same op, of which this counts collectives over tp alone.
        """
        tensor, layer = self.tensor, self.layer
        longer = {op: max(0.0, getattr(tensor, op) - getattr(layer, op)) for op in "FBWR"}
        tensor = msgspec.structs.replace(tensor, **longer)
        return msgspec.structs.replace(self, tensor=tensor, exchange=NO_EXCHANGE)

    def costs(
        self, layers: tuple[int, ...], *, shared_by: int = 0, split: bool = True,
        pairs: bool = True, recomputes: bool = False,
    ) -> Costs:  # fmt: skip
        """Return the costs of stages; the first has the embedding, and the last the head in its F.

        Args:
          layers: number of layers per stage.
          shared_by: ranks that share embedding and head (vocabulary-parallel); 0: none. All stages'
            F then carry equal shares of the compute, and of four all-reduces per microbatch, each
            of which sends 2 (P - 1) / P messages in a ring of P ranks.
          split: whether B and W are separate; if not, each is half of BW.
          pairs: whether exchanges of one half of a cell hide behind the other half.
          recomputes: whether recomputations ahead of B are actions of their own; if not, B does
            them.
        """
        if not recomputes:
            of_layer = ("layer", "exchange", "sharing", "tensor")
            self = msgspec.structs.replace(
                self, **{name: getattr(self, name).in_backward for name in of_layer}
            )
        zeros = (0.0,) * (len(layers) - 1)
        embed, embed_gradient = (self.embed, *zeros), (self.embed_gradient, *zeros)
        head = (*zeros, self.head)
        if shared_by:
            sums = 4 * 2 * (shared_by - 1) * self.transfer
            embed_head = self.embed + self.head + self.embed_gradient + sums
            embed = (embed_head / len(layers),) * len(layers)
            head = embed_gradient = (0.0,) * len(layers)
        of_stage = cache(partial(self._of_stage, split=split))  # most stages are alike
        stages = [of_stage(shares) for shares in self._shares_of(layers)]
        exchange = None
        if pairs and self.exchange != NO_EXCHANGE:
            f, b, w = zip(*(exchanged for _, exchanged in stages))
            exchange = Costs(f, b, w)
        return Costs(
            F=tuple(seconds[0] + e + h for (seconds, _), e, h in zip(stages, embed, head)),
            B=tuple(seconds[1] + e for (seconds, _), e in zip(stages, embed_gradient)),
            W=tuple(seconds[2] for seconds, _ in stages),
            R=tuple(seconds[3] for seconds, _ in stages) if recomputes else 0.0,
            transfer=self.transfer,
            exchange=exchange,
        )

    def _shares_of(self, layers: tuple[int, ...]) -> list[tuple[LayerShare, ...]]:
        """The shares of the layers of every stage."""
        every = self.shares or (LayerShare(),) * sum(layers)
        return [every[a:b] for a, b in pairwise(accumulate(layers, initial=0))]

    def _of_stage(
        self, layers: tuple[LayerShare, ...], *, split: bool
    ) -> tuple[list[float], list[float]]:
        """Seconds of F, B, W and R of a stage without embedding and head, and all-to-alls of it."""
        n, copies, exchange = len(layers), self.copies, self.exchange
        f, b, w, x = (sum(getattr(one, of) for one in layers) / max(n, 1) for of in _SHARED)
        waits, layer = self.sharing.beside(self.tensor), self.layer
        mean = layer.B + layer.W
        both = (b * layer.B + w * layer.W) / mean if mean else 1.0
        computed = [f * layer.F + waits.F, b * layer.B + waits.B, w * layer.W + waits.W]
        exchanged = [x * op for op in (exchange.F, exchange.B, exchange.W)]
        copied = [copies.F, copies.B, copies.W]
        if not split:  # each half of BW is alike
            bw = both * layer.whole_backward + waits.whole_backward
            computed[1:] = [bw / 2] * 2
            exchanged[1:] = [x * exchange.whole_backward / 2] * 2
            copied[1:] = [copies.B / 2] * 2
        seconds = [copies.beside(c, op + x, n) for c, op, x in zip(copied, computed, exchanged)]
        seconds = [*map(sum, zip(seconds, self.again.of_stage(n, split=split)))]
        seconds.append(n * (f * layer.R + waits.R + x * exchange.R))
        return seconds, [n * op for op in exchanged]
