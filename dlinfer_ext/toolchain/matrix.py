"""Every kernel of every model, tensor parallelism, dtype and chip: does it compile to HIVM, and within which limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..kernels.common.tiling import MAX_GRID
from ..targets import load_model, load_soc
from . import aot

# The rest of the unified buffer is left to what hivmc may add after HIVM: spills and alignment.
UB_SHARE: Final = 0.9
CASES: Final = "dlinfer_ext.toolchain.cases"


@dataclass(frozen=True)
class Row:
    """One kernel that one case launches on one chip.

    Attributes:
        model: name in configs/models.
        tp: ranks.
        dtype: of the case.
        operator: of the case.
        phase: of the case.
        soc: the chip.
        kernel: name of the kernel's function; "" if the launcher launched none.
        grid: programs.
        build: what the compiler made of it.
        cached: whether the result was in the cache before this run.
        lower_bound: bytes that no kernel of this case can do without.
        bytes_limit: how many times the lower bound the case may move; None: no bound is set.
        blocks_limit: the same with each run rounded out to blocks of 32 bytes.
        faults: why the row fails, in words; empty if it holds.
        moved: bytes that the case was counted to move; None if it was not counted.
        blocks: the same with each run rounded out to blocks of 32 bytes.
    """

    model: str
    tp: int
    dtype: str
    operator: str
    phase: str
    soc: str
    kernel: str
    grid: tuple[int, int, int]
    build: aot.Build
    cached: bool
    lower_bound: int
    bytes_limit: float | None
    blocks_limit: float | None
    faults: tuple[str, ...] = ()
    moved: int | None = None
    blocks: int | None = None

    @property
    def held(self) -> bool:
        """Whether the row holds."""
        return not self.faults

    @property
    def programs(self) -> int:
        """Programs of the launch."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON can hold it, with `held`."""
        return {**asdict(self), "held": self.held}

    def as_texts(self) -> tuple[str, ...]:
        """Return the cells of a table with the columns of `COLUMNS`."""
        facts = self.build.facts
        cells = [self.model, str(self.tp), self.dtype, self.operator, self.phase, self.soc, self.kernel or "-"]
        for name in ("UB", "L1", "L0C"):
            b = facts.buffer(name) if facts else None
            cells.append(f"{b.used / 1024:.1f}/{b.available / 1024:.0f}" if b else "-")
        if facts:
            cells += [
                f"{facts.loads}/{facts.stores}" + (f"+{facts.scalars}s" if facts.scalars else ""),
                f"{facts.vector_ops}/{sum(facts.dots)}",
                str(facts.barriers),
                f"{sum(facts.exchange) / 1024:.0f}" if facts.exchange else "-",
            ]
        else:
            cells += ["-"] * 4
        ratios = (f"{n / self.lower_bound:.2f}" if n is not None else "-" for n in (self.moved, self.blocks))
        cells += [
            "/".join(ratios),
            f"{self.build.seconds:.1f}",
            "yes" if self.cached else "no",
            "; ".join(self.faults) or "ok",
        ]
        return tuple(cells)


# KiB for the memories; loads and stores are transfers in the text ("+3s": and 3 scalar accesses), operations are vector
# calls and matrix products in the text, exchange is KiB through a workspace in global memory for one trip of a loop,
# bytes and blocks are multiples of the case's lower bound.
COLUMNS: Final = (
    "model",
    "tp",
    "dtype",
    "operator",
    "phase",
    "soc",
    "kernel",
    "UB",
    "L1",
    "L0C",
    "loads/stores",
    "vector/cube",
    "barriers",
    "exchange",
    "bytes/blocks",
    "seconds",
    "cached",
    "verdict",
)


def judge(build: aot.Build, grid: tuple[int, int, int]) -> tuple[str, ...]:
    """Return why one launch of one kernel fails; empty if it holds."""
    faults = []
    if build.kind != aot.OK:
        faults.append(f"{build.kind}: {build.message}")
    programs = grid[0] * grid[1] * grid[2]
    if programs > MAX_GRID:
        faults.append(f"grid: {programs} programs; a launch has at most {MAX_GRID}")
    ub = build.facts.buffer("UB") if build.facts else None
    if ub is not None and ub.share > UB_SHARE:
        faults.append(f"UB: {ub.used} of {ub.available} bytes, {ub.share:.1%}; at most {UB_SHARE:.0%} may be planned")
    return tuple(faults)


