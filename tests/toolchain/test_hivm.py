"""Reading HIVM text and compiler logs, on texts written by hand."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from dlinfer_ext.toolchain import hivm

SPEC = (
    '#dlti.dl_entry<"UB_SIZE", 1572864 : i32>, #dlti.dl_entry<"L1_SIZE", 4194304 : i32>, '
    '#dlti.dl_entry<"L0C_SIZE", 1048576 : i32>, #dlti.dl_entry<"UB_ALIGN_SIZE", 256 : i32>'
)
WORKSPACE = "%arg2: memref<?xi8, #hivm.address_space<gm>> {hacc.arg_type = #hacc.arg_type<workspace>}"


def module(*functions: str, core: str = "AIV") -> str:
    body = "\n".join(functions)
    return f"module attributes {{{SPEC}, hivm.module_core_type = #hivm.module_core_type<{core}>}} {{\n{body}\n}}\n"


def function(name: str, *lines: str, core: str = "AIV") -> str:
    head = f"  func.func @{name}({WORKSPACE}, %arg3: memref<?xf32, #hivm.address_space<gm>>) attributes "
    attributes = f"{{hivm.func_core_type = #hivm.func_core_type<{core}>}} {{"
    return "\n".join((head + attributes, *(f"    {line}" for line in lines), "    return", "  }"))


def ub(shape: str) -> str:
    return f"memref<{shape}, #hivm.address_space<ub>>"


def gm(shape: str) -> str:
    return f"memref<{shape}, strided<[1], offset: ?>, #hivm.address_space<gm>>"


def load(source: str, shape: str, target: str = "%1") -> list[str]:
    """A load as the compiler writes it: the sizes are hidden by casts."""
    return [
        f"%cast_a = memref.cast {source} : {gm(shape)} to {gm('?xf32')}",
        f"func.call @load_gm_to_ubuf_1d_float(%cast_a, {target}, %c0) : ({gm('?xf32')}, {ub('?xf32')}, i32) -> ()",
    ]


def test_high_water_mark_of_each_memory() -> None:
    text = module(
        function(
            "k",
            "%c0_i64 = arith.constant 0 : i64",
            "%c4096_i64 = arith.constant 4096 : i64",
            f"%1 = hivm.hir.pointer_cast(%c0_i64, %c4096_i64) : {ub('1001xf32')}",
            "%2 = hivm.hir.pointer_cast(%c0_i64) : memref<4x2x16x16xbf16, #hivm.address_space<cbuf>>",
        )
    )
    facts = hivm.read(text)
    # Two copies of 4004 bytes, the second at 4096; rounded up to 32 bytes.
    assert facts.buffers == (hivm.Buffer("UB", 8128, 196608), hivm.Buffer("L1", 4096, 524288))
    assert facts.buffer("L0C") is None
    assert facts.core == "AIV"


def test_masks_are_packed() -> None:
    lines = ("%c64_i64 = arith.constant 64 : i64", f"%1 = hivm.hir.pointer_cast(%c64_i64) : {ub('16x256xi1')}")
    assert hivm.read(module(function("k", *lines))).buffers == (hivm.Buffer("UB", 64 + 512, 196608),)


def test_constants_of_a5_belong_to_their_function() -> None:
    vector = function(
        "mix_aiv", "%0 = llvm.mlir.constant(64 : i64) : i64", f"%1 = hivm.hir.pointer_cast(%0) : {ub('8xf32')}"
    )
    cube = function("mix_aic", "%0 = llvm.mlir.constant(9000 : i64) : i64", core="AIC")
    assert hivm.read(module(cube, vector, core="MIX")).buffers == (hivm.Buffer("UB", 96, 196608),)


def test_transfers_by_loop_depth() -> None:
    text = module(
        function(
            "k",
            f"%r = memref.reinterpret_cast %arg3 to offset: [0], sizes: [64] : {gm('?xf32')} to {gm('64xf32')}",
            *load("%r", "64xf32"),
            "scf.for %i = %a to %b step %c  : i32 {",
            *load("%r", "64xf32"),
            "scf.if %cond {",
            *load("%r", "64xf32"),
            "} else {",
            "hivm.hir.pipe_barrier[<PIPE_V>]",
            "}",
            "}",
            f"%v = memref.load %r[%x] : {gm('64xf32')}",
        )
    )
    facts = hivm.read(text)
    assert (facts.loads, facts.stores, facts.scalars, facts.unsized) == (3, 0, 1, 0)
    assert facts.loaded == (256 + 4, 512)
    assert facts.barriers == 1


def test_masked_transfer_has_no_size() -> None:
    view = f"%s = memref.subview %r[0] [%n] [1] : {gm('64xf32')} to {gm('?xf32')}"
    facts = hivm.read(module(function("k", view, *load("%s", "?xf32"))))
    assert (facts.loads, facts.unsized, sum(facts.loaded)) == (1, 1, 0)


def test_loop_of_known_trips_is_unrolled() -> None:
    text = module(
        function(
            "k",
            "%c0 = arith.constant 0 : index",
            "%c64 = arith.constant 64 : index",
            "%c16 = arith.constant 16 : index",
            "scf.for %i = %c0 to %c64 step %c16 {",
            *load("%r", "8xf32"),
            "}",
        )
    )
    assert hivm.read(text).loaded == (4 * 32,)


def test_loops_of_branches() -> None:
    def loop(bound: str) -> str:
        return module(
            function(
                "k",
                "%0 = llvm.mlir.constant(0 : i32) : i32",
                "%1 = llvm.mlir.constant(2 : i32) : i32",
                "%2 = llvm.mlir.constant(10 : i32) : i32",
                "cf.br ^bb1(%0 : i32)",
                "^bb1(%3: i32):  // 2 preds: ^bb0, ^bb2",
                f"%4 = arith.cmpi slt, %3, {bound} : i32",
                "cf.cond_br %4, ^bb2, ^bb3",
                "^bb2:  // pred: ^bb1",
                *load("%r", "8xf32"),
                "%5 = arith.addi %3, %1 overflow<nsw> : i32",
                "cf.br ^bb1(%5 : i32)",
                "^bb3:  // pred: ^bb1",
                *load("%r", "8xf32"),
            )
        )

    assert hivm.read(loop("%arg9")).loaded == (32, 32)
    assert hivm.read(loop("%2")).loaded == (32 + 5 * 32,)


def test_exchange_through_the_workspace() -> None:
    matrix = "memref<?x?xf32, #hivm.address_space<cc>>"
    cube = function(
        "k_mix_aic",
        "scf.for %i = %a to %b step %c  : i32 {",
        f"func.call @mma_tile_float_to_float(%x, %y, %z) : ({ub('?xf32')}, {ub('?xf32')}, {matrix}) -> ()",
        f"%w = memref.view %arg2[%o][] : memref<?xi8, #hivm.address_space<gm>> to {gm('64xf32')}",
        f"%w1 = memref.cast %w : {gm('64xf32')} to {gm('?xf32')}",
        f"func.call @fixpipe_nz2nd_float_to_float(%z, %w1) : ({matrix}, {gm('?xf32')}) -> ()",
        "}",
        core="AIC",
    )
    vector = function(
        "k_mix_aiv",
        "%n = hivm.hir.get_sub_block_idx -> i64",
        "%first = arith.cmpi eq, %n, %c0 : i64",
        "scf.for %i = %a to %b step %c  : i32 {",
        f"%w = memref.view %arg2[%o][] : memref<?xi8, #hivm.address_space<gm>> to {gm('64xf32')}",
        *load("%w", "64xf32"),
        "scf.if %first {",
        *load("%w", "64xf32"),
        "}",
        "}",
    )
    size = (
        "  func.func @k_infer_workspace_shape_function() -> index attributes {host} {\n"
        "    %c512 = arith.constant 512 : index\n    return %c512 : index\n  }"
    )
    facts = hivm.read(module(size, cube, vector, core="MIX"))
    # Written once by the cube core, read by both vector cores, and once more by the first alone.
    assert facts.exchange == (0, 256 + 2 * 256 + 256)
    assert (facts.workspace, facts.dots, facts.core) == (512, (0, 1), "MIX")
    assert facts.exchange_bytes(10) == 10 * 1024
    assert sum(facts.loaded) == sum(facts.stored) == 0


def test_exchange_on_the_chip_is_no_traffic() -> None:
    copy = f"call @copy_ubuf_to_cbuf_1d_float(%a, %b) : ({ub('?xf32')}, memref<?xf32, #hivm.address_space<cbuf>>) -> ()"
    facts = hivm.read(module(function("k_mix_aiv", copy), core="MIX"))
    assert (facts.onchip, facts.loads, facts.stores, facts.exchange) == (1, 0, 0, ())


def test_outlined_vector_function_counts_its_operations() -> None:
    outlined = "\n".join(
        (
            f"  func.func @k_vf(%arg0: {ub('64xf32')}) attributes {{hivm.vector_function, no_inline}} {{",
            '    %1 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%0) : (!llvm.ptr<6>) -> vector<64xf32>',
            '    %2 = "hivm_regbaseintrins.intr.hivm.vexp.x"(%1) : (vector<64xf32>) -> vector<64xf32>',
            '    %3 = "hivm_regbaseintrins.intr.hivm.vmul.s.x"(%1, %2) : (vector<64xf32>) -> vector<64xf32>',
            "    return",
            "  }",
        )
    )
    call = f"call @k_vf(%1) : ({ub('64xf32')}) -> ()"
    other = f"call @vadd_1d_float(%1, %1, %1) : ({ub('?xf32')}, {ub('?xf32')}, {ub('?xf32')}) -> ()"
    assert hivm.read(module(outlined, function("k", call, other))).vector_ops == 3


def test_no_kernel_in_the_text() -> None:
    with pytest.raises(ValueError, match="no function with the arguments of a kernel"):
        hivm.read("module {\n}\n")


def test_facts_survive_json() -> None:
    facts = hivm.read(module(function("k", *load("%r", "8xf32"))))
    assert hivm.Facts.from_json(json.loads(json.dumps(asdict(facts)))) == facts


@pytest.mark.parametrize(("space", "name"), [("ub", "UB"), ("cbuf", "L1"), ("cc", "L0C")])
def test_overflow(space: str, name: str) -> None:
    cause = hivm.failure(f"loc(1): error: {space} overflow, requires 16384 bits while 8192 bits available! (...)\n", 1)
    assert cause == hivm.Failure("overflow", f"{name} would need 2048 bytes and has 1024", name, 2048, 1024)


@pytest.mark.parametrize(
    ("log", "status", "kind"),
    [
        ("error: 'hivm.hir.vmul' op operand #0 should have element type 16-bit float", 1, "type"),
        ("error: failed to legalize operation 'tt.sort'", 1, "refused"),
        ("Stack dump:\n0. Program arguments: bishengir-compile", 1, "crash"),
        ("", -11, "crash"),
        ("error: Failed to run BiShengHIR pipeline\n", 1, "refused"),
    ],
)
def test_kinds_of_failure(log: str, status: int, kind: str) -> None:
    cause = hivm.failure(log, status)
    assert cause.kind == kind
    assert cause.message


def test_what_the_compiler_gave_up() -> None:
    log = (
        "[NOTE] Ub overflow detected; automatically set enable-code-motion to false and retrying compilation.\n"
        "[NOTE] Due to Ub overflow, automatically set enable-code-motion to false, set enable-auto-multi-buffer to "
        "false; compilation then succeeded.\n"
    )
    assert hivm.dropped(log) == ("enable-code-motion", "enable-auto-multi-buffer")
    assert hivm.dropped("[ERROR] Cannot find hivmc under $PATH \n") == ()
