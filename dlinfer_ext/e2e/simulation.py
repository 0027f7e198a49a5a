"""Greedy speculative decoding with the draft head in plain PyTorch: which drafts a right engine accepts, exactly.

The trunk's hidden states are transformers', the head is its modules (Qwen3.5's here, GLM-5.3-Flash's in glm_head.py),
and nothing here knows an engine, a paged cache or our operators. An engine whose recycled position, norm or cache is a
little off gives the right tokens all the same, since every draft is verified; its counts of accepted drafts differ
from these.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .glm_head import GlmMtpHead

GLM: Final = "glm5_next"
CONTEXT: Final = 4  # tokens
Chain = Sequence[tuple[int, int]]  # (base position, accepted drafts) of every verification of one request


class MtpHead(nn.Module):
    """Qwen3.5's MTP layer; parameter names are those of a checkpoint below ``mtp.``.

    One full-attention layer over ``fc([norm(embedding of the next token), norm(hidden state)])``, as in DeepSeek-V3
    (https://arxiv.org/abs/2412.19437, section 2.2); embedding and output projection are the trunk's. A new head
    starts as the trunk's last full-attention layer between an even mix of both inputs and the trunk's norm.

    Args:
        model: transformers' Qwen3.5, dense or mixture of experts; only read.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        trunk, config = model.model.language_model, model.config.text_config
        hidden, norm = config.hidden_size, type(trunk.norm)
        self.layer_index = config.layer_types.index("full_attention")
        layer = trunk.layers[self.layer_index]
        self.layers = nn.ModuleList([type(layer)(config, self.layer_index)])
        self.pre_fc_norm_embedding = norm(hidden)
        self.pre_fc_norm_hidden = norm(hidden)
        self.norm = norm(hidden)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        with torch.no_grad():
            self.layers[0].load_state_dict(layer.state_dict())
            self.norm.load_state_dict(trunk.norm.state_dict())
            self.fc.weight.copy_(torch.eye(hidden).repeat(1, 2) / 2 + torch.randn(hidden, 2 * hidden) / 100)

    @staticmethod
    def prefix(model: Any) -> str:
        """Return what a checkpoint's names of the head begin with."""
        return "mtp."

    def load_released(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights of a checkpoint, named as below `prefix`."""
        self.load_state_dict(weights)

    def forward(
        self, model: Any, tokens: Tensor, state: Tensor, position: int, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Run the layer on T positions.

        Args:
            model: the trunk, for embedding and rotary tables.
            tokens: int64 [B, T], each the one after its position.
            state: [B, T, hidden]: the hidden states of the positions, the trunk's or this layer's own.
            position: of the first; the others follow.
            mask: bool [T, keys], true where a key is seen; None lets all be seen.
            cache: transformers' cache of the layer's keys and values, to which T are added.

        Returns:
            [B, T, hidden], normalised: the output projection makes drafts of it, and it is the next step's `state`.
        """
        trunk = model.model.language_model
        embedding = self.pre_fc_norm_embedding(trunk.embed_tokens(tokens))
        x = self.fc(torch.cat([embedding, self.pre_fc_norm_hidden(state)], -1))
        rotary = trunk.rotary_emb(x, torch.arange(position, position + tokens.shape[1]).view(1, 1, -1))
        seen = None if mask is None else mask[None, None]
        out: Tensor = self.norm(self.layers[0](x, rotary, attention_mask=seen, cache=cache))
        return out

    def unroll(self, model: Any, tokens: Tensor, hidden: Tensor, bases: int, drafts: int) -> list[Tensor]:
        """Draft from every base position at once, each step on the head's own last hidden state.

        Base i sees the first step's keys of positions 0..i and the later steps' keys of its own chain, which is what
        a serving engine's cache holds, since it overwrites the chain after each verification. The drafts are fed as
        `tokens` has them: a chain is right as far as its drafts are, and counts no further.

        Args:
            model: the trunk, for embedding and rotary tables.
            tokens: int64 [B, T], T >= bases + drafts.
            hidden: the trunk's normalised hidden states [B, T, hidden].
            bases: number of base positions.
            drafts: tokens to draft from each.

        Returns:
            `drafts` tensors [B, bases, hidden]; element k - 1 predicts token i + k + 1 at base i.
        """
        from transformers import DynamicCache  # here, so that the figures below can be had without a second's import

        cache = DynamicCache()
        state, own = hidden[:, :bases], torch.eye(bases, dtype=torch.bool)
        mask, outputs = torch.ones(bases, bases, dtype=torch.bool).tril(), []
        for k in range(1, drafts + 1):
            state = self(model, tokens[:, k : k + bases], state, k - 1, mask, cache)
            outputs.append(state)
            mask = torch.cat([mask, own], -1)
        return outputs


def load_head(model: Any, checkpoint: Path) -> Any:
    """Return the draft head of a checkpoint, which transformers leaves out.

    Args:
        model: the trunk, from the same checkpoint; its type says which head it is.
        checkpoint: folder with model.safetensors, or with several files and their index.

    Returns:
        `MtpHead`, or `GlmMtpHead` for GLM-5.3-Flash.

    Raises:
        KeyError: the checkpoint has no draft head.
        RuntimeError: its weights are not the head's; the ones that are missing or too many are named.
    """
    kind = GlmMtpHead if model.config.model_type == GLM else MtpHead
    prefix = kind.prefix(model)
    index, single = checkpoint / "model.safetensors.index.json", checkpoint / "model.safetensors"
    files = {single}
    if index.exists():
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {checkpoint / file for name, file in placed.items() if name.startswith(prefix)}
    weights: dict[str, Tensor] = {}
    for file in sorted(files):
        with safe_open(file, "pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith(prefix)]  # noqa: SIM118
            weights |= {name.removeprefix(prefix): tensors.get_tensor(name) for name in names}
    if not weights:
        raise KeyError(f"{checkpoint} has no weights named {prefix}*")
    with torch.random.fork_rng(devices=[]):  # the values that a new head starts from are replaced
        head = kind(model)
    head.load_released(weights)
    return head.to(next(model.parameters()).dtype).eval().requires_grad_(False)


# ---------------------------------------------------------------------------------------------------------- acceptance


@dataclass(frozen=True)
class Acceptance:
    """How many drafts were accepted, over all verifications of all requests.

    Attributes:
        histogram: verifications by number of accepted drafts, 0..drafts.
        reach: share of verifications that accept at least 1..drafts.
        mean: accepted drafts per verification.
        mean_by_context: the same where the last four tokens are new in their request ("novel") and where they
            occurred before in it ("repeated"); 0.0 where there was none. Loops are easy to draft.
        steps_by_context: verifications of each kind.
        verify_rows: verifications, the one after each request's last token included.
        tokens_per_step: tokens that a verification gives: the accepted drafts and the trunk's own.
    """

    histogram: tuple[int, ...]
    reach: tuple[float, ...]
    mean: float
    mean_by_context: dict[str, float]
    steps_by_context: dict[str, int]
    verify_rows: int
    tokens_per_step: float


def by_context(sequences: Sequence[Sequence[int]], chains: Iterable[Chain]) -> dict[str, list[int]]:
    """Return the accepted counts, simulated or an engine's, by whether the context occurred before in its request.

    Args:
        sequences: the tokens of each request, prompt first.
        chains: the verifications of each. A base position is that of the last token in the cache, the cached length
            less one: the verification is fed the token after it, and the four tokens up to that one are its context.

    Returns:
        {"novel": accepted counts, "repeated": accepted counts}.
    """
    split: dict[str, list[int]] = {"novel": [], "repeated": []}
    for tokens, chain in zip(sequences, chains, strict=True):
        first: dict[tuple[int, ...], int] = {}
        for end in range(CONTEXT, len(tokens) + 1):
            first.setdefault(tuple(tokens[end - CONTEXT : end]), end)
        for base, accepted in chain:
            end = base + 2
            context = tuple(tokens[max(0, end - CONTEXT) : end])
            split["repeated" if first.get(context, end) < end else "novel"].append(accepted)
    return split


def summarise(sequences: Sequence[Sequence[int]], chains: Sequence[Chain], drafts: int) -> Acceptance:
    """Return the figures of given verifications; arguments as in `by_context`."""
    counts = [0] * (drafts + 1)
    for chain in chains:
        for _, accepted in chain:
            counts[accepted] += 1
    steps = sum(counts)
    mean = sum(k * count for k, count in enumerate(counts)) / max(1, steps)
    split = by_context(sequences, chains)
    return Acceptance(
        histogram=tuple(counts),
        reach=tuple(sum(counts[k:]) / max(1, steps) for k in range(1, drafts + 1)),
        mean=mean,
        mean_by_context={name: sum(values) / max(1, len(values)) for name, values in split.items()},
        steps_by_context={name: len(values) for name, values in split.items()},
        verify_rows=steps,
        tokens_per_step=mean + 1,
    )


# ---------------------------------------------------------------------------------------------------------- simulation


def greedy_needed(new_tokens: int, drafts: int) -> int:
    """Return how long a greedy continuation the simulation of `new_tokens` needs.

    The last verification starts at most `drafts` past the last token and looks at `drafts` more.
    """
    return new_tokens + 2 * drafts


def hidden_states(model: Any, tokens: Tensor) -> Tensor:
    """Return the trunk's final, normalised hidden states [B, T, hidden] of int64 [B, T]."""
    states: Tensor = model.model.language_model(input_ids=tokens, use_cache=False).last_hidden_state
    return states


def accepted_drafts(model: Any, head: MtpHead | GlmMtpHead, tokens: Tensor, hidden: Tensor, drafts: int) -> Tensor:
    """Return how many drafts would be accepted at every base position.

    Args:
        model: the trunk.
        head: its draft head.
        tokens: int64 [B, T]: prompts and greedy continuations.
        hidden: the trunk's normalised hidden states [B, T, hidden].
        drafts: drafts of a verification.

    Returns:
        int64 [B, T - drafts - 1] of 0..drafts, by base position; meaningless within a prompt.
    """
    bases = tokens.shape[1] - drafts - 1
    states = head.unroll(model, tokens, hidden, bases, drafts)
    match = [model.lm_head(state).argmax(-1) == tokens[:, k + 1 : k + 1 + bases] for k, state in enumerate(states, 1)]
    return torch.stack(match, -1).long().cumprod(-1).sum(-1)


def walk(accepted: Sequence[int], prompt: int, new_tokens: int, extra: int) -> list[tuple[int, int]]:
    """Return the verifications of one request; see `simulate`.

    Args:
        accepted: by base position.
        prompt: length of the prompt, which gives the first new token.
        new_tokens: to generate.
        extra: verifications after the last new token is out.

    Returns:
        (base position, accepted drafts) in order.
    """
    chain, base = [], prompt - 1
    while (out := base + 2 - prompt) < new_tokens or extra:  # out: new tokens that are known
        extra -= out >= new_tokens
        chain.append((base, accepted[base]))
        base += accepted[base] + 1
    return chain


def simulate(
    model: Any,
    head: MtpHead | GlmMtpHead,
    prompts: Sequence[Sequence[int]],
    greedy: Sequence[Sequence[int]],
    drafts: int,
    *,
    new_tokens: int | Sequence[int],
    extra: int | Sequence[int] = 1,
) -> Acceptance:
    """Simulate greedy speculative decoding of every request.

    Requests do not see each other; those of one length are run as a batch and none is padded.

    LMDeploy sends a step off before it has read the last one's tokens. So a request that has given its last token is
    verified once more, for any number of drafts, however the batch is made up, and even where the prompt gave the
    only token: one extra verification. The exception: the step after the last token was a prefill (another request,
    or another chunk of one, came in between); then there is none. In a batch whose prompts are all in before the
    first request ends, every request has one.

    Args:
        model: transformers' model, which has the draft head's embedding and output projection.
        head: `load_head` of the same checkpoint.
        prompts: token ids by request; lengths may differ.
        greedy: the trunk's greedy continuations, each at least `greedy_needed(new_tokens, drafts)` long.
        drafts: drafts of a verification, at least 1.
        new_tokens: generated per request, one number or one for each; where a stop token ended a request, the
            tokens up to it.
        extra: verifications after a request's last token, 0 or 1, one number or one for each.

    Returns:
        The figures over all requests.

    Raises:
        ValueError: a continuation is too short, or `drafts` or `extra` is none of the above.
    """
    if drafts < 1:
        raise ValueError(f"drafts is {drafts}; wanted at least 1")
    count = len(prompts)
    new = [new_tokens] * count if isinstance(new_tokens, int) else list(new_tokens)
    after = [extra] * count if isinstance(extra, int) else list(extra)
    if not set(after) <= {0, 1}:
        raise ValueError(f"extra is {extra}; wanted 0 or 1")
    sequences: list[list[int]] = []
    for i, (prompt, more, out, _) in enumerate(zip(prompts, greedy, new, after, strict=True)):
        needed = greedy_needed(out, drafts)
        if len(more) < needed:
            raise ValueError(f"request {i}: the greedy continuation has {len(more)} tokens; wanted {needed}")
        sequences.append([*prompt, *more[:needed]])
    groups: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        groups.setdefault(len(sequence), []).append(i)
    chains: dict[int, Chain] = {}
    with torch.no_grad():
        for rows in groups.values():
            tokens = torch.tensor([sequences[i] for i in rows])
            accepted = accepted_drafts(model, head, tokens, hidden_states(model, tokens), drafts)
            for i, row in zip(rows, accepted.tolist(), strict=True):
                chains[i] = walk(row, len(prompts[i]), new[i], after[i])
    return summarise(sequences, [chains[i] for i in range(count)], drafts)
