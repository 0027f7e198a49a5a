"""Draw where each layout keeps a request's state: `python -m docs.tools.figures` writes the pictures and their text.

Nothing is drawn from memory. The definitions in `kernels/*/reference.py` are run on inputs that are the numbers of
their tokens, with pools full of NaN, and a picture shows what is then in the pool. What a step reads is asked of the
definition too: with one tap of the convolution at 1, an output is the input that the tap met.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
from torch import Tensor

from dlinfer_ext.kernels.causal_conv1d import reference as conv
from dlinfer_ext.kernels.gated_delta_rule import reference as delta
from dlinfer_ext.kernels.kpool_indexer import reference as kpool

DOCS = Path(__file__).resolve().parents[1]
LANGUAGES = ("en", "zh_cn")
WIDTH = 4  # W
DRAFTS = 3
AGAIN = 0.25  # added to a token that takes the place of a rejected draft; shown as a prime


@dataclass(frozen=True)
class Row:
    """One line of a picture: what the pool holds, which columns the next step reads, which were written."""

    english: str
    chinese: str
    cells: tuple[str, ...]
    read: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Picture:
    """A picture: rows over named columns, as strips or as rings."""

    name: str
    heading: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    ring: bool = False


def token(value: float, letter: str = "p") -> str:
    """Return the name of a token by its number: p9, p9′ if it came in the place of a rejected one, · for none."""
    if math.isnan(value):
        return "·"
    number = math.floor(value)
    return f"{letter}{number}" + ("" if value == number else "′")


def names(values: Tensor, letter: str = "p") -> tuple[str, ...]:
    return tuple(token(v, letter) for v in values.flatten().tolist())


def changed(before: Tensor, after: Tensor) -> frozenset[int]:
    same = (before == after) | (before.isnan() & after.isnan())
    return frozenset((~same.flatten()).nonzero().flatten().tolist())


def tokens(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).view(-1, 1)


def column_of(pool: Tensor, value: float) -> int:
    """Return the column that holds a value that a step has read."""
    held = pool.flatten().tolist()
    if value not in held:
        raise ValueError(f"a step reads {value}, which it should find in none of {held}")
    return held.index(value)


def columns_read(pool: Tensor, first_output: Callable[[Tensor, Tensor], Tensor]) -> frozenset[int]:
    """Return the columns of the row's history: where the inputs lie that each tap but the newest meets."""
    met = []
    for tap in range(WIDTH - 1):
        weight = torch.zeros(WIDTH, 1, dtype=torch.float64)
        weight[tap] = 1
        # NaN times 0 is NaN: the columns that no step has written are asked for as -1, which no token is.
        met.append(first_output(pool.nan_to_num(-1), weight).flatten()[0].item())
    return frozenset(column_of(pool, value) for value in met)


# ------------------------------------------------------------------------------------------------- the convolution


TAPS = torch.ones(WIDTH, 1, dtype=torch.float64)


def packed(pool: Tensor, new: Tensor, history: int, layout: str, weight: Tensor = TAPS) -> Tensor:
    """Run the definition on one request with its row in slot 0; mutates the pool."""
    return conv.causal_conv1d(
        new,
        weight,
        None,
        pool,
        torch.tensor([0, len(new)]),
        torch.tensor([0]),
        torch.tensor([history]),
        layout,
    )


def linear() -> Picture:
    pool = torch.full((1, WIDTH - 1, 1), math.nan, dtype=torch.float64)
    rows, history = [], 0
    for count, english, chinese in (
        (3, "after 3 tokens", "3 个 token 之后"),
        (1, "after a chunk of 1", "再来 1 个 token 的分块"),
        (2, "after a chunk of 2", "再来 2 个 token 的分块"),
    ):
        before = pool.clone()
        packed(pool, tokens(*range(history, history + count)), history, "linear")
        history += count
        now = history
        read = columns_read(pool, lambda p, w, now=now: packed(p, tokens(-2), now, "linear", w))  # type: ignore[misc]
        rows.append(Row(english, chinese, names(pool), read, changed(before, pool)))
    return Picture("linear", "column", tuple(map(str, range(WIDTH - 1))), tuple(rows))


