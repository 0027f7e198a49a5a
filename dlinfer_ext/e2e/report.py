"""Reports of scenario runs: JSON, Markdown, and pictures where matplotlib is installed."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..version import __version__
from . import soak
from .results import ScenarioReport
from .target import Target

PACKAGES: Final = ("lmdeploy", "transformers", "torch", "torch_npu", "dlinfer-ascend", "triton-ascend")
RULES: Final = {
    "identity": "tokens identical (fp32)",
    "divergence": "logits up to the first divergence, near ties only (16-bit)",
    "law": "law of the sampled tokens (chi-square)",
}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def command_line(args: argparse.Namespace) -> str:
    """Return the command that made a report, without paths of this machine."""
    parts = ["python -m dlinfer_ext e2e"]
    parts += [f"--config {Path(name).name}" for name in args.config or ()]
    parts += [f"--model {args.model.name if args.model.is_absolute() else args.model}", f"--vendor {args.vendor}"]
    if args.reference:
        parts.append(f"--reference {args.reference}")
    if args.vendor != "cpu":
        parts.append(f"--dtype {args.dtype}")
    return " ".join(parts)


def summary(
    reports: Sequence[ScenarioReport], skipped: Mapping[str, str], target: Target, command: str
) -> dict[str, Any]:
    """Return everything about a run as one JSON object."""
    return {
        "command": command,
        "model": target.model.name,
        "vendor": target.vendor,
        "card": target.vendor == "ascend",
        "reference": target.reference,
        "versions": {"dlinfer_ext": __version__, "python": platform.python_version()}
        | {p: v for p in PACKAGES if (v := _version(p))},
        "holds": bool(reports) and not any(r.failures for r in reports),
        "scenarios": [r.as_dict() for r in reports],
        "skipped": dict(skipped),
    }


def _reach(run: Mapping[str, Any]) -> str:
    measured = run["acceptance"]
    return " ".join(f"{r:.3f}" for r in measured["reach"]) if measured else "–"


def _contexts(run: Mapping[str, Any]) -> str:
    measured = run["acceptance"] or {"mean_by_context": {}, "steps_by_context": {}}
    kinds = ((name, mean, measured["steps_by_context"][name]) for name, mean in measured["mean_by_context"].items())
    return ", ".join(f"{name} {mean:.2f} ({rows})" for name, mean, rows in kinds) or "–"


def _per_step(run: Mapping[str, Any]) -> str:
    return f"{run['acceptance']['tokens_per_step']:.2f}" if run["acceptance"] else "1.00"


def _per_engine_step(run: Mapping[str, Any]) -> str:
    return f"{run['tokens_per_step']:.2f}" if run["tokens_per_step"] else "–"


def _parts(run: Mapping[str, Any]) -> str:
    """Where a run's tokens first differ from the reference's."""
    places = [p for rule in run["rules"] for p in (rule.get("first_difference") or {}).values()]
    if not places:
        return "–"
    gaps = [p["gap"] for p in places if isinstance(p, dict)]
    first = min(p["at"] if isinstance(p, dict) else p for p in places)
    return f"{first}" + (f" (gap ≤ {max(gaps):.3f})" if gaps else "")


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    where = "a card (NPU)" if report["card"] else "a CPU; no card was used"
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    lines = [
        "# End-to-end report",
        "",
        f"Run on {where}. `{report['command']}`",
        "",
        f"Model {report['model']}, compared with {report['reference']}. {versions}.",
        "",
        "| scenario | holds | rule | seconds | what |",
        "|---|---|---|---|---|",
    ]
    for s in report["scenarios"]:
        rules = sorted({RULES[rule["rule"]] for run in s["runs"] for rule in run["rules"]})
        lines.append(
            f"| {s['name']} | {'yes' if s['holds'] else '**no**'} | {'; '.join(rules) or 'how it ends'} | "
            f"{s['seconds']} | {s['what']} |"
        )
    lines += [f"| {name} | not run | – | – | {why} |" for name, why in report["skipped"].items()]
    lines += [
        "",
        "| scenario | run | executor | accepted by position | mean by context (verify rows) | tokens per verify row "
        "| tokens per engine step | tokens/s | first divergence |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s['name']} | {run['label']} | {run['executor']} | {_reach(run)} | {_contexts(run)} | {_per_step(run)} | "
        f"{_per_engine_step(run)} | {run['tokens_per_second']} | {_parts(run)} |"
        for s in report["scenarios"]
        for run in s["runs"]
    ]
    wrong = [
        f"- {s['name']}, {run['label']}: {failure}"
        for s in report["scenarios"]
        for run in s["runs"]
        for failure in run["failures"]
    ] + [f"- {s['name']}: {s['error']}" for s in report["scenarios"] if s["error"]]
    if wrong:
        lines += ["", "## What does not hold", "", *wrong]
    return "\n".join(lines) + "\n"


def text(report: Mapping[str, Any]) -> str:
    """Return a few lines for a terminal."""
    lines = [
        f"{'holds' if s['holds'] else 'FAILS':6} {s['name']:22} {s['seconds']:6.1f} s  {s['what']}"
        for s in report["scenarios"]
    ]
    for s in report["scenarios"]:
        lines += [f"  {s['name']}, {run['label']}: {f}" for run in s["runs"] for f in run["failures"]]
        lines += [f"  {s['name']}: {s['error']}"] if s["error"] else []
        for run in s["runs"]:
            lines += [f"  {s['name']}, {run['label']}: {line}" for line in soak.table(run["soak"] or {})]
    lines += [f"skipped {name}: {why}" for name, why in report["skipped"].items()]
    held = sum(s["holds"] for s in report["scenarios"])
    return "\n".join([*lines, f"{held} of {len(report['scenarios'])} scenarios hold"])


def write(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write report.json, report.md and, where matplotlib is installed, the plots; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "report.json", folder / "report.md"]
    files[0].write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    body = markdown(report)
    plots = _plots(report, folder)
    if plots:
        body += "\n" + "\n".join(f"![{p.stem}]({p.name})" for p in plots) + "\n"
    files[1].write_text(body, encoding="utf-8")
    return [*files, *plots]


def write_records(reports: Sequence[ScenarioReport], folder: Path) -> list[Path]:
    """Write what every process of every run counted and accepted, one file per run: records/SCENARIO-NUMBER.json."""
    records = folder / "records"
    records.mkdir(parents=True, exist_ok=True)
    files = []
    for one in reports:
        for number, run in enumerate(one.runs):
            files.append(records / f"{one.name}-{number}.json")
            files[-1].write_text(json.dumps({"label": run.label, "processes": run.records}), encoding="utf-8")
    return files


def _plots(report: Mapping[str, Any], folder: Path) -> list[Path]:
    if importlib.util.find_spec("matplotlib") is None:  # requirements/report.txt
        return []
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = [(s["name"], run) for s in report["scenarios"] for run in s["runs"]]
    drafted = [(f"{name}, {run['label']}", run) for name, run in runs if run["acceptance"]]
    files = []

    def save(figure: Any, name: str) -> None:
        files.append(folder / f"{name}.png")
        FigureCanvasAgg(figure).print_png(str(files[-1]))

    if drafted:
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()
        for label, run in drafted:
            reach = run["acceptance"]["reach"]
            axes.plot(range(1, len(reach) + 1), reach, marker="o", linewidth=1, label=label)
        axes.set(xlabel="draft position", ylabel="share of verify rows that accept it", ylim=(0, 1))
        axes.legend(fontsize=6, ncols=2)
        save(figure, "acceptance")
    names = [f"{name}, {run['label']}" for name, run in runs]
    if names:
        for file, title, values in (
            ("tokens_per_second", "tokens/s", [run["tokens_per_second"] for _, run in runs]),
            ("first_divergence", "first token that differs (none: 0)", [_first(run) for _, run in runs]),
        ):
            figure = Figure(figsize=(9, 1 + 0.25 * len(names)), layout="constrained")
            axes = figure.subplots()
            axes.barh(range(len(names)), values)
            axes.set_yticks(range(len(names)), names, fontsize=6)
            axes.invert_yaxis()
            axes.set_xlabel(title)
            save(figure, file)
    return files


def _first(run: Mapping[str, Any]) -> int:
    places = [p for rule in run["rules"] for p in (rule.get("first_difference") or {}).values()]
    return min((p["at"] if isinstance(p, dict) else p for p in places), default=0)
