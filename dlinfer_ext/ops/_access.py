"""What a call reads and writes in its state pools, row by row, worked out from its arguments: the layouts as data.

It is written from the tables of docs/en/operators.md and shares nothing with the operators' forms, so that it can be
held against what they did. It reads the host, needs of a pool its shape alone, and is used by `DLINFER_EXT_CHECK=1`
(`_value_checks`), by `DLINFER_EXT_DUMP` (`state_dump`) and by `python -m dlinfer_ext explain-state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

Arguments = Mapping[str, Any]


class Problem(NamedTuple):
    """An argument that cannot be: in the form of the operators' errors, and the request row, None if of no one row."""

    argument: str
    got: str
    wanted: str
    row: int | None


@dataclass(frozen=True)
class Entries:
    """Entries of one pool.

    Attributes:
        index: int64 [n, r] on the CPU, the first r indices into the pool, the slot (or block) first; none twice.
        positions: int64 [n], what an entry holds, counted from the row's first new token: of an input that of position
            history + p, of a state that after history + p tokens; of a key pool its number in the request.
    """

    index: Tensor
    positions: Tensor

    @classmethod
    def of(cls, pairs: Iterable[tuple[Sequence[int], int]], rank: int) -> Entries:
        """Take (index, position) pairs; of those with one index the last counts, as it is written last."""
        held = {tuple(index): position for index, position in pairs}
        return cls(
            torch.tensor(list(held), dtype=torch.int64).view(len(held), rank),
            torch.tensor(list(held.values()), dtype=torch.int64),
        )

    def slots(self) -> list[int]:
        return list(dict.fromkeys(self.index[:, 0].tolist()))

    def take(self, pool: Tensor) -> Tensor:
        """Return the entries' values [n, ..] from the pool."""
        return pool[tuple(self.index.to(pool.device).unbind(1))]


@dataclass(frozen=True)
class Row:
    """A row of a call.

    Attributes:
        number: in the batch.
        tokens: which of the packed tokens are its own.
        history: tokens of the request before the call; None where the call does not say.
        slots: as given.
        live: it is no PAD row, has tokens, and nothing is wrong with its place.
        accepted: tokens accepted of the step before, in layouts that take them.
        reads: by pool.
        writes: by pool.
        witnesses: by pool, slots of a PAD row that code which takes it for a row would touch.
    """

    number: int
    tokens: range
    history: int | None
    slots: tuple[int, ...]
    live: bool
    accepted: int | None = None
    reads: Mapping[str, Entries] = field(default_factory=dict)
    writes: Mapping[str, Entries] = field(default_factory=dict)
    witnesses: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class Plan:
    """What a call does.

    Attributes:
        operator: its name.
        layout: linear, rewind, ring or columns; plain, ring or table; pages; slots.
        rows: those of the batch.
        problems: what is wrong with its arguments, of the first row first.
    """

    operator: str
    layout: str = ""
    rows: list[Row] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, bad: bool, argument: str, got: object, wanted: str, row: int | None = None) -> bool:
        """Note a problem if `bad`; return `bad`."""
        if bad:
            self.problems.append(Problem(argument, f"{got}" + ("" if row is None else f" at row {row}"), wanted, row))
        return bad

    def clash(self, argument: str, number: int, row: int, other: int, wanted: str) -> bool:
        """Note that a row's slot or block is that of another row too; return True."""
        self.problems.append(Problem(argument, f"{number} at row {row} and at row {other}", wanted, row))
        return True


