"""Device code that clears and copies slots of a state pool."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["pairs", "slabs", "rows", "columns", "pool_slot", "pool_slab", "pool_row", "source_step",
                       "target_step"],
    do_not_specialize_on_alignment=["pool_ptr", "source_ptr", "target_ptr"],
)  # fmt: skip
def move_slots_kernel(
    pool_ptr,
    source_ptr,
    target_ptr,
    pairs,
    slabs,
    rows,
    columns,
    source_step,
    target_step,
    pool_slot,
    pool_slab,
    pool_row,
    pool_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COPY: tl.constexpr,
):
    """Clear slots, or copy them with COPY; a slot is [slabs, rows, columns] with strides of its own.

    A task is one tile of one pair. Slots of one row are moved in vectors: a masked tile of one row is miscompiled.
    """
    row_blocks = tl.cdiv(rows, ROWS)
    column_blocks = tl.cdiv(columns, COLUMNS)
    tiles = slabs * row_blocks * column_blocks
    lane = tl.arange(0, COLUMNS)
    for task in range(tl.program_id(0), pairs * tiles, tl.num_programs(0)):
        pair = task // tiles
        tile = task % tiles
        target = tl.load(target_ptr + pair * target_step).to(tl.int64)
        source = target
        if COPY:
            source = tl.load(source_ptr + pair * source_step).to(tl.int64)
        if (target >= 0) & (source >= 0):
            slab = (tile // (row_blocks * column_blocks)).to(tl.int64)
            row_0 = (tile // column_blocks % row_blocks * ROWS).to(tl.int64)
            column_0 = (tile % column_blocks * COLUMNS).to(tl.int64)
            start = slab * pool_slab + row_0 * pool_row + column_0 * pool_column
            if ROWS == 1:
                at = lane * pool_column
                mask = lane < columns - column_0
            else:
                row = tl.arange(0, ROWS)
                at = row[:, None] * pool_row + lane[None, :] * pool_column
                mask = (row[:, None] < rows - row_0) & (lane[None, :] < columns - column_0)
            if COPY:
                value = tl.load(pool_ptr + source * pool_slot + start + at, mask=mask)
            elif ROWS == 1:
                value = tl.zeros((COLUMNS,), dtype=pool_ptr.dtype.element_ty)
            else:
                value = tl.zeros((ROWS, COLUMNS), dtype=pool_ptr.dtype.element_ty)
            tl.store(pool_ptr + target * pool_slot + start + at, value, mask=mask)