def ring() -> Picture:
    length = WIDTH + DRAFTS
    pool = torch.full((1, length, 1), math.nan, dtype=torch.float64)

    def read(history: int) -> frozenset[int]:
        return columns_read(pool, lambda p, w: packed(p, tokens(-2), history, "ring", w))

    def verify(first: int, shift: float) -> frozenset[int]:
        before = pool.clone()
        packed(pool, tokens(*(first + i + (shift if i else 0) for i in range(1 + DRAFTS))), first, "ring")
        return changed(before, pool)

    packed(pool, tokens(*range(9)), 0, "ring")
    rows = [Row("after 9 tokens", "9 个 token 之后", names(pool), read(9))]
    written = verify(9, 0)
    rows.append(Row("verify step p9 … p12", "验证步 p9 … p12", names(pool), frozenset(), written))
    rows.append(Row("1 token stands", "保留 1 个 token", names(pool), read(10)))
    before = pool.clone()
    packed(pool, tokens(*(10 + i + AGAIN for i in range(1 + DRAFTS))), 10, "ring")
    rows.append(Row("next step p10′ … p13′", "下一步 p10′ … p13′", names(pool), frozenset(), changed(before, pool)))
    return Picture("ring", "column", tuple(map(str, range(length))), tuple(rows), ring=True)


def rewind() -> Picture:
    length = WIDTH - 1 + DRAFTS
    pool = torch.full((1, length, 1), math.nan, dtype=torch.float64)
    pool[0, : WIDTH - 1] = tokens(*range(6, 9))

    def step(p: Tensor, new: Tensor, accepted: int, weight: Tensor = TAPS) -> Tensor:
        return conv.causal_conv1d_update(new[None], p, weight, num_accepted_tokens=torch.tensor([accepted]))

    def read(accepted: int) -> frozenset[int]:
        return columns_read(pool, lambda p, w: step(p, tokens(-2), accepted, w))

    rows = [Row("before, a = 1", "之前，a = 1", names(pool), read(1))]
    before = pool.clone()
    step(pool, tokens(*range(9, 9 + 1 + DRAFTS)), 1)
    rows.append(Row("step p9 … p12", "一步 p9 … p12", names(pool), frozenset(), changed(before, pool)))
    for a in (1, 3, 4):
        rows.append(Row(f"next step, a = {a}", f"下一步，a = {a}", names(pool), read(a)))
    return Picture("rewind", "column", tuple(map(str, range(length))), tuple(rows))


# --------------------------------------------------------------------------------------------------- the delta rule


def delta_step(pool: Tensor, numbers: Iterable[float], history: int, *, prefill: bool) -> Tensor:
    """Run the definition on one request whose state after each token is the number given for it; mutates the pool.

    With k = q = 1, no decay and beta = 1 the rule stores v. The result is what each token read from its own state.
    """
    v = tokens(*numbers).view(1, -1, 1, 1)
    ones, zeros = torch.ones_like(v), torch.zeros_like(v[..., 0])
    given = (ones, ones, v, zeros, torch.ones_like(zeros), pool)
    where: dict[str, Any] = {"state_indices": torch.tensor([0]), "history_lens": torch.tensor([history])}
    if prefill:
        q, k, v, g, beta = (x[0] for x in given[:5])
        where["cu_seqlens"] = torch.tensor([0, v.shape[1]])
        return delta.gated_delta_rule(q, k, v, g, beta, pool, **where)
    return delta.gated_delta_rule_update(*given, **where)


def state_read(pool: Tensor, history: int) -> frozenset[int]:
    """Return the entry that a step starts from: with beta = 0 the output is what was stored."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    zero = torch.zeros(1, 1, 1, dtype=torch.float64)
    where: dict[str, Any] = {"state_indices": torch.tensor([0]), "history_lens": torch.tensor([history])}
    out = delta.gated_delta_rule_update(one, one, one, zero, zero, pool.clone(), **where)
    return frozenset({column_of(pool, out.item())})


def recurrent() -> Picture:
    entries = 1 + DRAFTS
    pool = torch.full((1, entries, 1, 1, 1), math.nan, dtype=torch.float64)
    delta_step(pool, range(1, 10), 0, prefill=True)
    rows = [Row("after 9 tokens", "9 个 token 之后", names(pool, "S"), state_read(pool, 9))]
    before = pool.clone()
    delta_step(pool, range(10, 10 + entries), 9, prefill=False)
    rows.append(Row("verify step of 4", "4 个 token 的验证步", names(pool, "S"), frozenset(), changed(before, pool)))
    rows.append(Row("2 tokens stand", "保留 2 个 token", names(pool, "S"), state_read(pool, 11)))
    before = pool.clone()
    delta_step(pool, (12 + i + AGAIN for i in range(entries)), 11, prefill=False)
    rows.append(Row("next step of 4", "下一步，4 个 token", names(pool, "S"), frozenset(), changed(before, pool)))
    return Picture("recurrent_ring", "entry", tuple(map(str, range(entries))), tuple(rows), ring=True)


# ---------------------------------------------------------------------------------------------------- pools of keys


POOL = 4  # P
POOLS = 4  # in a block of 16 tokens


def pool_name(value: float, index: int) -> str:
    """Return which tokens a pool's key is the mean of: all gates are equal."""
    first = POOL * index
    if math.isnan(value):
        return "·"
    for shown, numbers in (
        (f"{first}–{first + POOL - 1}", [first + i for i in range(POOL)]),
        (f"{first}–{first + POOL - 1}′", [first + i + (AGAIN if first + i >= 10 else 0) for i in range(POOL)]),
    ):
        if math.isclose(value, sum(numbers) / POOL):
            return shown
    raise ValueError(f"pool {index} holds {value}, which is the mean of no tokens of its own")