class Kind(NamedTuple):
    """What is to be known of an operator beside its schema.

    Attributes:
        plan: fills a Plan from the arguments.
        pools: arguments that hold state.
        inputs: arguments with a leading dimension of tokens, or [N, Q, ..], whose values enter a state or meet one.
        metadata: int arguments that tell the rows.
        resets: inputs that are log decays, and so may be -inf.
    """

    plan: Callable[[Plan, Arguments], None]
    pools: tuple[str, ...]
    inputs: tuple[str, ...]
    metadata: tuple[str, ...]
    resets: tuple[str, ...] = ()

    def packed(self, name: str, arguments: Arguments) -> Tensor:
        """Return an input as [T, ..]."""
        values: Tensor = arguments[name]
        batch = arguments["x"].dim() == 3 if name == "x" else "q" in self.inputs and arguments["q"].dim() == 4
        return values.flatten(0, 1) if batch else values


def _ints(tensor: Tensor | None) -> list[Any] | None:
    return None if tensor is None else tensor.tolist()


def _spans(
    plan: Plan,
    argument: str,
    cu_seqlens: Tensor,
    tokens: int,
    longest: tuple[int, str] | None = None,
    host_lengths: Sequence[int] | None = None,
    *,
    exact: bool = True,
) -> list[range]:
    """Return the tokens of each row; an impossible row is noted and has none.

    Args:
        plan: notes what is wrong.
        argument: the name of `cu_seqlens`.
        cu_seqlens: int [N + 1].
        tokens: T.
        longest: the most tokens of a row, and what says so.
        host_lengths: as given.
        exact: they are the lengths, and not bounds of them.
    """
    ends = cu_seqlens.tolist()
    plan.refuse(ends[0] != 0, argument, ends[0], "0", 0 if len(ends) > 1 else None)
    spans = []
    for row, (start, end) in enumerate(pairwise(ends)):
        n = end - start
        bad = plan.refuse(n < 0, argument, f"falling by {-n}", "offsets that do not fall", row)
        bad = bad or plan.refuse(end > tokens, argument, end, f"at most {tokens}, the tokens given", row)
        if longest is not None and n > longest[0]:
            bad = plan.refuse(True, argument, f"{n} tokens", f"at most {longest[0]}, {longest[1]}", row)
        if host_lengths is not None:
            given = host_lengths[row]
            wrong = given != n if exact else given < n
            plan.refuse(wrong, "host_lengths", given, f"{'' if exact else 'at least '}{n}, as {argument}", row)
        spans.append(range(0) if bad or start < 0 else range(start, end))
    return spans


class _Slots:
    """Slots of a pool that rows take: each within the pool, and none taken by two rows."""

    def __init__(self, plan: Plan, argument: str, size: int) -> None:
        self.plan, self.argument, self.size = plan, argument, size
        self.owners: dict[int, int] = {}

    def take(self, row: int, slots: Iterable[int]) -> bool:
        """Note what is wrong with a row's slots, none of which is PAD; return whether they can be used."""
        good, seen = True, set[int]()
        for slot in slots:
            if self.plan.refuse(
                slot >= self.size, self.argument, slot, f"below {self.size}, the slots of the pool", row
            ):
                good = False
                continue
            owner = self.owners.setdefault(slot, row)
            if owner != row or slot in seen:
                good = not self.plan.clash(self.argument, slot, row, owner, "a slot of its own for each row")
            seen.add(slot)
        return good


# --- the convolution --------------------------------------------------------------------------------------------------


def _witness(slot: int, size: int) -> tuple[int, ...]:
    """Return the slot that a PAD row's number reaches where it is taken for a slot."""
    return (slot % size,) if size else ()


def _ring_reads(slot: int, history: int, width: int, columns: int) -> Entries:
    window = range(max(0, history - width + 1), history)
    return Entries.of((((slot, p % columns), p - history) for p in window), 2)


