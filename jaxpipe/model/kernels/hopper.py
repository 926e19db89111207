"""A kernel for Hopper GPUs: grouped products of 8-bit floats, in Pallas's Mosaic GPU.

The result is computed in tiles of 128 x 128, each the sum of products of 128 x 128 blocks of the
operands, which both are contracted over their last dim, because Hopper multiplies 8-bit floats in
no other order. `Tiles` says which blocks; so one kernel multiplies rows and groups.

The tensor cores add up 8-bit products in about 14 bits. The sum of every 128 products is therefore
added to a float32 sum in registers (DeepSeek-AI 2024, "DeepSeek-V3", 3.3.2).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpipe.model.kernels.grouped_fp8 import TILE

_SHARED = 227 * 2**10  # bytes of shared memory of a multiprocessor
_WARPGROUPS = 2  # warpgroups that multiply, each half of a tile's rows; one more loads
_HALF = TILE // _WARPGROUPS
# Registers of a thread that loads, and of one that multiplies: it has two sums of 64 each. All
# threads together have at most 65536.
_LOADING_REGISTERS, _MULTIPLYING_REGISTERS = 40, 232


class Tiles(NamedTuple):
    """Which blocks each of T rows of tiles of the result adds up, `[T]` int32 each.

    Attributes:
      rows: the row of blocks of the left operand.
      matrix: the matrix of the right operand.
      begin: the first block of the contracted dim.
      count: the number of these blocks; 0 gives zeros.
    """

    rows: jax.Array
    matrix: jax.Array
    begin: jax.Array
    count: jax.Array


def multiply_rows(
    left_SK: jax.Array, right_ENK: jax.Array, sizes_E: jax.Array, scale: jax.Array, **how: Any
) -> jax.Array:
    """`GroupedFp8.multiply_rows`; `how` as in `multiply_tiles`."""
    groups = len(sizes_E)
    tile_T = lax.iota(jnp.int32, len(left_SK) // TILE)
    ends_E = jnp.cumsum(sizes_E, dtype=jnp.int32) // TILE
    group_T = jnp.searchsorted(ends_E, tile_T, side="right", method="compare_all")
    count_T = jnp.where(group_T < groups, left_SK.shape[1] // TILE, 0)
    tiles = Tiles(tile_T, jnp.minimum(group_T, groups - 1), jnp.zeros_like(tile_T), count_T)
    return multiply_tiles(left_SK, right_ENK, tiles, scale, **how)


def multiply_groups(
    left_MS: jax.Array, right_NS: jax.Array, sizes_E: jax.Array, scale: jax.Array, **how: Any
) -> jax.Array:
    """`GroupedFp8.multiply_groups`; `how` as in `multiply_tiles`."""
    groups, rows = len(sizes_E), len(left_MS) // TILE
    ends_E = jnp.cumsum(sizes_E, dtype=jnp.int32)
    begin_T, count_T = (jnp.repeat(of // TILE, rows) for of in (ends_E - sizes_E, sizes_E))
    row_T = jnp.tile(lax.iota(jnp.int32, rows), groups)
    tiles = Tiles(row_T, jnp.zeros_like(row_T), begin_T, count_T)
    result = multiply_tiles(left_MS, right_NS[None], tiles, scale, **how)
    return result.reshape(groups, *left_MS.shape[:1], *right_NS.shape[:1])


def multiply_tiles(
    left_MK: jax.Array, right_ENK: jax.Array, tiles: Tiles, scale: jax.Array, *,
    dtype: Any, cores: int, interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """Multiply blocks of two 8-bit operands, `[M, K]` and `[E, N, K]`, times a scale.

    Args:
      left_MK, right_ENK: the operands; their formats may differ.
      tiles: the blocks.
      scale: a float32 scalar.
      dtype: of the result.
      cores: multiprocessors of the GPU; one after the other takes the next tile.
      interpret: parameters of jax's interpreter of such kernels, which needs no GPU.

    Returns:
      `[128 T, N]`.
    """
    rows, width = len(tiles.rows), right_ENK.shape[1]
    # Pairs of blocks in shared memory, beside a tile of the result: as many as there is room for.
    slots = (_SHARED // TILE**2 - jnp.dtype(dtype).itemsize) // 2

    def grouped_fp8(*refs: Any) -> None:  # a profile has this name
        _run(_Refs(*refs), (rows, width // TILE))

    kernel = plgpu.kernel(
        grouped_fp8,
        out_type=jax.ShapeDtypeStruct((rows * TILE, width), dtype),
        scratch_types=(
            _swizzled((slots, TILE, TILE), left_MK.dtype),
            _swizzled((slots, TILE, TILE), right_ENK.dtype),
            _swizzled((_WARPGROUPS, _HALF, TILE), dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=slots),
        ),
        grid=(cores,),
        grid_names=("core",),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    return kernel(left_MK, right_ENK, jnp.stack(tiles), scale.reshape(1))


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout that tensor cores read."""
    width = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128))
    )