def with_bytes(row: Row, moved: int, blocks: int | None = None) -> Row:
    """Return a row with what its case moves, and a fault if that is more than its limits.

    Args:
        row: any row of the case.
        moved: bytes that all launches of the case move: what the native counting build counted, and what they exchange
            through a workspace (`Facts.exchange_bytes`).
        blocks: the same with each run rounded out to blocks of 32 bytes.
    """
    faults = list(row.faults)
    for name, counted, limit in (("bytes", moved, row.bytes_limit), ("blocks", blocks, row.blocks_limit)):
        if counted is not None and limit is not None and counted > limit * row.lower_bound:
            ratio = counted / row.lower_bound
            faults.append(f"{name}: {counted} moved, {ratio:.2f} × the lower bound; at most {limit:.2f} ×")
    return replace(row, moved=moved, blocks=blocks, faults=tuple(faults))


def run_matrix(
    socs: Iterable[str],
    models: Iterable[str],
    tps: Iterable[int],
    dtypes: Iterable[str] = ("bfloat16",),
    cache: Path | None = None,
    on_row: Callable[[Row], None] | None = None,
    *,
    bytes_of: Callable[[Row], tuple[int, int | None] | None] | None = None,
    workers: int = 2,
    timeout: float = 300.0,
    source: str = CASES,
) -> list[Row]:
    """Compile every kernel that the launchers of the models launch.

    Kernels that are equal in source, specialisation and options are compiled once; what was compiled before comes from
    the cache, without a frontend or a compiler.

    Args:
        socs: names in configs/soc.
        models: names in configs/models.
        tps: ranks; a model is left out for a number that does not divide its heads.
        dtypes: "bfloat16", "float16", "float32".
        cache: folder; None for the user's.
        on_row: called with each row as it comes.
        bytes_of: tells the bytes that a row's case moves, and the same in blocks of 32 bytes if known, for the case's
            limits to apply; None where it cannot tell. Called for every row: keep what is the same for a case.
        workers: processes.
        timeout: seconds that the compiler may take for one kernel.
        source: module, or path of a Python file, with `cases(model, tp, dtype)`.

    Returns:
        The rows, sorted. A case that launches nothing, or whose launcher raises, has one row that fails.

    Raises:
        ValueError: a name is not known, or a chip has no Triton.
        RuntimeError: the toolchain is missing, and the cache does not hold all that is asked for.
    """
    chips, rows = tuple(socs), list[Row]()
    groups = [aot.Group(m, tp, d, source) for m in models for tp in tps for d in dtypes if _divides(m, tp)]
    _check_chips(chips)

    def on_case(group: aot.Group, case: aot.Captured, builds: Mapping[str, aot.Build], fresh: frozenset[str]) -> None:
        for row in _rows(group, case, builds, fresh):
            counted = bytes_of(row) if bytes_of else None
            if counted is not None:
                row = with_bytes(row, *counted)
            rows.append(row)
            if on_row:
                on_row(row)

    aot.compile_groups(
        groups, chips, aot.Store(aot.cache_folder(cache)), timeout=timeout, workers=workers, on_case=on_case
    )
    return sorted(rows, key=lambda r: (r.model, r.tp, r.dtype, r.operator, r.phase, r.soc, r.kernel))


def _divides(model: str, tp: int) -> bool:
    m = load_model(model)
    return m.heads % tp == 0 and m.value_heads % tp == 0


def _check_chips(chips: Iterable[str]) -> None:
    for chip in chips:
        if not load_soc(chip).triton:
            raise ValueError(f"no Triton kernel is built for the chip {chip!r} (configs/soc/{chip}.json)")


def _rows(
    group: aot.Group,
    case: aot.Captured,
    builds: Mapping[str, aot.Build],
    fresh: frozenset[str],
) -> list[Row]:
    rows: list[Row] = []

    def add(kernel: str, grid: tuple[int, int, int], build: aot.Build, cached: bool) -> None:
        row = Row(
            group.model,
            group.tp,
            group.dtype,
            case.operator,
            case.phase,
            build.soc,
            kernel,
            grid,
            build,
            cached,
            case.lower_bound,
            case.bytes_limit,
            case.blocks_limit,
            judge(build, grid),
        )
        if row not in rows:
            rows.append(row)

    launched = {x.soc for x in case.launches}
    for launch in case.launches:
        add(launch.kernel, launch.grid, builds[launch.key], launch.key not in fresh)
    for chip in case.chips:
        error = (case.errors or {}).get(chip)
        if error is not None:
            add("", (0, 0, 0), aot.Build("", chip, "", "launcher", error), False)
        elif chip not in launched:
            add("", (0, 0, 0), aot.Build("", chip, "", "launcher", "it launched no kernel"), False)
    return rows
