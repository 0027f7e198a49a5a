"""What the delta rules read and write: plain, ring and table."""

from __future__ import annotations

from torch import Tensor

from .plan import Arguments, Entries, Plan, Row
from .rows import Slots, ints, row_spans, witness


def delta(plan: Plan, args: Arguments) -> None:
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
        spans = row_spans(plan, "cu_seqlens", args["cu_seqlens"], q.shape[0], longest, args.get("host_lengths"))
    slots = ints(indices) or list(range(len(spans)))
    histories, accepted = ints(args["history_lens"]), ints(args.get("num_accepted_tokens"))
    taken = Slots(plan, "state_indices", state.shape[0])
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
        witnesses = () if live else tuple(w for slot in ids for w in witness(slot, state.shape[0]))
        plan.rows.append(
            Row(
                row, tokens, history, tuple(ids), live, count, {"state": reads}, {"state": writes},
                {"state": witnesses},
            )
        )  # fmt: skip
