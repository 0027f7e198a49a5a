"""Device code of rejection sampling.

Largest logits are found as a maximum and then the least index that has it: a reduction that returns both is broken by a
pass of Triton-Ascend (https://github.com/vllm-project/vllm-ascend/pull/15118). Every record that one program writes and
another launch reads is a block of 32 bytes, so that no two cores share one.
"""

import triton
import triton.language as tl

_NONE = tl.constexpr(2147483647)
_RECORD = tl.constexpr(8)


@triton.jit(
    do_not_specialize=["positions", "drafts", "vocab", "parts", "part_blocks", "logits_request", "logits_draft"],
    do_not_specialize_on_alignment=["logits_ptr", "record_ptr"],
)
def logit_statistics_kernel(
    logits_ptr,
    record_ptr,
    positions,
    drafts,
    vocab,
    parts,
    part_blocks,
    logits_request,
    logits_draft,
    logits_step,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
):
    """Write one record for each part of the vocabulary of each position: largest logit, its first id, a third value.

    That is the sum of exp(logit - largest) with SUM, and NaN if a logit of the part is NaN or +inf. Without SUM it is
    1, and 0 if a logit of the part is NaN or +inf. Each lane keeps its own largest logit over the blocks, so that lanes
    are reduced once for a part. How a part is summed depends on the vocabulary alone, not on the batch.
    """
    lane = tl.arange(0, BLOCK)
    slot = tl.arange(0, _RECORD)
    for task in range(tl.program_id(0), positions * parts, tl.num_programs(0)):
        position = task // parts
        row = (position // drafts).to(tl.int64) * logits_request + (position % drafts).to(tl.int64) * logits_draft
        first = task % parts * part_blocks * BLOCK
        stop = tl.minimum(first + part_blocks * BLOCK, vocab)
        largest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        ids = tl.zeros((BLOCK,), dtype=tl.int32)
        usable = tl.full((BLOCK,), 1.0, dtype=tl.float32)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(first, stop, BLOCK):
            x = tl.load(
                logits_ptr + row + (start + lane) * logits_step, mask=lane < stop - start, other=float("-inf")
            ).to(tl.float32)
            if not SUM:
                fine = x < float("inf")
                usable = tl.where(fine, usable, 0.0)
                x = tl.where(fine, x, float("-inf"))
            ids = tl.where(x > largest, start + lane, ids)
            now = tl.maximum(x, largest)
            if SUM:
                # exp(-inf - 0) where a lane has seen nothing yet: never -inf - -inf.
                shift = tl.where(now > float("-inf"), now, 0.0)
                total = total * tl.exp(largest - shift) + tl.exp(x - shift)
            largest = now
        top = tl.max(largest, 0)
        at = tl.min(tl.where(largest == top, ids, _NONE), 0)
        record = tl.where(slot == 0, top, at.to(tl.float32))
        if SUM:
            shift = tl.where(largest > float("-inf"), top, 0.0)
            value = tl.sum(total * tl.exp(largest - shift), 0)
        else:
            value = tl.min(usable, 0)
        record = tl.where(slot == 2, value, record)
        tl.store(record_ptr + task.to(tl.int64) * _RECORD + slot, record)


@triton.jit
def _emit(
    out_ptr,
    rejected_ptr,
    last_ptr,
    request,
    drafts,
    count,
    draft,
    token,
    COLUMNS: tl.constexpr,
):
    """Write a request's row: `count` drafts, the token after them, then -1."""
    column = tl.arange(0, COLUMNS)
    row = tl.where(column < count, draft, -1)
    row = tl.where(column == count, token, row)
    tl.store(out_ptr + request.to(tl.int64) * (drafts + 1) + column, row.to(tl.int64), mask=column < drafts + 1)
    one = tl.arange(0, _RECORD)
    tl.store(
        rejected_ptr + request + one, (tl.zeros((_RECORD,), tl.int32) + (drafts - count)).to(tl.int64), mask=one < 1
    )
    tl.store(last_ptr + request + one, (tl.zeros((_RECORD,), tl.int32) + token).to(tl.int64), mask=one < 1)


@triton.jit(
    do_not_specialize=[
        "requests",
        "drafts",
        "vocab",
        "parts",
        "logits_request",
        "logits_draft",
        "draft_request",
        "draft_step",
        "bonus_step",
        "uniform_request",
        "uniform_draft",
        "uniform_step",
        "greedy_step",
        "q_request",
        "q_draft",
    ],
    do_not_specialize_on_alignment=[
        "logits_ptr",
        "draft_ptr",
        "bonus_ptr",
        "uniform_ptr",
        "greedy_ptr",
        "q_ptr",
        "record_ptr",
        "decision_ptr",
        "out_ptr",
        "rejected_ptr",
        "last_ptr",
    ],
)
def decide_kernel(
    logits_ptr,
    draft_ptr,
    bonus_ptr,
    uniform_ptr,
    greedy_ptr,
    q_ptr,
    record_ptr,
    decision_ptr,
    out_ptr,
    rejected_ptr,
    last_ptr,
    requests,
    drafts,
    vocab,
    parts,
    logits_request,
    logits_draft,
    logits_step,
    draft_request,
    draft_step,
    bonus_step,
    uniform_request,
    uniform_draft,
    uniform_step,
    greedy_step,
    q_request,
    q_draft,
    q_step,
    POSITIONS: tl.constexpr,
    PARTS: tl.constexpr,
    SAMPLED: tl.constexpr,
    MIXED: tl.constexpr,
    HAS_Q: tl.constexpr,
):
    """Find each request's first rejected draft and emit its row; a token to draw is left to `draw_kernel`.

    The decision of a request is [position or -1, largest logit, sum, draft or -1, draw]: what drawing needs.
    """
    n = tl.arange(0, POSITIONS)
    part = tl.arange(0, PARTS)
    slot = tl.arange(0, _RECORD)
    for request in range(tl.program_id(0), requests, tl.num_programs(0)):
        live = n < drafts
        wide = live[:, None] & (part[None, :] < parts)
        at = (request.to(tl.int64) * drafts + n)[:, None] * (parts * _RECORD) + part[None, :] * _RECORD
        tops = tl.load(record_ptr + at, mask=wide, other=float("-inf"))
        ids = tl.load(record_ptr + at + 1, mask=wide, other=0.0)
        top = tl.max(tops, 1)
        best = tl.min(tl.where(tops == top[:, None], ids, 16777216.0), 1).to(tl.int32)
        if SAMPLED:
            sums = tl.load(record_ptr + at + 2, mask=wide, other=0.0)
            shift = tl.where(top > float("-inf"), top, 0.0)
            total = tl.sum(sums * tl.exp(tops - shift[:, None]), 1)
            # A bad logit has made the sum NaN; a sound one is at least 1.
            usable = (total > 0.5) & (top > float("-inf")) & (top < float("inf"))
        else:
            fine = tl.load(record_ptr + at + 2, mask=wide, other=1.0)
            usable = (tl.min(fine, 1) > 0.0) & (top > float("-inf"))
        proposal = tl.load(draft_ptr + request.to(tl.int64) * draft_request + n * draft_step, mask=live, other=-1)
        proposed = (proposal >= 0) & (proposal < vocab)
        draft = tl.where(proposed, proposal, 0).to(tl.int32)
        accepted = tl.where(proposed & usable & (draft == best), 1, 0)
        replacement = tl.where(usable, best, 0)
        bonus = tl.load(bonus_ptr + request.to(tl.int64) * bonus_step)
        bonus = tl.where((bonus >= 0) & (bonus < vocab), bonus, 0).to(tl.int32)
        if SAMPLED:
            greedy = 0
            if MIXED:
                greedy = tl.load(greedy_ptr + request.to(tl.int64) * greedy_step).to(tl.int32)
            # A gather reads its masked lanes too: they stay with the first draft's.
            own = tl.where(live, n, 0)
            logit = tl.load(
                logits_ptr + request.to(tl.int64) * logits_request + own * logits_draft + draft * logits_step,
                mask=live,
                other=float("-inf"),
            ).to(tl.float32)
            u = tl.load(uniform_ptr + request.to(tl.int64) * uniform_request + n * uniform_draft, mask=live, other=0.0)
            v = tl.load(
                uniform_ptr + request.to(tl.int64) * uniform_request + n * uniform_draft + uniform_step,
                mask=live,
                other=0.0,
            )
            p = tl.exp(logit - shift) / total
            if HAS_Q:
                q = tl.load(
                    q_ptr + request.to(tl.int64) * q_request + own * q_draft + draft * q_step, mask=live, other=0.0
                ).to(tl.float32)
                taken = (q > 0.0) & (p > u * q)
            else:
                taken = p > u
            sampled = tl.where(proposed & usable & taken, 1, 0)
            accepted = tl.where(greedy > 0, accepted, sampled)
        count = tl.min(tl.where(live & (accepted == 0), n, drafts), 0)
        here = n == count
        # What no lane has is 0: nothing is `here` when every draft was accepted.
        token = tl.where(count < drafts, tl.sum(tl.where(here, replacement, 0), 0), bonus)
        if SAMPLED:
            drawn = (count < drafts) & (greedy == 0) & (tl.sum(tl.where(here & usable, 1, 0), 0) > 0)
            where = tl.where(drawn, count, -1).to(tl.float32)
            decision = tl.where(slot == 0, where, tl.sum(tl.where(here, shift, 0.0), 0))
            decision = tl.where(slot == 2, tl.sum(tl.where(here, total, 0.0), 0), decision)
            chosen = tl.sum(tl.where(here, tl.where(proposed, draft, -1), 0), 0)
            decision = tl.where(slot == 3, chosen.to(tl.float32), decision)
            decision = tl.where(slot == 4, tl.sum(tl.where(here, v, 0.0), 0), decision)
            tl.store(decision_ptr + request.to(tl.int64) * _RECORD + slot, decision)
        _emit(out_ptr, rejected_ptr, last_ptr, request, drafts, count, draft, token, POSITIONS)


@triton.jit
def _weights(
    logits_ptr,
    q_ptr,
    row,
    q_row,
    logits_step,
    q_step,
    start,
    vocab,
    top,
    total,
    draft,
    BLOCK: tl.constexpr,
    HAS_Q: tl.constexpr,
):
    """Return (p, max(p - q, 0)) of one block of a position; lanes beyond the vocabulary are 0.

    Without q the draft alone is left out of p, and both results are that. It never leaves nothing: a draft that is all
    of p is accepted.
    """
    lane = tl.arange(0, BLOCK)
    live = lane < vocab - start
    x = tl.load(logits_ptr + row + (start + lane) * logits_step, mask=live, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - top) / total
    if HAS_Q:
        q = tl.load(q_ptr + q_row + (start + lane) * q_step, mask=live, other=0.0).to(tl.float32)
        less = p - q
        # A NaN stays, so that the sum tells of it.
        rest = tl.where(less <= 0.0, 0.0, less)
    else:
        p = tl.where(start + lane == draft, 0.0, p)
        rest = p
    return p, rest


@triton.jit(
    do_not_specialize=["requests", "vocab", "parts", "logits_request", "logits_draft", "q_request", "q_draft"],
    do_not_specialize_on_alignment=["logits_ptr", "q_ptr", "decision_ptr", "sums_ptr"],
)
def block_sums_kernel(
    logits_ptr,
    q_ptr,
    decision_ptr,
    sums_ptr,
    requests,
    vocab,
    parts,
    logits_request,
    logits_draft,
    logits_step,
    q_request,
    q_draft,
    q_step,
    BLOCK: tl.constexpr,
    HAS_Q: tl.constexpr,
):
    """Write sums over the blocks of each position to draw from: of max(p - q, 0) and, with q, of p.

    They are [requests, kinds of sum, parts * 8].
    """
    KINDS: tl.constexpr = 2 if HAS_Q else 1
    slot = tl.arange(0, _RECORD)
    for task in range(tl.program_id(0), requests * parts, tl.num_programs(0)):
        request = (task // parts).to(tl.int64)
        part = task % parts
        decision = decision_ptr + request * _RECORD
        position = tl.load(decision).to(tl.int32)
        if position >= 0:
            top = tl.load(decision + 1)
            total = tl.load(decision + 2)
            draft = tl.load(decision + 3).to(tl.int32)
            row = request * logits_request + position.to(tl.int64) * logits_draft
            q_row = request * q_request + position.to(tl.int64) * q_draft
            rest_sums = tl.zeros((_RECORD,), dtype=tl.float32)
            p_sums = tl.zeros((_RECORD,), dtype=tl.float32)
            blocks = tl.minimum(_RECORD, tl.cdiv(vocab, BLOCK) - part * _RECORD)
            for i in range(0, blocks):
                p, rest = _weights(
                    logits_ptr, q_ptr, row, q_row, logits_step, q_step, (part * _RECORD + i) * BLOCK, vocab, top,
                    total, draft, BLOCK, HAS_Q,
                )  # fmt: skip
                rest_sums = tl.where(slot == i, tl.sum(rest, 0), rest_sums)
                if HAS_Q:
                    p_sums = tl.where(slot == i, tl.sum(p, 0), p_sums)
            sums = sums_ptr + request * (KINDS * parts * _RECORD) + part * _RECORD + slot
            tl.store(sums, rest_sums)
            if HAS_Q:
                tl.store(sums + parts * _RECORD, p_sums)


@triton.jit
def _first_above(running, threshold, weights, LANES: tl.constexpr):
    """Return the first index of positive weight with a running sum above the threshold, else the last positive one."""
    index = tl.arange(0, LANES)
    last = tl.max(tl.where(weights > 0.0, index, 0), 0)
    return tl.min(tl.where((weights > 0.0) & (running > threshold), index, last), 0)


@triton.jit(
    do_not_specialize=[
        "requests",
        "drafts",
        "vocab",
        "parts",
        "logits_request",
        "logits_draft",
        "q_request",
        "q_draft",
    ],
    do_not_specialize_on_alignment=["logits_ptr", "q_ptr", "decision_ptr", "sums_ptr", "out_ptr", "last_ptr"],
)
def draw_kernel(
    logits_ptr,
    q_ptr,
    decision_ptr,
    sums_ptr,
    out_ptr,
    last_ptr,
    requests,
    drafts,
    vocab,
    parts,
    logits_request,
    logits_draft,
    logits_step,
    q_request,
    q_draft,
    q_step,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_Q: tl.constexpr,
):
    """Draw each rejected request's token: the block by running sums of the blocks, then the id inside the block."""
    KINDS: tl.constexpr = 2 if HAS_Q else 1
    slot = tl.arange(0, _RECORD)
    block = tl.arange(0, BLOCKS)
    for task in range(tl.program_id(0), requests, tl.num_programs(0)):
        request = task.to(tl.int64)
        decision = decision_ptr + request * _RECORD
        position = tl.load(decision).to(tl.int32)
        if position >= 0:
            top = tl.load(decision + 1)
            total = tl.load(decision + 2)
            draft = tl.load(decision + 3).to(tl.int32)
            v = tl.load(decision + 4)
            sums = sums_ptr + request * (KINDS * parts * _RECORD) + block
            weights = tl.load(sums, mask=block < parts * _RECORD, other=0.0)
            if HAS_Q:
                # The difference is degenerate where its sum is 0, infinite or NaN; nothing is subtracted without a
                # draft.
                mass = tl.sum(weights, 0)
                sound = (mass > 0.0) & (mass < float("inf")) & (draft >= 0)
                p_sums = tl.load(sums + parts * _RECORD, mask=block < parts * _RECORD, other=0.0)
                weights = tl.where(sound, weights, p_sums)
            running = tl.cumsum(weights, 0)
            threshold = v * tl.max(running, 0)
            chosen = _first_above(running, threshold, weights, BLOCKS)
            before = tl.sum(tl.where(block == chosen, running - weights, 0.0), 0)
            row = request * logits_request + position.to(tl.int64) * logits_draft
            q_row = request * q_request + position.to(tl.int64) * q_draft
            p, rest = _weights(
                logits_ptr, q_ptr, row, q_row, logits_step, q_step, chosen * BLOCK, vocab, top, total, draft, BLOCK,
                HAS_Q,
            )  # fmt: skip
            weights = rest
            if HAS_Q:
                weights = tl.where(sound, rest, p)
            token = chosen * BLOCK + _first_above(tl.cumsum(weights, 0), threshold - before, weights, BLOCK)
            value = (tl.zeros((_RECORD,), tl.int32) + token).to(tl.int64)
            tl.store(out_ptr + request * (drafts + 1) + position + slot, value, mask=slot < 1)
            tl.store(last_ptr + request + slot, value, mask=slot < 1)


@triton.jit(
    do_not_specialize=["requests", "drafts", "target_request", "target_step", "draft_request", "draft_step"],
    do_not_specialize_on_alignment=["target_ptr", "draft_ptr", "out_ptr", "rejected_ptr", "last_ptr"],
)
def greedy_ids_kernel(
    target_ptr,
    draft_ptr,
    out_ptr,
    rejected_ptr,
    last_ptr,
    requests,
    drafts,
    target_request,
    target_step,
    draft_request,
    draft_step,
    COLUMNS: tl.constexpr,
):
    """Compare drafts with target ids; a negative id stands for no token and gives 0."""
    n = tl.arange(0, COLUMNS)
    for request in range(tl.program_id(0), requests, tl.num_programs(0)):
        target = tl.load(
            target_ptr + request.to(tl.int64) * target_request + n * target_step, mask=n < drafts + 1, other=-1
        ).to(tl.int32)
        draft = tl.load(
            draft_ptr + request.to(tl.int64) * draft_request + n * draft_step, mask=n < drafts, other=-1
        ).to(tl.int32)
        differs = (n < drafts) & ((target < 0) | (draft != target))
        count = tl.min(tl.where(differs, n, drafts), 0)
        token = tl.sum(tl.where((n == count) & (target >= 0), target, 0), 0)
        _emit(out_ptr, rejected_ptr, last_ptr, request, drafts, count, draft, token, COLUMNS)
