"""Which routes each chip has for each operator, from its record alone."""

from __future__ import annotations

from dataclasses import dataclass

from dlinfer_ext.forms import FOLDERS, NO_KERNEL
from dlinfer_ext.targets import load_soc

from . import fused, soc


@dataclass(frozen=True)
class Entry:
    """One route of one operator on one chip.

    Attributes:
        operator: our operator.
        route: "fused", "triton" or "eager".
        able: whether the chip can take it.
        note: what it needs of a machine, or why the chip cannot.
    """

    operator: str
    route: str
    able: bool
    note: str


def route_table(soc_name: str) -> dict[str, tuple[Entry, ...]]:
    """Return the routes of every operator on a chip, best first; no device is asked.

    Raises:
        ValueError: a chip that configs/soc does not know.
    """
    chip = load_soc(soc_name)
    bound = {entry.operator: entry for entry in fused.FUSED}
    no_fused, no_triton = fused.withheld(chip), soc.no_triton(chip)

    def entries(operator: str) -> tuple[Entry, ...]:
        registered = bound.get(operator)
        if no_fused is not None:
            first = Entry(operator, "fused", False, no_fused)
        elif registered is None:
            first = Entry(operator, "fused", False, "no registered operator is bound to it")
        else:
            first = Entry(operator, "fused", True, f"where the machine registers {registered.name}{registered.schema}")
        unable = "no kernel is written for it yet" if operator in NO_KERNEL else no_triton
        second = Entry(operator, "triton", unable is None, unable or "where triton-ascend is installed")
        return first, second, Entry(operator, "eager", True, "")

    return {operator: entries(operator) for operator in FOLDERS}
