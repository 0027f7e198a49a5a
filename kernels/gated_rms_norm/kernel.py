"""Device code of the gated RMS norm."""

import triton
import triton.language as tl


@triton.jit
def _gate_factor(gate, SIGMOID: tl.constexpr):
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    return sigmoid if SIGMOID else gate * sigmoid


@triton.jit(
    do_not_specialize=[
        "slabs",
        "rows",
        "parts",
        "eps",
        "x_slab",
        "x_row",
        "x_part",
        "gate_slab",
        "gate_row",
        "gate_part",
    ],
    do_not_specialize_on_alignment=["x_ptr", "gate_ptr", "weight_ptr", "bias_ptr", "out_ptr"],
)
def gated_rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    slabs,
    rows,
    parts,
    x_slab,
    x_row,
    x_part,
    x_step,
    gate_slab,
    gate_row,
    gate_part,
    gate_step,
    weight_step,
    bias_step,
    eps,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """Norm [slabs, rows, parts, CHANNELS] over its last dimension; out is contiguous in that shape.

    A task is a tile of ROWS rows by PARTS parts. With GROUPED a part is a group of channels with weights of its own,
    otherwise a row like any other. One part fits a tile (BLOCK >= CHANNELS), so that everything is read once.
    """
    row_blocks = tl.cdiv(rows, ROWS)
    part_blocks = tl.cdiv(parts, PARTS)
    lane = tl.arange(0, BLOCK)
    live = lane < CHANNELS
    if not GROUPED:
        weight = tl.load(weight_ptr + lane * weight_step, mask=live, other=0.0).to(tl.float32)[None, :]
        if BIASED:
            bias = tl.load(bias_ptr + lane * bias_step, mask=live, other=0.0).to(tl.float32)[None, :]
    for task in range(tl.program_id(0), slabs * row_blocks * part_blocks, tl.num_programs(0)):
        slab = (task // (row_blocks * part_blocks)).to(tl.int64)
        row_0 = (task // part_blocks % row_blocks * ROWS).to(tl.int64)
        part_0 = (task % part_blocks * PARTS).to(tl.int64)
        r = tl.arange(0, ROWS)[:, None, None]
        p = tl.arange(0, PARTS)[None, :, None]
        c = lane[None, None, :]
        mask = (r < rows - row_0) & (p < parts - part_0) & (c < CHANNELS)
        x_base = x_ptr + slab * x_slab + row_0 * x_row + part_0 * x_part
        x = tl.load(x_base + r * x_row + p * x_part + c * x_step, mask=mask, other=0.0)
        y = tl.reshape(x, (ROWS * PARTS, BLOCK)).to(tl.float32)
        if GATED:
            gate_base = gate_ptr + slab * gate_slab + row_0 * gate_row + part_0 * gate_part
            gate = tl.load(gate_base + r * gate_row + p * gate_part + c * gate_step, mask=mask, other=0.0)
            factor = _gate_factor(tl.reshape(gate, (ROWS * PARTS, BLOCK)).to(tl.float32), SIGMOID)
            if not NORM_FIRST:
                y = y * factor
        root = tl.sqrt(tl.sum(y * y, 1) / CHANNELS + eps)
        y = y * (1.0 / root)[:, None]
        if GROUPED:
            q = tl.arange(0, PARTS)[:, None]
            own = (q < parts - part_0) & (lane[None, :] < CHANNELS)
            at = (part_0 + q) * CHANNELS + lane[None, :]
            weights = tl.load(weight_ptr + at * weight_step, mask=own, other=0.0).to(tl.float32)
            y = tl.reshape(tl.reshape(y, (ROWS, PARTS, BLOCK)) * weights[None, :, :], (ROWS * PARTS, BLOCK))
            if BIASED:
                biases = tl.load(bias_ptr + at * bias_step, mask=own, other=0.0).to(tl.float32)
                y = tl.reshape(tl.reshape(y, (ROWS, PARTS, BLOCK)) + biases[None, :, :], (ROWS * PARTS, BLOCK))
        else:
            y = y * weight
            if BIASED:
                y = y + bias
        if GATED and NORM_FIRST:
            y = y * factor
        out = tl.reshape(y.to(out_ptr.dtype.element_ty), (ROWS, PARTS, BLOCK))
        out_base = out_ptr + ((slab * rows + row_0) * parts + part_0) * CHANNELS
        tl.store(out_base + (r * parts + p) * CHANNELS + c, out, mask=mask)


@triton.jit(
    do_not_specialize=["rows", "channels", "eps", "x_row", "gate_row"],
    do_not_specialize_on_alignment=["x_ptr", "gate_ptr", "weight_ptr", "bias_ptr", "out_ptr"],
)
def gated_rms_norm_wide_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    channels,
    x_row,
    x_step,
    gate_row,
    gate_step,
    weight_step,
    bias_step,
    eps,
    groups,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORM_FIRST: tl.constexpr,
):
    """Norm rows too long for a tile, in two passes over blocks of their channels; rows [rows / groups, groups]."""
    r = tl.arange(0, ROWS)[:, None]
    for task in range(tl.program_id(0), groups * tl.cdiv(rows, ROWS), tl.num_programs(0)):
        group = (task % groups).to(tl.int64) * channels
        row_0 = (task // groups * ROWS).to(tl.int64)
        squares = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for start in range(0, channels, BLOCK):
            c = start + tl.arange(0, BLOCK)[None, :]
            mask = (r < rows - row_0) & (c < channels)
            y = tl.load(x_ptr + row_0 * x_row + r * x_row + (group + c) * x_step, mask=mask, other=0.0).to(tl.float32)
            if GATED and not NORM_FIRST:
                gate = tl.load(
                    gate_ptr + row_0 * gate_row + r * gate_row + (group + c) * gate_step, mask=mask, other=0.0
                )
                y = y * _gate_factor(gate.to(tl.float32), SIGMOID)
            squares += y * y
        scale = 1.0 / tl.sqrt(tl.sum(squares, 1) / channels + eps)
        for start in range(0, channels, BLOCK):
            lane = start + tl.arange(0, BLOCK)
            c = lane[None, :]
            mask = (r < rows - row_0) & (c < channels)
            y = tl.load(x_ptr + row_0 * x_row + r * x_row + (group + c) * x_step, mask=mask, other=0.0).to(tl.float32)
            if GATED:
                gate = tl.load(
                    gate_ptr + row_0 * gate_row + r * gate_row + (group + c) * gate_step, mask=mask, other=0.0
                )
                factor = _gate_factor(gate.to(tl.float32), SIGMOID)
                if not NORM_FIRST:
                    y = y * factor
            weight = tl.load(weight_ptr + (group + lane) * weight_step, mask=lane < channels, other=0.0).to(tl.float32)
            y = y * scale[:, None] * weight[None, :]
            if BIASED:
                bias = tl.load(bias_ptr + (group + lane) * bias_step, mask=lane < channels, other=0.0).to(tl.float32)
                y = y + bias[None, :]
            if GATED and NORM_FIRST:
                y = y * factor
            at = (row_0 + r) * (groups * channels) + group + c
            tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)