def tail() -> Picture:
    ring_length = POOL + DRAFTS
    pools = torch.full((1, POOLS, 1), math.nan, dtype=torch.float64)
    waiting = torch.full((1, ring_length, 2), math.nan, dtype=torch.float64)
    block = torch.tensor([[0]])

    def write(numbers: list[float], history: int) -> frozenset[int]:
        before = torch.cat([waiting[0, :, 0], pools[0, :, 0]])
        kpool.kpool_update(
            tokens(*numbers),
            torch.zeros(len(numbers), 1, dtype=torch.float64),
            torch.zeros(POOL, 1, dtype=torch.float64),
            pools,
            waiting,
            cu_seqlens=torch.tensor([0, len(numbers)]),
            block_offsets=block,
            history_lens=torch.tensor([history]),
        )
        return changed(before, torch.cat([waiting[0, :, 0], pools[0, :, 0]]))

    def seen(history: int) -> frozenset[int]:
        """Return the columns of the pools that a query at position `history` may choose."""
        chosen = kpool.kpool_select(
            torch.ones(1, 1, 1),
            torch.ones(1, 1),
            pools,
            cu_seqlens=torch.tensor([0, 1]),
            block_offsets=block,
            history_lens=torch.tensor([history]),
            topk=POOL * POOLS,
            kpool=POOL,
            max_kv_len=POOL * POOLS,
        )
        complete = [
            p // POOL
            for p, group in groupby(chosen.flatten().tolist(), key=lambda t: t - t % POOL)
            if p >= 0 and len(list(group)) == POOL
        ]
        return frozenset(ring_length + p for p in complete)

    def cells() -> tuple[str, ...]:
        keys = pools.flatten().tolist()
        return names(waiting[0, :, 0]) + tuple(pool_name(key, i) for i, key in enumerate(keys))

    write(list(range(9)), 0)
    rows = [Row("after 9 tokens", "9 个 token 之后", cells(), seen(8))]
    written = write([9, 10, 11, 12], 9)
    rows.append(Row("verify step p9 … p12", "验证步 p9 … p12", cells(), frozenset(), written))
    rows.append(Row("1 token stands", "保留 1 个 token", cells(), seen(9)))
    written = write([10 + i + AGAIN for i in range(4)], 10)
    rows.append(Row("next step p10′ … p13′", "下一步 p10′ … p13′", cells(), frozenset(), written))
    columns = (*(f"{i}" for i in range(ring_length)), *(f"pool {i}" for i in range(POOLS)))
    return Picture("kpool_tail", "entry", columns, tuple(rows))


# --------------------------------------------------------------------------------------------------------- drawing


def text(picture: Picture) -> str:
    """Return the picture in letters: [x] is read by the next step, x* was written by this one."""
    cells = [
        [f"[{c}]" if i in r.read else f"{c}*" if i in r.written else f"{c} " for i, c in enumerate(r.cells)]
        for r in picture.rows
    ]
    label = max(len(r.english) for r in picture.rows)
    wide = max(len(c) for row in [list(picture.columns), *cells] for c in row)

    def line(name: str, parts: Iterable[str]) -> str:
        return f"{name:<{label}}  " + " ".join(f"{p:>{wide}}" for p in parts)

    room = wide > max(map(len, picture.columns))  # for the sign behind a cell
    lines = [line(picture.heading, [f"{c} " if room else c for c in picture.columns])]
    lines += [line(r.english, row) for r, row in zip(picture.rows, cells, strict=True)]
    return "\n".join(entry.rstrip() for entry in lines)