def _conv(plan: Plan, args: Arguments) -> None:
    width, pool = args["weight"].shape[0], args["conv_state"]
    longest = None if args["max_query_len"] is None else (args["max_query_len"], "max_query_len")
    spans = _spans(plan, "cu_seqlens", args["cu_seqlens"], args["x"].shape[0], longest)
    slots = _ints(args["state_indices"]) or list(range(len(spans)))
    histories = _ints(args["history_lens"]) or [0] * len(spans)
    plan.layout = args["layout"]
    size, columns = (0, 0) if pool is None else pool.shape[:2]
    taken = _Slots(plan, "state_indices", size)
    for row, (tokens, slot, history) in enumerate(zip(spans, slots, histories, strict=True)):
        live = len(tokens) > 0 and slot >= 0 and slot != args["pad_slot_id"]
        live = live and not plan.refuse(history < 0, "history_lens", history, "at least 0", row)
        live = live and (pool is None or taken.take(row, [slot]))
        reads = writes = Entries.of((), 2)
        if live and pool is not None:
            q = len(tokens)
            if plan.layout == "ring":
                reads = _ring_reads(slot, history, width, columns)
                stored = range(max(0, q - columns), q)
                writes = Entries.of((((slot, (history + t) % columns), t) for t in stored), 2)
            else:
                back = range(width - 1)
                reads = Entries.of((((slot, i), i - width + 1) for i in back if history), 2)
                writes = Entries.of((((slot, i), q - width + 1 + i) for i in back), 2)
        _add_conv(plan, row, tokens, history, (slot,), live, None, reads, writes, size)


def _add_conv(
    plan: Plan,
    row: int,
    tokens: range,
    history: int | None,
    slots: tuple[int, ...],
    live: bool,
    accepted: int | None,
    reads: Entries,
    writes: Entries,
    size: int,
) -> None:
    witnesses = () if live else tuple(w for slot in slots for w in _witness(slot, size))
    plan.rows.append(
        Row(
            row, tokens, history, slots, live, accepted, {"conv_state": reads}, {"conv_state": writes},
            {"conv_state": witnesses},
        )
    )  # fmt: skip


def _conv_columns(plan: Plan, args: Arguments) -> None:
    plan.layout = "columns"
    width, (size, columns) = args["weight"].shape[0], args["conv_state"].shape[:2]
    spans = _spans(plan, "cu_seqlens", args["cu_seqlens"], args["x"].shape[0])
    slots = _ints(args["state_indices"]) or list(range(len(spans)))
    has_history = _ints(args["has_history"]) or [0] * len(spans)
    read, write = args["read_columns"].tolist(), args["write_columns"].tolist()
    taken = _Slots(plan, "state_indices", size)
    for row, (tokens, slot) in enumerate(zip(spans, slots, strict=True)):
        live = len(tokens) > 0 and slot >= 0 and slot != args["pad_slot_id"]
        live = live and taken.take(row, [slot])
        for name, given in (("read_columns", read), ("write_columns", write)):
            high = [c for c in given[row] if c >= columns]
            wanted = f"below {columns}, the columns of a slot"
            live = live and not plan.refuse(bool(high), name, high[:1] and high[0], wanted, row)
        reads = writes = Entries.of((), 2)
        if live:
            first = len(tokens) - width
            places = enumerate(read[row]) if has_history[row] else ()
            reads = Entries.of((((slot, c), i - width + 1) for i, c in places if c >= 0), 2)
            writes = Entries.of((((slot, c), first + i) for i, c in enumerate(write[row]) if c >= 0), 2)
        _add_conv(
            plan, row, tokens, None if has_history[row] else 0, (slot,), live, None, reads, writes, size
        )  # fmt: skip


