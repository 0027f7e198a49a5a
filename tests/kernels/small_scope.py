"""Every sequence of a few steps of one slot, each step against the definition.

Steps are letters. The tree of all their sequences is walked breadth first, and all sequences of one length are rows of
a few calls: a node is a slot that holds what its sequence has left there, and its children start from copies of it. So
a sequence costs microseconds, and the first difference found is at the end of one of the shortest.

The oracle is that of the fuzzer (`tests.fuzz.world`): what a step gives and writes is computed from all tokens of its
request. It has to be asked once for each thing it can depend on, because tokens are drawn from a few streams: an
accepted token is the one of its stream and position, a rejected draft the one of its stream, position and step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from tests.fuzz.world import NAN, Different, Request

from .small_scope_layouts import Layout, Rows

STREAMS: Final = 3
SLICE: Final = 1 << 15  # sequences of a call: what lies between two calls stays near the cache
PAD_EVERY: Final = 9  # rows, then one of padding


class Letter(NamedTuple):
    """A step of q tokens, of which some stand: "prefill", or "verify" (of one token: decode); or "finish"."""

    kind: str
    q: int = 0
    stands: int = 0

    def __str__(self) -> str:
        if self.kind == "verify":
            return f"verify of {self.q}, {self.stands} accepted" if self.q > 1 else "decode"
        return f"prefill of {self.q}" if self.q else self.kind


FINISH: Final = Letter("finish")


def alphabet(prefills: Sequence[int], drafts: int, *, fewer: bool = False) -> list[Letter]:
    """Return prefills of the lengths given, each outcome of a verify step, a decode step, and the end of a request.

    With `fewer` also verify steps of fewer drafts.
    """
    lengths = range(2 if fewer else max(2, drafts + 1), drafts + 2)
    verify = [Letter("verify", q, a) for q in lengths for a in range(1, q + 1)]
    return [*(Letter("prefill", q, q) for q in sorted({*prefills} - {0})), *verify, Letter("verify", 1, 1), FINISH]


class Answer(NamedTuple):
    """What the definition says of a step: the outputs [Q, ..], bool [E], which entries it writes, and what, [E, ..]."""

    outputs: Tensor
    mask: Tensor
    values: Tensor


@dataclass
class Nodes:
    """Sequences of one length.

    Attributes:
        parent: int64 [M], in the level before.
        letter: int64 [M], the last step.
        stream: int64 [M], of the request that has the slot.
        history: int64 [M], its tokens.
        accepted: int64 [M], of its last verify step; 1 before the first.
        alive: by layout bool [M], whether the layout allows the sequence.
        held: by layout [M, E, ..], what the slot holds.
    """

    parent: Tensor
    letter: Tensor
    stream: Tensor
    history: Tensor
    accepted: Tensor
    alive: dict[str, Tensor]
    held: dict[str, Tensor] = field(default_factory=dict)

    def at(self, which: Tensor) -> Nodes:
        alive = {name: x[which] for name, x in self.alive.items()}
        parent, letter, stream = self.parent[which], self.letter[which], self.stream[which]
        return Nodes(parent, letter, stream, self.history[which], self.accepted[which], alive)


@dataclass
class Tree:
    """The sequences of up to `depth` letters in layouts that take the same tokens.

    Attributes:
        layouts: by name.
        letters: the alphabet.
        depth: steps of the longest sequences.
        checked: by layout, the sequences whose last step was compared with the definition.
        agreed: by two layouts, the sequences that both allow, where the outputs of one were compared with the other's.
    """

    layouts: Mapping[str, Layout]
    letters: list[Letter]
    depth: int
    checked: Counter[str] = field(default_factory=Counter, init=False)
    agreed: Counter[tuple[str, str]] = field(default_factory=Counter, init=False)
    levels: list[Nodes] = field(default_factory=list, init=False)
    answers: dict[tuple[str, int], Answer] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.world = next(iter(self.layouts.values())).world
        self.longest = max(letter.q for letter in self.letters)
        self.positions = self.depth * self.longest + 1
        starts = STREAMS * self.positions
        # Accepted tokens, then the drafts of a step at each of them; the last token is that of PAD rows.
        self.tokens = torch.cat((self.world.draw(starts * (1 + self.longest)), self.world.draw(1).fill_(NAN)))
        self.q, self.stands = (torch.tensor([x[i] for x in self.letters]) for i in (1, 2))
        self.updates = torch.tensor([x.kind == "verify" for x in self.letters])

    def walk(self) -> None:
        """Check every sequence.

        Raises:
            Different: a step differs from the definition; tells one of the shortest sequences where one does.
        """
        one, none = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        root = Nodes(none, none, none, none, one, {name: one.bool() for name in self.layouts})
        root.held = {name: layout.new_pool(1).clone() for name, layout in self.layouts.items()}
        self.levels = [root]
        for level in range(self.depth):
            self.levels.append(self.children(self.levels[-1], last=level == self.depth - 1))
            self.levels[-2].held.clear()

    # --- tokens and the definition ------------------------------------------------------------------------------------

    def token(self, stream: Tensor, history: Tensor, stands: Tensor, offset: Tensor) -> Tensor:
        """Return which of `tokens` comes at an offset in a step."""
        before = stream * self.positions + history
        draft = STREAMS * self.positions + before * self.longest + offset
        return torch.where(offset < stands, before + offset, draft)

    def request(self, stream: int, history: int, accepted: int) -> Request:
        first = stream * self.positions
        return Request(self.tokens[first : first + history], accepted)

    def keys(self, nodes: Nodes) -> Tensor:
        """Return what a step depends on as a number: stream, history, the count accepted before, and letter."""
        number = nodes.stream * self.positions + nodes.history
        return (number * (self.longest + 1) + nodes.accepted) * len(self.letters) + nodes.letter

    def answer(self, name: str, key: int) -> Answer:
        if (name, key) not in self.answers:
            layout = self.layouts[name]
            rest, number = divmod(key, len(self.letters))
            rest, accepted = divmod(rest, self.longest + 1)
            stream, history = divmod(rest, self.positions)
            letter, offset = self.letters[number], torch.arange(self.letters[number].q)
            begin, before, stands = (torch.tensor(i) for i in (stream, history, letter.stands))
            at = self.token(begin, before, stands, offset)
            output, written = layout.defined(
                self.request(stream, history, accepted), self.tokens[at], letter.stands, update=letter.kind == "verify"
            )
            held = self.levels[0].held[name] if self.levels[0].held else layout.new_pool(1)
            values = torch.zeros_like(held[0], dtype=output.dtype)
            mask = torch.zeros(len(values), dtype=torch.bool)
            for entry, value in written.items():
                mask[entry], values[entry] = True, value
            padded = output.new_zeros(self.longest, *output.shape[1:])
            padded[: letter.q] = output
            self.answers[name, key] = Answer(padded, mask, values)
        return self.answers[name, key]

    # --- the walk -----------------------------------------------------------------------------------------------------

    def allowed(self, name: str, nodes: Nodes, parent: Tensor, letter: Tensor) -> Tensor:
        """Tell which letters a layout allows after the sequences of `parent`."""
        world = self.layouts[name].world
        begun, update, finish = nodes.history[parent] > 0, self.updates[letter], self.q[letter] == 0
        allowed = nodes.alive[name][parent] & (begun | ~finish)
        if not world.begins_anywhere:
            allowed &= begun | ~update
        if not world.rewinds:
            allowed &= self.q[letter] == self.stands[letter]
        goes_on = torch.tensor([world.may_prefill(self.request(0, 0, a)) for a in range(self.longest + 1)])
        return allowed & (update | finish | goes_on[nodes.accepted[parent]])

    def children(self, nodes: Nodes, *, last: bool) -> Nodes:
        """Append every letter to every sequence, make the steps, and check them."""
        count = len(nodes.history)
        parent = torch.arange(count).repeat_interleave(len(self.letters))
        letter = torch.arange(len(self.letters)).repeat(count)
        alive = {name: self.allowed(name, nodes, parent, letter) for name in self.layouts}
        kept = torch.stack(tuple(alive.values())).any(0)
        if last:
            kept &= self.q[letter] > 0
        # In any order, so that the neighbours of a row have nothing in common with it.
        order = kept.nonzero()[:, 0]
        order = order[torch.randperm(len(order), generator=self.generator)]
        before = nodes.at(parent)
        new = Nodes(parent, letter, before.stream, before.history, before.accepted, alive).at(order)
        parts = [self.steps(nodes, new.at(part), part) for part in torch.arange(len(order)).split(SLICE)]
        if not last:
            new.held = {name: torch.cat([held[name] for held in parts]) for name in self.layouts}
        # A request ends and leaves its slot as it is; the next one has another stream.
        ends, other = self.q[new.letter] == 0, (new.stream + 1 + torch.arange(len(order)) % (STREAMS - 1)) % STREAMS
        new.stream = torch.where(ends, other, new.stream)
        new.accepted = torch.where(self.updates[new.letter], self.stands[new.letter], new.accepted)
        new.accepted = torch.where(ends, 1, new.accepted)
        new.history = torch.where(ends, 0, new.history + self.stands[new.letter])
        return new

    def steps(self, parents: Nodes, new: Nodes, part: Tensor) -> dict[str, Tensor]:
        """Make the last steps of some sequences in every layout; return what the slots hold then."""
        outputs = {name: self.steps_of(name, parents.held[name][new.parent], new) for name in self.layouts}
        names = list(outputs)
        for i, name in enumerate(names):
            for other in names[i + 1 :]:
                both = new.alive[name] & new.alive[other] & (self.q[new.letter] > 0)
                if bool(both.any()):
                    self.agreed[name, other] += int(both.sum())
                    self.compare(f"outputs of {name} and {other}", new, outputs[name][1], outputs[other][1], both)
        return {name: held for name, (held, _) in outputs.items()}

    def steps_of(self, name: str, held: Tensor, new: Nodes) -> tuple[Tensor, Tensor]:
        """Make steps in one layout; return what the slots hold then, and the outputs [M, Q, ..]."""
        layout = self.layouts[name]
        world, count = layout.world, len(held)
        made = new.alive[name] & (self.q[new.letter] > 0)
        if not bool(made.any()):
            return held, held[:0]
        # Whatever is not a step in this layout stands beside one that is.
        keys, which = torch.where(made, self.keys(new), self.keys(new)[made][:1]).unique(return_inverse=True)
        answers = [self.answer(name, key) for key in keys.tolist()]
        want = Answer(*(torch.stack(x)[which] for x in zip(*answers, strict=True)))
        entries = layout.new_pool(count)
        slots = torch.randperm(count, generator=self.generator)
        entries[slots] = held
        storage, before = world.remember(layout.name)
        got = torch.zeros_like(want.outputs, dtype=held.dtype)
        update, dense = self.updates[new.letter], len(self.levels) % 2 == 0
        groups = [made & ~update]
        if dense:
            groups += [made & update & (self.q[new.letter] == q) for q in sorted({x.q for x in self.letters})]
        else:
            groups.append(made & update)
        for number, group in enumerate(groups):
            rows = group.nonzero()[:, 0]
            if len(rows):
                self.call(layout, new, rows, slots, got, update=number > 0, dense=dense and number > 0)
        self.compare(f"outputs of {name}", new, got, want.outputs, made)
        now = entries[slots]
        written = want.mask & made[:, None]
        self.compare(f"state of {name}", new, now, want.values, written)
        old = layout.view(before)
        old[slots] = torch.where(written.view(*written.shape, *(1,) * (now.dim() - 2)), now, old[slots])
        world.compare_bytes(layout.name, storage)
        self.checked[name] += int(made.sum())
        return now, got

    def call(
        self, layout: Layout, new: Nodes, rows: Tensor, slots: Tensor, got: Tensor, *, update: bool, dense: bool
    ) -> None:
        """Make the steps of some rows by one call, PAD rows among them; put the outputs into `got` [M, Q, ..]."""
        at = torch.arange(len(rows))
        row = rows.new_full((len(rows) + (len(rows) - 1) // PAD_EVERY + 1,), -1)
        row[at + at // PAD_EVERY + 1] = rows
        live, node = row >= 0, torch.where(row >= 0, row, rows[0])
        letter = new.letter[node]
        lengths = torch.where(live, self.q[letter], self.q[letter].min())
        given = Rows(torch.where(live, slots[node], -1), new.history[node], new.accepted[node], lengths, dense)
        owner = torch.arange(len(row)).repeat_interleave(lengths)
        offset = torch.arange(len(owner)) - given.cu_seqlens[owner]
        stream, history, stands = (x[owner] for x in (new.stream[node], given.histories, self.stands[letter]))
        token = torch.where(live[owner], self.token(stream, history, stands, offset), len(self.tokens) - 1)
        x = self.tokens[token]
        out = layout.update(x, given) if update else layout.prefill(x, given)
        if not bool((out[~live[owner]] == 0).all()):
            raise Different(f"a PAD row in a call of {len(row)} rows has an output")
        out, owner, offset = (x[live[owner]] for x in (out, owner, offset))
        got[node[owner], offset] = out

    # --- the comparison -----------------------------------------------------------------------------------------------

    def compare(self, what: str, new: Nodes, got: Tensor, want: Tensor, where: Tensor) -> None:
        """Compare [M, X, ..] where a mask [M] or [M, X] says.

        A result that is no number of fp32 is within the world's limit over all rows (RMS error over RMS), and within
        ten times it in each element, so that no row hides among the others.
        """
        mask = where.view(*where.shape, *(1,) * (got.dim() - where.dim())).expand_as(got)
        error = torch.where(mask, (got.double() - want.double()).abs(), 0.0)
        scale = torch.where(mask, want.double(), 0.0).square().sum().div(mask.sum()).sqrt()
        limit = self.world.limit * scale
        bad = ~(error <= 10 * limit).flatten(1).all(1)
        if bool(bad.any()):
            row = int(bad.nonzero()[0, 0])
            first = int((~(error <= 10 * limit))[row].flatten(1).any(1).nonzero()[0])
            said = f"at {first} {got[row, first].tolist()}, wanted {want[row, first].tolist()}"
            raise Different(f"{what} after {self.path(new, row)}: {said}")
        if not bool(error.square().sum().div(mask.sum()).sqrt() <= limit):
            raise Different(f"{what} differ by more than {self.world.limit} of their RMS")

    def path(self, new: Nodes, row: int) -> str:
        """Return the sequence that leads to a row."""
        steps = [int(new.letter[row])]
        at = int(new.parent[row])
        for nodes in reversed(self.levels[1:]):
            steps.append(int(nodes.letter[at]))
            at = int(nodes.parent[at])
        return ", ".join(str(self.letters[step]) for step in reversed(steps))