class _Refs(NamedTuple):
    """The kernel's memory.

    `left` to `result` are in global memory; slots of blocks, and the halves of a tile, in shared
    memory. Barriers of the slots tell that a slot is loaded, and that it is no longer used.
    """

    left: Any
    right: Any
    tiles: Any
    scale: Any
    result: Any
    left_slots: Any
    right_slots: Any
    halves: Any
    loaded: Any
    used: Any

    @property
    def slots(self) -> int:
        """The number of slots."""
        return self.left_slots.shape[0]


def _run(refs: _Refs, grid: tuple[int, int]) -> None:
    """The program of a multiprocessor: one warpgroup loads blocks, the others multiply them.

    Blocks are numbered over all tiles of the multiprocessor, and a block is in the slot of its
    number modulo the number of slots: the next tile's blocks are loaded while a tile is stored.
    """
    warpgroup = lax.axis_index("warpgroup")

    def for_each_tile(run: Callable[..., None]) -> None:
        """Call `run(refs, row, column, first, count)`; a tile has blocks first, first + 1, ..."""

        @plgpu.nd_loop(grid, collective_axes="core", init_carry=jnp.int32(0))
        def _(loop: Any, carry: jax.Array) -> jax.Array:
            count = refs.tiles[Tiles._fields.index("count"), loop.index[0]]
            run(refs, *loop.index, carry, count)
            return carry + count

    @pl.when(warpgroup == _WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(_LOADING_REGISTERS, action="decrease")
        for_each_tile(_load_tile)

    @pl.when(warpgroup < _WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(_MULTIPLYING_REGISTERS, action="increase")
        for_each_tile(_multiply_tile)
        plgpu.wait_smem_to_gmem(0)


def _load_tile(refs: _Refs, row: Any, column: Any, first: Any, count: Any) -> None:
    """Load the blocks of a tile."""
    tile = Tiles(*(refs.tiles[field, row] for field in range(len(Tiles._fields))))

    @pl.loop(0, count)
    def _(k: Any) -> None:
        block, over = first + k, _blocks(tile.begin + k)
        slot = lax.rem(block, refs.slots)

        @pl.when(block >= refs.slots)
        def _() -> None:
            plgpu.barrier_wait(refs.used.at[slot])

        for operand, slots in (
            (refs.left.at[_blocks(tile.rows), over], refs.left_slots),
            (refs.right.at[tile.matrix, _blocks(column), over], refs.right_slots),
        ):
            plgpu.copy_gmem_to_smem(operand, slots.at[slot], refs.loaded.at[slot])


def _multiply_tile(refs: _Refs, row: Any, column: Any, first: Any, count: Any) -> None:
    """Compute this warpgroup's half of a tile, and start to store it."""
    warpgroup = lax.axis_index("warpgroup")

    def add_block(k: Any, total: jax.Array) -> jax.Array:
        slot = lax.rem(first + k, refs.slots)
        plgpu.barrier_wait(refs.loaded.at[slot])

        def multiply(sums: Any) -> jax.Array:
            left = refs.left_slots.at[slot, pl.ds(warpgroup * _HALF, _HALF)]
            plgpu.wgmma(sums, left, refs.right_slots.at[slot].transpose((1, 0)))
            return sums[...]

        product = pl.run_scoped(multiply, plgpu.ACC((_HALF, TILE), jnp.float32))
        plgpu.barrier_arrive(refs.used.at[slot])
        return total + product

    zeros = plgpu.layout_cast(jnp.zeros((_HALF, TILE), jnp.float32), plgpu.Layout.WGMMA)
    total = lax.fori_loop(0, count, add_block, zeros)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the previous tile
    refs.halves[warpgroup] = (total * refs.scale[0]).astype(refs.halves.dtype)
    plgpu.commit_smem()
    rows = pl.ds(row * TILE + warpgroup * _HALF, _HALF)
    plgpu.copy_smem_to_gmem(refs.halves.at[warpgroup], refs.result.at[rows, _blocks(column)])


def _blocks(index: Any) -> Any:
    """The elements of a block."""
    return pl.ds(index * TILE, TILE)