def _conv_update(plan: Plan, args: Arguments) -> None:
    x, width, (size, columns) = args["x"], args["weight"].shape[0], args["conv_state"].shape[:2]
    accepted, histories = _ints(args["num_accepted_tokens"]), _ints(args["cache_seqlens"])
    plan.layout = "ring" if histories is not None else "rewind" if accepted is not None else "linear"
    if args["query_start_loc"] is None:
        q = x.shape[1] if x.dim() == 3 else 1
        spans = [range(i * q, (i + 1) * q) for i in range(x.shape[0])]
    else:
        longest = None if args["max_query_len"] < 0 else (args["max_query_len"], "max_query_len")
        spans = _spans(plan, "query_start_loc", args["query_start_loc"], x.shape[0], longest)
    table = _ints(args["conv_state_indices"]) or list(range(len(spans)))
    most = columns - (width - 1) + 1
    sources, targets = (_Slots(plan, "conv_state_indices", size) for _ in range(2))
    for row, tokens in enumerate(spans):
        blocks = table[row] if isinstance(table[row], list) else [table[row]]
        columns_of = {"initial_state_idx": 0, "block_idx_last_scheduled_token": 0}
        good = True
        for name in columns_of:
            if args[name] is not None:
                column = columns_of[name] = int(args[name][row])
                wrong = not 0 <= column < len(blocks)
                good &= not plan.refuse(wrong, name, column, f"one of the {len(blocks)} blocks", row)
        source, target = (blocks[c] if good else -1 for c in columns_of.values())
        live = len(tokens) > 0 and min(source, target) >= 0 and args["pad_slot_id"] not in (source, target)
        live = live and sources.take(row, [source]) and (source == target or targets.take(row, [target]))
        history = None if histories is None else histories[row]
        if live and history is not None:
            live = not plan.refuse(history < 0, "cache_seqlens", history, "at least 0", row)
        count = None if accepted is None else accepted[row]
        if live and count is not None:
            wanted = f"at most {most} in a slot of this length"
            live = not plan.refuse(count > most, "num_accepted_tokens", count, wanted, row)
        reads = writes = Entries.of((), 2)
        if live:
            q, back = len(tokens), width - 1
            if history is not None:
                reads = _ring_reads(source, history, width, columns)
                # A block that starts to be written needs the history as well: the next step reads it there.
                first = max(-back if source != target else 0, q - columns, -history)
                writes = Entries.of((((target, (history + t) % columns), t) for t in range(first, q)), 2)
            else:
                begin = max(count or 1, 1) - 1
                reads = Entries.of((((source, begin + i), i - back) for i in range(back)), 2)
                oldest, kept = (q - back, back) if count is None else (1 - back, back - 1 + q)
                writes = Entries.of((((target, i), oldest + i) for i in range(kept)), 2)
        _add_conv(plan, row, tokens, history, tuple(blocks), live, count, reads, writes, size)


# --- the delta rules --------------------------------------------------------------------------------------------------


def _delta(plan: Plan, args: Arguments) -> None:
    """Plan prompts, and steps of a plain pool, a ring or a table."""
    q, state, step = args["q"], args["state"], "num_accepted_tokens" in args
    ring = state.shape[1] if state.dim() == 5 else None
    indices: Tensor | None = args["state_indices"]
    table = indices is not None and indices.dim() == 2
    plan.layout = "ring" if ring is not None else "table" if table else "plain"
    if args["cu_seqlens"] is None:
        spans = [range(i * q.shape[1], (i + 1) * q.shape[1]) for i in range(q.shape[0])]
    else:
        longest = None
        if step and ring is not None:
            longest = (ring, "the entries of the ring")
        elif step and indices is not None and table:
            longest = (indices.shape[1], "the columns of state_indices")
        spans = _spans(plan, "cu_seqlens", args["cu_seqlens"], q.shape[0], longest, args.get("host_lengths"))
    slots = _ints(indices) or list(range(len(spans)))
    histories, accepted = _ints(args["history_lens"]), _ints(args.get("num_accepted_tokens"))
    taken = _Slots(plan, "state_indices", state.shape[0])
    for row, tokens in enumerate(spans):
        ids = slots[row] if table else [slots[row]]
        history = None if histories is None else histories[row]
        count = None if accepted is None else accepted[row]
        column = min(max(count or 1, 1), len(ids)) - 1
        needed = [ids[column], *(ids[: len(tokens)] if table else ids)]
        pads = [i for i in ids if i < 0 or i == args["pad_slot_id"]]
        live = len(tokens) > 0 and not any(i in pads for i in needed)
        if live:
            live = taken.take(row, [i for i in ids if i not in pads])
            if count is not None:
                live &= not plan.refuse(
                    not 1 <= count <= len(ids), "num_accepted_tokens", count, f"1 to {len(ids)}", row
                )
            live &= not plan.refuse((history or 0) < 0, "history_lens", history, "at least 0", row)
        rank = 1 if ring is None else 2
        reads = writes = Entries.of((), rank)
        if live:
            last = len(tokens)
            if ring is not None and history is not None:
                reads = Entries.of([((ids[0], history % ring), 0)] if history else (), 2)
                kept = range(1, last + 1) if step else [last]
                writes = Entries.of((((ids[0], (history + t) % ring), t) for t in kept), 2)
            else:
                reads = Entries.of([((ids[column],), 0)] if history != 0 else (), 1)
                stored = enumerate(ids[:last], 1) if table else [(last, ids[0])]
                writes = Entries.of((((slot,), t) for t, slot in stored), 1)
        witnesses = () if live else tuple(w for slot in ids for w in _witness(slot, state.shape[0]))
        plan.rows.append(
            Row(
                row, tokens, history, tuple(ids), live, count, {"state": reads}, {"state": writes},
                {"state": witnesses},
            )
        )  # fmt: skip


