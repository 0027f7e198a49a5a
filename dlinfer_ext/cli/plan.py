"""`plan`: memory of each card for a config.json: weights, states, cache blocks, and what still fits."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ..framework.lmdeploy.plan import Card, Question

GIB: Final = 2**30
# Of one NPU as LMDeploy counts ranks: an A3 card has two. Chips of the A5 generation differ in memory.
MEMORY_GIB: Final = {"a2": 64.0, "a3": 64.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, metavar="CONFIG.json", help="or a folder that holds one")
    parser.add_argument("--tp", type=_positive, default=1, help="ranks (default: 1)")
    parser.add_argument("--drafts", type=_count, default=0, help="tokens the MTP layer drafts per step (default: 0)")
    parser.add_argument("--session-len", type=_positive, default=32768, help="tokens of a request (default: 32768)")
    parser.add_argument("--batch", type=_positive, default=256, help="LMDeploy's max_batch_size (default: 256)")
    parser.add_argument("--soc", choices=("a2", "a3", "a5"), default="a2", help="default memory of a card: 64 GiB")
    parser.add_argument("--memory-gib", type=_gib, help="memory of one card; needed for a5")
    parser.add_argument("--reserved-gib", type=_gib, default=2.0, help="neither weights nor caches (assumed: 2)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--block-size", type=_positive, default=64, help="tokens of a cache block (default: 64)")
    parser.add_argument("--prefix-states", type=_count, default=0, help="LMDeploy's prefix_cache_state_budget")
    parser.add_argument("--max-prefill-tokens", type=_positive, default=4096, help="of one step (default: 4096)")
    parser.add_argument("--cache-max-entry-count", type=_share, default=0.8, help="LMDeploy's (default: 0.8)")
    parser.add_argument("--language-model-only", action="store_true", help="as LMDeploy's: without a vision part")
    parser.epilog = (
        "Counted by LMDeploy's own config builders, model classes and cache planner, without a card and without "
        "weights: docs/en/plan.md. FP8 checkpoints of GLM-5.3-Flash are loaded as bf16 and counted so. What CANN and "
        "HCCL take is not known here: see --reserved-gib. Exit code 1: LMDeploy would not start, or a request of "
        "--session-len does not fit; 2: the question cannot be answered."
    )


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}; wanted 1 or more")
    return int(text)


def _count(text: str) -> int:
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text}; wanted 0 or more")
    return int(text)


def _gib(text: str) -> float:
    if not 0 <= float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}; wanted a number of GiB, 0 or more")
    return float(text)


def _share(text: str) -> float:
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}; wanted a share between 0 and 1")
    return float(text)


def run(args: argparse.Namespace) -> int:
    memory = MEMORY_GIB.get(args.soc) if args.memory_gib is None else args.memory_gib
    if memory is None:
        print(f"plan: --soc {args.soc} comes with different memories; wanted --memory-gib", file=sys.stderr)
        return 2
    # Nothing is allocated, so that the answer is that of a machine without a card; a card's own stays as it is.
    os.environ.setdefault("DLINFER_EXT_VENDOR", "cpu")
    from ..framework.lmdeploy import install
    from ..framework.lmdeploy.plan import PlanError, Question, plan

    question = Question(
        config=args.config,
        memory=int(memory * GIB),
        reserved=int(args.reserved_gib * GIB),
        tp=args.tp,
        drafts=args.drafts,
        batch=args.batch,
        dtype=args.dtype,
        block_size=args.block_size,
        prefix_states=args.prefix_states,
        max_prefill_tokens=args.max_prefill_tokens,
        cache_max_entry_count=args.cache_max_entry_count,
        language_model_only=args.language_model_only,
    )
    install()
    try:
        card = plan(question)
    except PlanError as error:
        print(error, file=sys.stderr)
        return 2
    warnings = list(advice(question, card, args.session_len))
    fits = holds(question, card, args.session_len)
    if args.json:
        print(json.dumps(_report(question, card, args.session_len, fits, warnings), indent=2, default=str))
    else:
        from .tables import show

        show(("each card", "bytes", "of what"), rows(question, card, args.session_len))
        for line in warnings:
            print(f"! {line}")
        print("fits" if fits else "does not fit")
    return 0 if fits else 1


def at_once(question: Question, card: Card, session_len: int) -> int:
    """Return how many requests of `session_len` tokens can run at one time."""
    return min(question.batch, max(card.blocks - 1, 0) // card.blocks_of(session_len, question.drafts))


def holds(question: Question, card: Card, session_len: int) -> bool:
    return not card.refusal and at_once(question, card, session_len) > 0


def size(number: float) -> str:
    """Say a number of bytes as a person reads it; both units that data sheets mix are told apart by name."""
    for unit, factor in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(number) >= factor:
            return f"{number / factor:.2f} {unit}"
    return f"{number:.0f} B"


def rows(question: Question, card: Card, session_len: int) -> Iterator[tuple[str, str, str]]:
    """Yield what each card holds, by line: what, size, and how it comes about."""
    yield "memory", size(question.memory), f"{size(question.reserved)} of it reserved (assumed)"
    yield "weights", size(card.weights), f"rank 1 of {question.tp}, {question.dtype}"
    if question.drafts:
        yield "draft layer", size(card.draft_weights), "what it does not share with the model"
    for pool in card.states:
        shape = " × ".join(map(str, pool.shape))
        yield f"state: {pool.name}", size(pool.bytes), f"a request: {pool.layers} layers of {shape}, {pool.dtype}"
    total = f"{card.slots} slots of {size(card.slot)}: {question.batch} requests, {card.slots - question.batch} more"
    yield "states of all requests", size(card.slots * card.slot), total
    yield "steps", size(card.runtime), f"kept by LMDeploy for prefill of {card.max_prefill_tokens} tokens"
    block = card.block + card.draft_block
    if card.block:
        per_token = size(block / card.block_size)
        yield "cache block", size(block), f"{card.block_size} tokens of all layers, {per_token} each"
        need = card.blocks_of(session_len, question.drafts)
        yield "a request's cache", size(need * block), f"{need} blocks for {session_len} tokens"
    yield "cache blocks", size(card.blocks * block), f"{card.blocks} blocks, {card.tokens} tokens"
    yield "requests at once", str(at_once(question, card, session_len)), f"of {session_len} tokens"


def advice(question: Question, card: Card, session_len: int) -> Iterator[str]:
    """Yield what will not fit or will surprise, each with what to change."""
    left = question.memory - question.reserved - card.weights - card.draft_weights
    if left <= 0:
        yield (
            f"the weights leave nothing: {size(card.weights + card.draft_weights)} of "
            f"{size(question.memory - question.reserved)}; more ranks (--tp), or cards with more memory"
        )
    elif card.slots * card.slot >= left:
        fit = left // card.slot - (card.slots - question.batch)
        change = f"--batch {fit} is the most, before any cache" if fit > 0 else "more ranks (--tp) or fewer drafts"
        yield f"the states of {question.batch} requests do not fit in {size(left)}: {change}"
    elif card.refusal:
        yield f"LMDeploy does not start: {card.refusal} A smaller --batch, or more ranks (--tp)"
    elif (requests := at_once(question, card, session_len)) == 0:
        yield f"no request of {session_len} tokens fits: the caches hold {card.tokens}; a smaller --batch frees states"
    elif requests < question.batch:
        yield f"{requests} of {question.batch} requests of {session_len} tokens run at once, the others wait"
    if not card.refusal and card.max_prefill_tokens < question.max_prefill_tokens:
        yield f"LMDeploy lowers a prefill step from {question.max_prefill_tokens} to {card.max_prefill_tokens} tokens"
    if card.block_size != question.block_size:
        yield f"LMDeploy makes blocks of {card.block_size} tokens instead of {question.block_size} for this model"
    for pool in card.states:
        if "recurrent" in pool.name and pool.dtype != "float32":
            yield f"the recurrent state is {pool.dtype}, which loses precision: LMDEPLOY_FP32_MAMBA_SSM_DTYPE=1"


def _report(question: Question, card: Card, session_len: int, fits: bool, warnings: list[str]) -> dict[str, Any]:
    return {
        "question": asdict(question) | {"session_len": session_len},
        "card": asdict(card) | {"tokens": card.tokens},
        "request": {
            "state_bytes": card.slot,
            "cache_bytes": card.blocks_of(session_len, question.drafts) * (card.block + card.draft_block),
        },
        "requests_at_once": at_once(question, card, session_len),
        "fits": fits,
        "warnings": warnings,
    }
