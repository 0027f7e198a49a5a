"""DLINFER_EXT_DUMP: what a call found in its state pools and what it left there, as one safetensors file.

A file holds the slots that the rows of the call touch, before and after it, the tensors that tell the rows, and inputs
and outputs that are small; `python -m dlinfer_ext explain-state` reads it, and nothing is pickled. Its metadata has one
key, `HEADER`, with a JSON object: operator, layout, step, pool, arguments, versions, rank, pid, and the fault: what
DLINFER_EXT_CHECK=1 found, or the error that the call ended with.

A step is a call that may write a pool and has a live row, counted for each pool from 0. What only reads a pool, or
moves whole slots of it, belongs to the last step. What is written is bounded: see the constants. Nothing is deleted and
nothing overwritten.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from .. import envs
from ..version import __version__
from ._access import KINDS, Entries, Plan

HEADER: Final = "dlinfer_ext_state"
FORMAT: Final = 1
TENSOR_BYTES: Final = 1 << 20  # of an input or an output; of a larger input the tokens that are stored
POOL_BYTES: Final = 32 << 20  # of one pool's slots, before the call and again after it
FOLDER_BYTES: Final = 1 << 30  # of all dumps in the folder, whichever process wrote them
FOLDER_FILES: Final = 2000
FAULT_FILES: Final = 16  # of a process, beyond the two bounds of the folder

_PACKAGES: Final = ("torch", "torch_npu", "triton", "triton-ascend", "lmdeploy")
_READERS: Final = ("kpool_select", "latent_attention", "zero_slots", "copy_slots")

logger = logging.getLogger("dlinfer_ext")


@cache
def steps_of(text: str) -> tuple[range, ...]:
    """Return the steps of a value of DLINFER_EXT_DUMP_STEPS: numbers and ranges with commas between, or "none".

    Raises:
        ValueError: it is something else.
    """
    if text == "none":
        return ()
    found = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or bool(dash) != bool(last):
            raise ValueError(
                f"{envs.DUMP_STEPS.name}={text!r} is not supported: set it to none, or to numbers and ranges of steps "
                "such as 0-3,100"
            )
        found.append(range(int(first), int(last or first) + 1))
    return tuple(found)


@cache
def folder_of(text: str) -> Path:
    """Return the folder of a value of DLINFER_EXT_DUMP, made if it is not there.

    Raises:
        ValueError: it is no folder that can be written to.
    """
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{envs.DUMP.name}={text!r} is not supported: {error.strerror or error}; set it to a folder that can be "
            "written to, or that can be made"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"{envs.DUMP.name}={text!r} is not supported: the folder cannot be written to; set it to one that can"
        )
    return folder.resolve()


@dataclass
class _Pools:
    """The state pools of this process in the order in which they were first used, and the steps made on each."""

    numbers: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)

    def step(self, pool: Tensor, *, counts: bool) -> tuple[int, int]:
        """Return (number of the pool, step) of a call."""
        number = self.numbers.setdefault(pool.data_ptr(), len(self.numbers))
        if counts:
            self.steps[number] = self.steps.get(number, -1) + 1
        return number, max(self.steps.get(number, 0), 0)


_pools: Final = _Pools()
_faults = 0
_full = False


def reset() -> None:
    """Forget pools, steps and faults, as in a new process."""
    global _faults, _full
    _pools.numbers.clear()
    _pools.steps.clear()
    _faults, _full = 0, False
    folder_of.cache_clear()


@dataclass(frozen=True)
class Recording:
    """A call that is, or may be, written: taken before the call, as its state is then.

    Attributes:
        chosen: it is written whether or not a fault is found.
        tensors: named as in the file.
        header: likewise.
    """

    plan: Plan
    arguments: Mapping[str, Any]
    folder: Path
    chosen: bool
    tensors: dict[str, Tensor]
    header: dict[str, Any]

    @classmethod
    def begin(cls, plan: Plan, arguments: Mapping[str, Any], *, faults: bool) -> Recording | None:
        """Begin to record a call, or return None if neither its step was asked for nor a fault is looked for."""
        text = envs.DUMP.get()
        if not text:
            return None
        folder, steps = folder_of(text), steps_of(envs.DUMP_STEPS.get())
        pools = {n: arguments[n] for n in KINDS[plan.operator].pools if arguments[n] is not None}
        live = any(row.live for row in plan.rows)
        if not pools or not (live or plan.problems):
            return None
        first = next(iter(pools.values()))
        number, step = _pools.step(first, counts=live and plan.operator not in _READERS)
        chosen = live and any(step in part for part in steps)
        if not (chosen or faults):
            return None
        tensors: dict[str, Tensor] = {}
        header = {
            "format": FORMAT,
            "operator": plan.operator,
            "layout": plan.layout,
            "step": step,
            "pool": number,
            "rank": dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,
            "pid": os.getpid(),
            "versions": _versions(),
            "fault": None,
            "ran": False,
            "arguments": {name: _described(value) for name, value in arguments.items()},
            "left_out": [],
        }
        recording = cls(plan, arguments, folder, chosen, tensors, header)
        recording._take_pools(pools, "before")
        return recording

    def _take_pools(self, pools: Mapping[str, Tensor], when: str) -> None:
        """Copy the slots that the rows touch: those written first, then those read, then those of PAD rows."""
        for name, pool in pools.items():
            if when == "before":
                slots = _touched(self.plan, name if self.plan.layout != "pages" else None)
                most = max(1, POOL_BYTES // max(1, pool[:1].numel() * pool.element_size()))
                if len(slots) > most:
                    self.header["left_out"].append(f"{len(slots) - most} slots of {name}")
                self.tensors[f"slots.{name}"] = torch.tensor(slots[:most], dtype=torch.int64)
            index = self.tensors[f"slots.{name}"].to(pool.device)
            self.tensors[f"{when}.{name}"] = pool.index_select(0, index).cpu()

    def end(self, out: object = None, *, ran: bool, fault: str | None = None) -> Path | None:
        """Write the file if its step was asked for or there is a fault; return its path, or None."""
        if not (self.chosen or fault):
            return None
        if not _room(self.folder, fault=fault is not None):
            return None
        kind = KINDS[self.plan.operator]
        self.header.update(fault=fault, ran=ran)
        if ran:
            self._take_pools({n: self.arguments[n] for n in kind.pools if self.arguments[n] is not None}, "after")
            if isinstance(out, Tensor):
                self._take("out", out)
        for name, value in self.arguments.items():
            if isinstance(value, Tensor) and name not in kind.pools:
                self._take(name, value, always=name in kind.metadata)
        return _write(self.folder, self._name(fault), self.tensors, self.header)

    def _take(self, name: str, value: Tensor, *, always: bool = False) -> None:
        """Take an argument or the output; of a large input the tokens that go into the pool as they are."""
        if always or value.numel() * value.element_size() <= TENSOR_BYTES:
            self.tensors[name] = value.detach().cpu().contiguous()
            return
        kind = KINDS[self.plan.operator]
        kept = sorted({t for row in self.plan.rows for t in _stored(row.writes, row.tokens)}) if name == "x" else []
        size = value[:1].numel() * value.element_size()
        if kept and len(kept) * size <= POOL_BYTES:
            self.tensors[f"tokens.{name}"] = torch.tensor(kept, dtype=torch.int64)
            packed = kind.packed(name, self.arguments)
            self.tensors[name] = packed.index_select(0, self.tensors[f"tokens.{name}"].to(value.device)).cpu()
        else:
            self.header["left_out"].append(name)

    def _name(self, fault: str | None) -> str:
        h = self.header
        name = f"rank{h['rank']}-step{h['step']:06}-pool{h['pool']:03}-{h['operator']}-pid{h['pid']}"
        return name + ("-fault" if fault else "")


def _touched(plan: Plan, pool: str | None) -> list[int]:
    """Return the slots that a call touches in a pool, or in any (None): caches in blocks share their table."""
    written, read, witnesses = list[int](), list[int](), list[int]()
    for row in plan.rows:
        for slots, part in ((written, row.writes), (read, row.reads)):
            slots.extend(slot for name, entries in part.items() if pool in (None, name) for slot in entries.slots())
        witnesses.extend(slot for name, found in row.witnesses.items() if pool in (None, name) for slot in found)
    return list(dict.fromkeys(written + read + witnesses))


def _stored(writes: Mapping[str, Entries], tokens: range) -> list[int]:
    return [tokens.start + t for entries in writes.values() for t in entries.positions.tolist() if t >= 0]


def _described(value: object) -> object:
    """Return an argument as JSON: a tensor by its shape and dtype."""
    if isinstance(value, Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    return list(value) if isinstance(value, list | tuple) else value


@cache
def _versions() -> dict[str, str]:
    found = {"dlinfer_ext": __version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _room(folder: Path, *, fault: bool) -> bool:
    """Tell whether one more dump may be written; say once that none may."""
    global _faults, _full
    if fault:
        _faults += 1
        if _faults <= FAULT_FILES:
            return True
    sizes = [entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(".safetensors")]
    if len(sizes) < FOLDER_FILES and sum(sizes) < FOLDER_BYTES:
        return True
    if not _full:
        _full = True
        logger.warning(
            "%s: no more is written, as %s holds %d dumps of %d bytes; the bounds are %d and %d. Empty it, or unset %s",
            envs.DUMP.name, folder, len(sizes), sum(sizes), FOLDER_FILES, FOLDER_BYTES, envs.DUMP.name,
        )  # fmt: skip
    return False


def _write(folder: Path, name: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Path | None:
    """Write a new file, of another name where there is one; a file that could not be written is logged and left out."""
    from safetensors.torch import save

    data = save({n: t.contiguous() for n, t in tensors.items()}, metadata={HEADER: json.dumps(header)})
    number = 0
    while True:
        path = folder / f"{name}{f'-{number}' if number else ''}.safetensors"
        try:
            # Never through a link and never over a file: O_EXCL takes neither.
            at = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            break
        except FileExistsError:
            number += 1
        except OSError as error:
            logger.error("%s: %s could not be written: %s", envs.DUMP.name, path, error.strerror or error)
            return None
    try:
        with os.fdopen(at, "wb") as file:
            file.write(data)
    except OSError as error:
        path.unlink(missing_ok=True)
        logger.error("%s: %s could not be written: %s", envs.DUMP.name, path, error.strerror or error)
        return None
    return path
