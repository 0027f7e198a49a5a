"""Print the tables that pages take from configs/, and write them there: `make docs-tables`.

A table stands in a page between `<!-- table: NAME -->` and `<!-- end -->`. A test holds that it is what this prints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("en", "zh_cn")
PLACE = re.compile(r"(<!-- table: (?P<name>\w+) -->\n)((?!<!--).*\n)*?(<!-- end -->)")
# The columns of configs/hosts.json, by their names there.
PACKAGES = ("lmdeploy", "python", "torch", "torch_npu", "cann", "triton-ascend", "dlinfer-ascend", "transformers")
STACKS = {
    "en": ("machine", *PACKAGES, "evidence"),
    "zh_cn": ("机器", *PACKAGES, "证据"),
}
WORDS = {
    "en": {"none": "–", "unknown": "not known"},
    "zh_cn": {
        "none": "–",
        "unknown": "未知",
        "run natively on CPU": "在 CPU 上原生运行",
        "not run on NPU": "未在 NPU 上运行",
    },
}
SOURCES = {"en": ("machine", "what it rests on", "sources"), "zh_cn": ("机器", "依据（原文为英文）", "出处")}
FAULTS = {
    "en": ("package", "versions", "with LMDeploy", "why", "what to do"),
    "zh_cn": ("包", "版本", "与 LMDeploy", "原因（原文为英文）", "怎么办"),
}
HOSTS = {"en": "with LMDeploy", "zh_cn": "所用 LMDeploy"}
CHIPS = {
    "en": ("chip", "device name begins with", "cube and vector cores", "unified buffer", "operators run as"),
    "zh_cn": ("芯片", "设备名开头", "cube 与 vector 核数", "统一缓冲区", "算子的运行形式"),
}
MODELS = {
    "en": ("sizes", "rule", "heads: query, value", "K, V", "drafts"),
    "zh_cn": ("尺寸", "规则", "头数：query、value", "K、V", "草稿数"),
}


def _rows(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *body)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _records(folder: str) -> list[dict[str, Any]]:
    files = sorted((ROOT / "configs" / folder).glob("*.json"))
    return [json.loads(f.read_text(encoding="utf-8")) for f in files]


def _flat(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _hosts() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((ROOT / "configs" / "hosts.json").read_text(encoding="utf-8"))
    return record


def _version(spec: str | None, machine: str, words: dict[str, str]) -> str:
    """Return a version, or a range as it is written; without one the CPU needs none, and of a card it is not known."""
    return spec.removeprefix("==") if spec else words["none" if machine == "cpu" else "unknown"]


def stacks(language: str) -> str:
    """Return which versions go together on which machine."""
    words = WORDS[language]
    body = [
        [
            f"`{s['machine']}`",
            *(_version(s.get(name), s["machine"], words) for name in PACKAGES),
            words.get(s["evidence"], s["evidence"]),
        ]
        for s in _hosts()["stacks"]
    ]
    return _rows([list(STACKS[language]), *body])


def sources(language: str) -> str:
    """Return what each line of `stacks` rests on."""
    body = [
        [f"`{s['machine']}`", s["note"], " ".join(f"[{i}]({url})" for i, url in enumerate(s["sources"], 1)) or "–"]
        for s in _hosts()["stacks"]
    ]
    return _rows([list(SOURCES[language]), *body])


def pairs(language: str) -> str:
    """Return which torch_npu, torch and CANN go together."""
    names = ("torch_npu", "torch", "cann")
    return _rows([list(names), *([p[n].removeprefix("==") for n in names] for p in _hosts()["pairs"])])


def faults(language: str) -> str:
    """Return the releases that are known not to serve."""
    body = [
        [f"`{f['package']}`", f["versions"], f["lmdeploy"], f"{f['why']} ([1]({f['source']}))", f["fix"]]
        for f in _hosts()["faults"]
    ]
    return _rows([list(FAULTS[language]), *body])


def hosts(language: str) -> str:
    """Return what was tried: a column for each version of LMDeploy, a row for each entry of configs/hosts.json."""
    versions = {version: dict(_flat(entry)) for version, entry in _hosts()["lmdeploy"].items()}
    keys = list(dict.fromkeys(key for entry in versions.values() for key in entry))
    body = [[f"`{key}`", *(entry.get(key, "–") for entry in versions.values())] for key in keys]
    return _rows([[HOSTS[language], *versions], *body])


def chips(language: str) -> str:
    """Return the chips of configs/soc."""
    body = [
        [
            f"`{r['name']}`",
            ", ".join(f"`{d}`" for d in r["devices"]),
            f"{r['cube_cores']}, {r['vector_cores']}",
            f"{r['ub_bytes'] // 1024} KiB",
            "Triton, PyTorch" if r["triton"] else "PyTorch",
        ]
        for r in _records("soc")
    ]
    return _rows([list(CHIPS[language]), *body])


def models(language: str) -> str:
    """Return the models of configs/models, at whose sizes kernels are checked."""
    body = [
        [
            f"`{r['name']}`",
            r["rule"],
            f"{r['heads']}, {r['value_heads']}",
            f"{r['key_dim']}, {r['value_dim']}",
            str(r["drafts"]),
        ]
        for r in _records("models")
    ]
    return _rows([list(MODELS[language]), *body])


TABLES = {
    "stacks": stacks,
    "sources": sources,
    "pairs": pairs,
    "faults": faults,
    "hosts": hosts,
    "chips": chips,
    "models": models,
}


def pages() -> dict[Path, str]:
    """Return each page that has such a table, as it should be.

    Raises:
        KeyError: a page asks for a table that is not here.
    """
    wanted = {}
    for language in LANGUAGES:
        for page in sorted((ROOT / "docs" / language).glob("*.md")):
            text = page.read_text(encoding="utf-8")
            if PLACE.search(text):
                wanted[page] = PLACE.sub(lambda m, to=language: f"{m[1]}\n{TABLES[m['name']](to)}\n\n{m[4]}", text)  # type: ignore[misc]
    return wanted


def main() -> None:
    for table in TABLES.values():
        print(table("en") + "\n")
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
