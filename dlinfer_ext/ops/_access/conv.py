"""What the convolution reads and writes: linear, rewind, ring and columns."""

from __future__ import annotations

from .plan import Arguments, Entries, Plan, Row
from .rows import Slots, ints, row_spans, witness


def _ring_reads(slot: int, history: int, width: int, columns: int) -> Entries:
    window = range(max(0, history - width + 1), history)
    return Entries.of((((slot, p % columns), p - history) for p in window), 2)


def conv(plan: Plan, args: Arguments) -> None:
    width, pool = args["weight"].shape[0], args["conv_state"]
    longest = None if args["max_query_len"] is None else (args["max_query_len"], "max_query_len")
    spans = row_spans(plan, "cu_seqlens", args["cu_seqlens"], args["x"].shape[0], longest)
    slots = ints(args["state_indices"]) or list(range(len(spans)))
    histories = ints(args["history_lens"]) or [0] * len(spans)
    plan.layout = args["layout"]
    size, columns = (0, 0) if pool is None else pool.shape[:2]
    taken = Slots(plan, "state_indices", size)
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
    witnesses = () if live else tuple(w for slot in slots for w in witness(slot, size))
    plan.rows.append(
        Row(
            row, tokens, history, slots, live, accepted, {"conv_state": reads}, {"conv_state": writes},
            {"conv_state": witnesses},
        )
    )  # fmt: skip


def conv_columns(plan: Plan, args: Arguments) -> None:
    plan.layout = "columns"
    width, (size, columns) = args["weight"].shape[0], args["conv_state"].shape[:2]
    spans = row_spans(plan, "cu_seqlens", args["cu_seqlens"], args["x"].shape[0])
    slots = ints(args["state_indices"]) or list(range(len(spans)))
    has_history = ints(args["has_history"]) or [0] * len(spans)
    read, write = args["read_columns"].tolist(), args["write_columns"].tolist()
    taken = Slots(plan, "state_indices", size)
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


def conv_update(plan: Plan, args: Arguments) -> None:
    x, width, (size, columns) = args["x"], args["weight"].shape[0], args["conv_state"].shape[:2]
    accepted, histories = ints(args["num_accepted_tokens"]), ints(args["cache_seqlens"])
    plan.layout = "ring" if histories is not None else "rewind" if accepted is not None else "linear"
    if args["query_start_loc"] is None:
        q = x.shape[1] if x.dim() == 3 else 1
        spans = [range(i * q, (i + 1) * q) for i in range(x.shape[0])]
    else:
        longest = None if args["max_query_len"] < 0 else (args["max_query_len"], "max_query_len")
        spans = row_spans(plan, "query_start_loc", args["query_start_loc"], x.shape[0], longest)
    table = ints(args["conv_state_indices"]) or list(range(len(spans)))
    most = columns - (width - 1) + 1
    sources, targets = (Slots(plan, "conv_state_indices", size) for _ in range(2))
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
