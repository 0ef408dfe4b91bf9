"""A head dim as a sum of powers of two, in Gluon: 80 is 64 + 16. Shapes of tiles are powers of two, and products padded to the next one
would be up to 1.6 times as many.

Each part has a descriptor, tiles in shared memory and a product of its own. Scores are a sum over the parts. Each part of an output has
its own sums in registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from attn_compiler.lowerings.shared.kernels.releases_sm90 import async_load, async_store
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import ROWS, descriptor


@gluon.constexpr_function
def parts_in(ALL):
    """Return the number of powers of two that sum up to a head dim."""
    return ALL.bit_count()


@gluon.constexpr_function
def start_of(ALL, n):
    """Return the first dim of the n-th part. The first part is the widest."""
    start = 0
    for _ in range(n):
        start += 1 << ((ALL - start).bit_length() - 1)
    return start


@gluon.constexpr_function
def width_of(ALL, n):
    """Return the number of dims of the n-th part."""
    return 1 << ((ALL - start_of(ALL, n)).bit_length() - 1)


@gluon.constexpr_function
def out_layout(ALL, n):
    """Return the register layout of the n-th part of 64 outputs."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width_of(ALL, n), 16])


@gluon.constexpr_function
def weights_layout(ALL, n):
    """Return the register layout of the weights that multiply the n-th part of the values: the same registers for each part."""
    return gl.DotOperandLayout(0, out_layout(ALL, n), k_width=2)


@gluon.jit
def descriptors(X, batch, heads, length, strides, SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, ALL: gl.constexpr):
    """Make a descriptor of each part of a logical BHSD tensor, for tiles of SIZE positions of one head. All begin at the tensor's first
    dim."""
    found = ()
    for n in gl.static_range(parts_in(ALL)):
        found += (descriptor(X, batch, heads, length, strides, SIZE, HEAD_DIM, width_of(ALL, n)),)
    return found


@gluon.jit
def room(ELEMENT: gl.constexpr, COUNT: gl.constexpr, SIZE: gl.constexpr, of, ALL: gl.constexpr):
    """Allocate shared memory for COUNT tiles of each part. of: `descriptors` of the parts."""
    found = ()
    for n in gl.static_range(parts_in(ALL)):
        found += (gl.allocate_shared_memory(ELEMENT, [COUNT, 1, 1, SIZE, width_of(ALL, n)], of[n].layout),)
    return found


@gluon.jit
def fetch_parts(of, batch, head, position, barrier, tiles, place, ALL: gl.constexpr):
    """Load all parts of a tile, and have the barrier expect them. tiles: of `room`."""
    BYTES: gl.constexpr = of[0].block_type.nbytes // width_of(ALL, 0) * ALL
    mbarrier.expect(barrier, BYTES)
    for n in gl.static_range(parts_in(ALL)):
        async_load(
            of[n], [batch, head, position, start_of(ALL, n)], barrier, tiles[n].index(place)
        )  # fmt: skip


@gluon.jit
def rows_at(tiles, place, SIZE: gl.constexpr, ALL: gl.constexpr):
    """Return all parts of a tile as (SIZE, dims of the part)."""
    found = ()
    for n in gl.static_range(parts_in(ALL)):
        found += (tiles[n].index(place).reshape([SIZE, width_of(ALL, n)]),)
    return found


@gluon.jit
def slices_of(tile, ALL: gl.constexpr):
    """Return all parts of a tile whose rows lie in one buffer, which may be wider."""
    found = ()
    for n in gl.static_range(parts_in(ALL)):
        found += (tile.slice(start_of(ALL, n), width_of(ALL, n), dim=1),)
    return found


@gluon.jit
def scores_of(q, k, scores, ALL: gl.constexpr):
    """Start q kᵀ. q, k: of `rows_at`. The values in `scores` are overwritten."""
    for n in gl.static_range(parts_in(ALL)):
        scores = warpgroup_mma(q[n], k[n].permute([1, 0]), scores, use_acc=n > 0, is_async=True)
    return scores


@gluon.jit
def no_outputs(ALL: gl.constexpr):
    """Return zeros for each part of 64 outputs."""
    found = ()
    for n in gl.static_range(parts_in(ALL)):
        found += (gl.zeros([ROWS, width_of(ALL, n)], gl.float32, layout=out_layout(ALL, n)),)
    return found


@gluon.jit
def outputs_of(weights, v, out, ALL: gl.constexpr):
    """Start adding a tile to each part of the outputs, with a product a part. v: of `rows_at`."""
    found = ()
    for n in gl.static_range(parts_in(ALL)):
        own = gl.convert_layout(weights, weights_layout(ALL, n), assert_trivial=True)
        found += (warpgroup_mma(own, v[n], out[n], is_async=True),)
    return found


@gluon.jit
def outputs_there(out, ALL: gl.constexpr):
    """Wait for the products of `outputs_of`."""
    found = warpgroup_mma_wait(0, deps=out)
    if parts_in(ALL) == 1:
        found = (found,)
    return found


@gluon.jit
def times(out, of_rows, ALL: gl.constexpr):
    """Multiply each part of the outputs by a number of its row."""
    found = ()
    for n in gl.static_range(parts_in(ALL)):
        own = gl.convert_layout(of_rows, gl.SliceLayout(1, out_layout(ALL, n)), assert_trivial=True)
        found += (out[n] * own[:, None],)
    return found


@gluon.jit
def zero_where(is_empty, out, ALL: gl.constexpr):
    """Set some rows of each part of the outputs to 0, also where they hold NaN."""
    found = ()
    for n in gl.static_range(parts_in(ALL)):
        own = gl.convert_layout(is_empty, gl.SliceLayout(1, out_layout(ALL, n)), assert_trivial=True)
        found += (gl.where(own[:, None], 0.0, out[n]),)
    return found


@gluon.jit
def sums_of(out, LAYOUT: gl.constexpr, ALL: gl.constexpr):
    """Return the sum of each row's outputs, in a layout of rows."""
    total = gl.convert_layout(gl.sum(out[0], 1), LAYOUT, assert_trivial=True)
    for n in gl.static_range(1, parts_in(ALL)):
        total += gl.convert_layout(gl.sum(out[n], 1), LAYOUT, assert_trivial=True)
    return total


@gluon.jit
def put(out, tiles, place, ALL: gl.constexpr):
    """Store each part of the outputs of 64 queries to shared memory. tiles: of `room`."""
    for n in gl.static_range(parts_in(ALL)):
        tiles[n].index(place).reshape([ROWS, width_of(ALL, n)]).store(out[n].to(tiles[n].dtype))


@gluon.jit
def send(of, batch, head, position, tiles, place, ALL: gl.constexpr):
    """Have the copy engine write all parts of a tile to memory."""
    for n in gl.static_range(parts_in(ALL)):
        async_store(of[n], [batch, head, position, start_of(ALL, n)], tiles[n].index(place))