# --- caches in blocks -------------------------------------------------------------------------------------------------


class _Page(NamedTuple):
    """What a row of a call on blocks can reach."""

    row: int
    tokens: range
    history: int
    blocks: list[int]
    live: bool

    @property
    def end(self) -> int:
        return self.history + len(self.tokens)

    def at(self, first: int, last: int, size: int, inside: Callable[[Tensor], Tensor], base: int) -> Entries:
        """Return the entries of positions first to last - 1: block by `size`, place by `inside`; the later counts."""
        positions = torch.arange(first, max(first, last))
        blocks = torch.tensor(self.blocks, dtype=torch.int64)
        if not len(positions):
            return Entries.of((), 2)
        index = torch.stack((blocks[positions // size], inside(positions)), 1)
        # Of equal entries the last is kept: unique() of the reversed ones names the first of each.
        _, inverse = index.unique(dim=0, return_inverse=True)
        latest = torch.zeros(int(inverse.max()) + 1, dtype=torch.int64).scatter_reduce(
            0, inverse, torch.arange(len(index)), "amax", include_self=False
        )
        keep = latest.sort().values
        return Entries(index[keep], positions[keep] - base)


def _pages(plan: Plan, args: Arguments, first: str, blocks: int, size: int) -> list[_Page]:
    """Check the rows of a call on blocks; `first` names the packed tokens."""
    plan.layout = "pages"
    table = args["block_offsets"].tolist()
    spans = _spans(
        plan, "cu_seqlens", args["cu_seqlens"], args[first].shape[0], None, args.get("host_lengths"), exact=False
    )
    room = args["block_offsets"].shape[1] * size
    limit = min(room, args.get("max_kv_len", room))
    pages = []
    for row, (tokens, history) in enumerate(zip(spans, args["history_lens"].tolist(), strict=True)):
        n = len(tokens)
        live = n > 0 and history >= 0
        if live:
            wrong = history + n > limit
            live = not plan.refuse(wrong, "history_lens", f"{history} with {n} tokens", f"at most {limit} in all", row)
        reached = table[row][: -(-max(history + n, n) // size)]
        if live:
            for block in reached:
                live &= not plan.refuse(
                    not 0 <= block < blocks, "block_offsets", block, f"0 to {blocks - 1}, the blocks of the cache", row
                )
        pages.append(_Page(row, tokens, history, reached, live))
    return pages


def _own_blocks(plan: Plan, pages: list[_Page], size: int) -> list[_Page]:
    """Note a block that two rows write; a block that is only read may be shared.

    A batch of rows that are all the same is not one of requests: LMDeploy warms up with every row in block 0.
    """
    if len({(page.history, len(page.tokens), *page.blocks) for page in pages if page.live}) == 1:
        return pages
    owners: dict[int, int] = {}
    found = []
    for page in pages:
        live = page.live
        for block in page.blocks[page.history // size :] if live else ():
            owner = owners.setdefault(block, page.row)
            if owner != page.row:
                live = not plan.clash("block_offsets", block, page.row, owner, "blocks that no other row writes")
        found.append(page._replace(live=live))
    return found


def _add_page(
    plan: Plan, page: _Page, size: int, reads: Mapping[str, Entries], writes: Mapping[str, Entries], blocks: int
) -> None:
    pad = () if page.live else tuple(b for b in page.blocks if 0 <= b < blocks)
    plan.rows.append(
        Row(
            page.row, page.tokens, page.history, tuple(page.blocks), page.live, None, reads if page.live else {},
            writes if page.live else {}, dict.fromkeys(writes, pad),
        )
    )  # fmt: skip


def _kpool_update(plan: Plan, args: Arguments) -> None:
    pool, tails = args["ape"].shape[0], args["tail_cache"].shape[1]
    blocks, per_block, _ = args["pool_cache"].shape
    size = per_block * pool
    for page in _own_blocks(plan, _pages(plan, args, "k", blocks, size), size):
        history, end = page.history, page.end
        reads, writes = dict[str, Entries](), {"pool_cache": Entries.of((), 2), "tail_cache": Entries.of((), 2)}
        if page.live:
            reads["tail_cache"] = page.at(history - history % pool, history, size, lambda p: p % tails, history)
            writes["tail_cache"] = page.at(history, end, size, lambda p: p % tails, history)
            writes["pool_cache"] = page.at(history // pool, end // pool, per_block, lambda j: j % per_block, 0)
        _add_page(plan, page, size, reads, writes, blocks)


def _kpool_select(plan: Plan, args: Arguments) -> None:
    (blocks, per_block, _), pool = args["pool_cache"].shape, args["kpool"]
    for page in _pages(plan, args, "q", blocks, per_block * pool):
        reads = dict[str, Entries]()
        if page.live:
            reads["pool_cache"] = page.at(0, page.end // pool, per_block, lambda j: j % per_block, 0)
        _add_page(plan, page, per_block * pool, reads, {}, blocks)


def _latent_write(plan: Plan, args: Arguments) -> None:
    blocks, size, _ = args["cache"].shape
    for page in _own_blocks(plan, _pages(plan, args, "c", blocks, size), size):
        writes = {"cache": Entries.of((), 2)}
        if page.live:
            writes["cache"] = page.at(page.history, page.end, size, lambda p: p % size, page.history)
        _add_page(plan, page, size, {}, writes, blocks)


def _latent_attention(plan: Plan, args: Arguments) -> None:
    blocks, size, _ = args["cache"].shape
    for page in _pages(plan, args, "q", blocks, size):
        reads = dict[str, Entries]()
        if page.live:
            reads["cache"] = page.at(0, page.end, size, lambda p: p % size, page.history)
        _add_page(plan, page, size, reads, {}, blocks)


# --- whole slots ------------------------------------------------------------------------------------------------------


def _slot_rows(plan: Plan, pairs: list[tuple[int | None, int]], good: list[bool]) -> None:
    plan.layout = "slots"
    for row, (source, target) in enumerate(pairs):
        reads, writes = (
            Entries.of([((slot,), 0)] if good[row] and slot is not None else (), 1) for slot in (source, target)
        )
        given = (target,) if source is None else (source, target)
        plan.rows.append(Row(row, range(0), None, given, good[row], None, {"pool": reads}, {"pool": writes}))


def _zero(plan: Plan, args: Arguments) -> None:
    size, slots = args["pool"].shape[0], args["slots"].tolist()
    wanted = f"below {size}, the slots of the pool"
    good = [s >= 0 and not plan.refuse(s >= size, "slots", s, wanted, row) for row, s in enumerate(slots)]
    _slot_rows(plan, [(None, s) for s in slots], good)


def _copy(plan: Plan, args: Arguments) -> None:
    size = args["pool"].shape[0]
    pairs = list(zip(args["source"].tolist(), args["target"].tolist(), strict=True))
    targets = _Slots(plan, "target", size)
    wanted, good = f"below {size}, the slots of the pool", []
    for row, (source, target) in enumerate(pairs):
        live = min(source, target) >= 0
        # Of a pair that is left out each number has to be possible all the same.
        fits = not plan.refuse(source >= size, "source", source, wanted, row)
        fits &= targets.take(row, [target]) if live else not plan.refuse(target >= size, "target", target, wanted, row)
        good.append(live and fits)
    read = {s: row for row, (s, t) in enumerate(pairs) if good[row] and s != t}
    for row, (_, target) in enumerate(pairs):
        if good[row] and target in read:
            wanted = "no slot that is a source of another pair"
            good[row] = not plan.clash("target", target, row, read[target], wanted)
    _slot_rows(plan, pairs, good)


_CONV_ROWS: Final = ("cu_seqlens", "state_indices")
_PAGE_ROWS: Final = ("cu_seqlens", "block_offsets", "history_lens")
_RULE: Final = Kind(
    _delta, ("state",), ("q", "k", "v", "g", "beta"), ("cu_seqlens", "state_indices", "history_lens"), ("g",)
)
_STEP: Final = _RULE._replace(metadata=(*_RULE.metadata, "num_accepted_tokens"))
KINDS: Final[Mapping[str, Kind]] = {
    "causal_conv1d": Kind(_conv, ("conv_state",), ("x",), (*_CONV_ROWS, "history_lens")),
    "causal_conv1d_columns": Kind(
        _conv_columns, ("conv_state",), ("x",), (*_CONV_ROWS, "has_history", "read_columns", "write_columns")
    ),
    "causal_conv1d_update": Kind(
        _conv_update,
        ("conv_state",),
        ("x",),
        ("conv_state_indices", "num_accepted_tokens", "query_start_loc", "block_idx_last_scheduled_token",
         "initial_state_idx", "cache_seqlens"),
    ),
    "gated_delta_rule": _RULE,
    "gated_delta_rule_update": _STEP,
    "sigmoid_gating_delta_rule_update": _STEP._replace(inputs=("q", "k", "v", "a", "b"), resets=()),
    "kda": _RULE,
    "kda_update": _STEP,
    "kpool_update": Kind(_kpool_update, ("pool_cache", "tail_cache"), ("k", "gate"), _PAGE_ROWS),
    "kpool_select": Kind(_kpool_select, ("pool_cache",), ("q", "weights"), _PAGE_ROWS),
    "latent_write": Kind(_latent_write, ("cache",), ("c",), _PAGE_ROWS),
    "latent_attention": Kind(_latent_attention, ("cache",), ("q",), _PAGE_ROWS),
    "zero_slots": Kind(_zero, ("pool",), (), ("slots",)),
    "copy_slots": Kind(_copy, ("pool",), (), ("source", "target")),
}  # fmt: skip


def plan_call(operator: str, arguments: Arguments) -> Plan:
    """Work out what a call does; reads the host.

    Args:
        operator: a key of `KINDS`.
        arguments: by the names of the operator's schema. Of pools and inputs the shapes suffice (meta tensors).

    Returns:
        the plan; a row about which something is wrong is not live, and has no entries.
    """
    plan = Plan(operator)
    KINDS[operator].plan(plan, arguments)
    return plan