STYLE = (
    "text{font:13px sans-serif;fill:#222}.n{fill:#777;font-size:11px}.c{fill:#fff;stroke:#999}"
    ".w{fill:#fdd9b5}.r{stroke:#1f5fbf;stroke-width:3}"
)
LEGEND = {
    "en": ("written by this step", "read by the next step"),
    "zh_cn": ("这一步写入", "下一步读取"),
}


def _cell(x: float, y: float, name: str, kind: str, wide: int = 46) -> str:
    return (
        f'<rect class="c{kind}" x="{x - wide / 2:.0f}" y="{y - 14:.0f}" width="{wide}" height="28" rx="4"/>'
        f'<text x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle">{escape(name)}</text>'
    )


def _kind(row: Row, column: int) -> str:
    return " w" * (column in row.written) + " r" * (column in row.read)


def _strips(picture: Picture, language: str) -> tuple[list[str], int, int]:
    wide = 62 if any(len(c) > 4 for r in picture.rows for c in r.cells) else 46
    parts = []
    for i, column in enumerate(picture.columns):
        x = 190 + (wide + 6) * i
        parts.append(f'<text class="n" x="{x}" y="18" text-anchor="middle">{escape(column)}</text>')
        parts += [_cell(x, 42 + 36 * j, r.cells[i], _kind(r, i), wide) for j, r in enumerate(picture.rows)]
    for j, row in enumerate(picture.rows):
        label = row.english if language == "en" else row.chinese
        parts.append(f'<text x="10" y="{46 + 36 * j}">{escape(label)}</text>')
    return parts, max(380, 190 + (wide + 6) * len(picture.columns)), 42 + 36 * len(picture.rows)


def _rings(picture: Picture, language: str) -> tuple[list[str], int, int]:
    count = len(picture.columns)
    radius = 78 if count > 5 else 62
    size = 2 * radius + 72
    parts = []
    for j, row in enumerate(picture.rows):
        cx, cy = size * j + size / 2, radius + 34
        parts.append(f'<circle cx="{cx:.0f}" cy="{cy:.0f}" r="{radius}" fill="none" stroke="#ddd"/>')
        for i, name in enumerate(row.cells):
            angle = 2 * math.pi * i / count - math.pi / 2
            x, y = math.cos(angle), math.sin(angle)
            parts.append(_cell(cx + radius * x, cy + radius * y, name, _kind(row, i)))
            inner = radius - 34 if count > 5 else radius - 32
            parts.append(
                f'<text class="n" x="{cx + inner * x:.0f}" y="{cy + inner * y + 4:.0f}" text-anchor="middle">'
                f"{picture.columns[i]}</text>"
            )
        label = row.english if language == "en" else row.chinese
        parts.append(f'<text x="{cx:.0f}" y="{2 * radius + 72}" text-anchor="middle">{escape(label)}</text>')
    return parts, size * len(picture.rows), 2 * radius + 84


def svg(picture: Picture, language: str) -> str:
    """Return the picture as SVG on a white ground, with labels in one language."""
    parts, width, height = (_rings if picture.ring else _strips)(picture, language)
    written, read = LEGEND[language]
    height += 34
    legend = (
        f'<rect class="c w" x="10" y="{height - 26}" width="16" height="16"/>'
        f'<text x="32" y="{height - 13}">{written}</text>'
        f'<rect class="c r" x="190" y="{height - 26}" width="16" height="16"/>'
        f'<text x="212" y="{height - 13}">{read}</text>'
    )
    body = "\n".join([*parts, legend])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f'<style>{STYLE}</style>\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )


def pictures() -> list[Picture]:
    """Return every picture, each from a fresh run of the definitions."""
    return [linear(), rewind(), ring(), recurrent(), tail()]


def files() -> dict[Path, str]:
    """Return what docs/ should hold: each SVG, and the operators' pages with the pictures' text in its places."""
    shown = pictures()
    wanted = {DOCS / lang / "figures" / f"{p.name}.svg": svg(p, lang) for p in shown for lang in LANGUAGES}
    for lang in LANGUAGES:
        page = DOCS / lang / "operators.md"
        content = page.read_text(encoding="utf-8")
        for picture in shown:
            place = re.compile(rf"(\(figures/{picture.name}\.svg\)\n\n```text\n).*?(^```$)", re.MULTILINE | re.DOTALL)
            content, count = place.subn(lambda m, p=picture: m[1] + text(p) + "\n" + m[2], content)  # type: ignore[misc]
            if count != 1:
                raise ValueError(f"{page} has {count} places for the text of {picture.name}.svg, not 1")
        wanted[page] = content
    return wanted


if __name__ == "__main__":
    for path, content in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
