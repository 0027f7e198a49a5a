"""What LMDeploy's scheduler must do for a state that, unlike keys and values, cannot be written twice."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from . import counters


def patch_scheduler(module: Any) -> str:
    """Give up the state of a sequence that loses its place in the batch, so that it is computed again.

    A running sequence that needs a block when none is free goes back to the queue while its last step is under way;
    that step's token is dropped. It keeps its blocks and its state, and later goes on one token earlier than the
    state: keys and values are written again as they were, but the recurrent state takes that token twice, and with
    drafts the steps under way may have overwritten the slot that it would go on from. Nothing tells: the text is
    wrong from there. Eviction proper frees both, which this does at once.
    """
    original = module.Scheduler.preempt_seqs

    @functools.wraps(original)
    def preempt_seqs(self: Any, seqs: Iterable[Any]) -> None:
        preempted = list(seqs)
        original(self, preempted)
        counters.add("preempted", len(preempted))
        if self.is_ssm:
            for seq in preempted:
                seq.state.release_paging_resources()

    module.Scheduler.preempt_seqs = preempt_seqs
    return "Scheduler.preempt_seqs gives up blocks and state"
