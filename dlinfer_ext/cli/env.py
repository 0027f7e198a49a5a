"""`env`: what is installed, which vendor and routes serve, and whether LMDeploy still has the seams we need.

What of all this does not go together is found by doctor.py, and what of a dlinfer does not fit by dlinfer_contract.py.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import envs
from ..version import __version__

PACKAGES = (
    "torch",
    "torch_npu",
    "triton",
    "triton-ascend",
    "lmdeploy",
    "dlinfer-ascend",
    "transformers",
    "wrapt",
    "ray",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--doctor", action="store_true", help="only what goes together and what does not, with the fix and its source"
    )
    parser.add_argument(
        "--dlinfer",
        type=Path,
        metavar="PATH",
        help="check the sources of this dlinfer (a checkout, a site-packages or an unpacked wheel) against what "
        "LMDeploy and this package call and expect; nothing of it is imported. Default: dlinfer-ascend, if installed",
    )
    parser.epilog = (
        "Exit code 1: no vendor can serve, versions that are known not to work together are installed, a variable has "
        "an unknown value, a seam of LMDeploy changed, or the dlinfer of --dlinfer does not fit. 2: no dlinfer in PATH."
    )


def collect(dlinfer: Path | None = None) -> dict[str, Any]:
    """Return the report; "problems" lists what is wrong, each with what to do.

    Args:
        dlinfer: folder of a dlinfer to check; None takes the installed one.

    Raises:
        FileNotFoundError: no dlinfer in that folder.
    """
    problems: list[str] = []
    report = {
        "dlinfer_ext": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "variables": _variables(problems),
        "vendor": _vendor(problems),
        "soc": _soc(),
        "cann": _cann(),
        "autoload": _autoload(problems),
        "routes": _routes(problems),
        "seams": _seams(problems),
    }
    report["doctor"] = _doctor(report, problems)
    report["dlinfer"] = _dlinfer(dlinfer, str(report["vendor"]), problems)
    return report | {"problems": problems}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _variables(problems: list[str]) -> dict[str, dict[str, str]]:
    rows = {}
    for var in envs.ALL:
        try:
            value = var.get()
        except ValueError as error:
            problems.append(str(error))
            value = os.environ[var.name]
        rows[var.name] = {"value": value, "doc": var.doc}
    return rows


def _vendor(problems: list[str]) -> str | None:
    from ..framework.lmdeploy.patches import resolve_vendor

    try:
        return resolve_vendor()
    except ValueError:
        return None  # an unknown value, reported with the variables
    except RuntimeError as error:
        problems.append(str(error))
        return None


def _soc() -> str | None:
    """Return the card's name, or None without torch_npu: nothing is imported for it."""
    if importlib.util.find_spec("torch_npu") is None:
        return None
    import torch

    npu = getattr(torch, "npu", None)
    return str(npu.get_device_name()) if npu is not None and npu.is_available() else None


def _autoload(problems: list[str]) -> str:
    if not envs.AUTOLOAD.flag():
        return "off (DLINFER_EXT_AUTOLOAD=0)"
    names = [e.value for e in importlib.metadata.entry_points(group="torch.backends") if e.name == "dlinfer_ext"]
    if not names:
        problems.append("the entry point `torch.backends` is not installed: run `pip install -e .`")
        return "not installed"
    return names[0]


def _routes(problems: list[str]) -> dict[str, dict[str, str]]:
    from .ops import serving

    table: dict[str, dict[str, str]] = {}
    for vendor in ("ascend", "cpu"):
        table[vendor] = {}
        for row in serving(vendor):
            table[vendor][row.operator] = row.serves
            if not row.able:
                problems.append(f"{row.operator} on {vendor}: {row.serves}")
    return table


def _seams(problems: list[str]) -> dict[str, Any]:
    from ..framework.lmdeploy import contract

    version = contract.host_version()
    if version is None:
        return {"lmdeploy": None, "found": 0, "of": len(contract.SEAMS)}
    wrong = contract.mismatches()
    problems.extend(f"LMDeploy {version}: {why} ({seam.hook}: {seam.why})" for seam, why in wrong)
    known = version in contract.known_hosts()["lmdeploy"]
    return {"lmdeploy": version, "tried": known, "found": len(contract.SEAMS) - len(wrong), "of": len(contract.SEAMS)}


def _cann() -> dict[str, str | None] | None:
    from . import cann

    found = cann.find()
    return asdict(found) if found is not None else None


def _doctor(report: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    try:
        from .doctor import Facts, examine, stacks_for
        from .stacks import load
    except ModuleNotFoundError as error:  # both come with LMDeploy, and this package does not ask for them itself
        problems.append(f"{error.name} is not installed, so versions were not compared: pip install packaging pydantic")
        return {"machine": None, "stacks": [], "findings": [], "lines": []}
    packages, cann = report["packages"], report["cann"]
    facts = Facts(
        vendor=report["vendor"],
        machine=_machine(report["vendor"], report["soc"], problems),
        versions={
            "lmdeploy": packages["lmdeploy"],
            "python": report["python"],
            "torch": packages["torch"],
            "transformers": packages["transformers"],
            "torch_npu": packages["torch_npu"],
            "triton-ascend": packages["triton-ascend"],
            # A toolkit whose version cannot be told is there all the same.
            "cann": (cann["version"] or "unknown") if cann and Path(cann["folder"]).is_dir() else None,
            "dlinfer-ascend": packages["dlinfer-ascend"],
        },
        also=frozenset(name for name in ("triton",) if packages[name]),
    )
    findings = examine(facts, load())
    # Where no vendor is chosen, that is the problem; a table for a machine that nobody asked for adds none.
    if report["vendor"] is not None:
        problems.extend(f.line() for f in findings if f.state == "wrong")
    return {
        "machine": facts.machine,
        "stacks": [s.model_dump(by_alias=True) for s in stacks_for(facts, load())],
        "findings": [asdict(f) for f in findings],
        "lines": [f.line() for f in findings],
    }


def _machine(vendor: str | None, soc: str | None, problems: list[str]) -> str | None:
    """Return the row of the table: "cpu", a chip, or None for a card that is not there or not known."""
    if vendor == "cpu" or (vendor is None and _version("torch_npu") is None):
        return "cpu"
    if soc is None:
        return None
    from ..targets import soc_of_device

    try:
        return soc_of_device(soc)
    except ValueError as error:
        problems.append(str(error))
        return None


def _dlinfer(path: Path | None, vendor: str, problems: list[str]) -> dict[str, Any] | None:
    """Check the dlinfer of a folder, or the installed one; None: there is none to check."""
    from ..framework.lmdeploy import contract
    from . import dlinfer_contract
    from .sources import Tree

    installed = _version("dlinfer-ascend")
    if path is None and installed is None:
        return None
    try:
        place = path or Path(str(importlib.metadata.distribution("dlinfer-ascend").locate_file("")))
        tree = dlinfer_contract.open_tree(place)
    except FileNotFoundError as error:
        if path is not None:
            raise
        problems.append(f"dlinfer-ascend {installed} is installed without its files: {error}")
        return None
    host = Tree(contract.host_root()) if contract.host_version() is not None else None
    found = dlinfer_contract.differences(tree, host)
    version = (dlinfer_contract.version(tree) if path else installed) or "of unknown version"
    if path is not None or vendor == "ascend":
        # Of a dlinfer that was asked about, an argument whose meaning may have changed is a problem too.
        wrong = [d for d in found if d.fault or (path is not None and d.kind == "renamed")]
        problems.extend(f"dlinfer {version}: {d.name} ({d.where}): {d.why}" for d in wrong)
    return {
        "path": str(tree.root / "dlinfer"),
        "version": version,
        "lmdeploy": contract.host_version(),
        "checked": len(dlinfer_contract.NEEDS),
        "differences": [asdict(d) for d in found],
    }


def run(args: argparse.Namespace) -> int:
    try:
        report = collect(args.dlinfer)
    except FileNotFoundError as error:
        print(f"env: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(doctor_text(report) if args.doctor else text(report))
    return 1 if report["problems"] else 0


def doctor_text(report: dict[str, Any]) -> str:
    """Return what goes together and what does not, one line each."""
    doctor, dlinfer = report["doctor"], report["dlinfer"]
    lines = []
    for stack in doctor["stacks"]:
        lines.append(f"table of {stack['machine']}: {stack['evidence']}; {stack['note']}")
        lines += [f"  source: {source}" for source in stack["sources"]]
    lines += [f"doctor: {line}" for line in doctor["lines"]]
    if dlinfer is not None:
        lines.append(f"dlinfer {dlinfer['version']} in {dlinfer['path']}: {_count(dlinfer)}")
        lines += [
            f"  {d['kind'] if d['fault'] else d['kind'] + ', to be looked at'}: {d['name']} ({d['where']}): {d['why']}"
            for d in dlinfer["differences"]
        ]
    # Those of the doctor and of dlinfer stand above.
    return "\n".join(lines + _problems(report, [*doctor["lines"], *_dlinfer_lines(dlinfer)]))


def _count(dlinfer: dict[str, Any]) -> str:
    different = len(dlinfer["differences"])
    return f"{dlinfer['checked']} calls checked, {different or 'no'} difference{'s' * (different != 1)}"


def _dlinfer_lines(dlinfer: dict[str, Any] | None) -> list[str]:
    if dlinfer is None:
        return []
    return [f"dlinfer {dlinfer['version']}: {d['name']} ({d['where']}): {d['why']}" for d in dlinfer["differences"]]


def _problems(report: dict[str, Any], said: list[str]) -> list[str]:
    if not report["problems"]:
        return ["no problems"]
    return [*(f"problem: {p}" for p in report["problems"] if p not in said), f"{len(report['problems'])} problems"]


def text(report: dict[str, Any]) -> str:
    """Return the report as the `key: value` lines that LMDeploy's check_env prints, for a bug report."""
    lines = [f"{key}: {report[key]}" for key in ("dlinfer_ext", "python", "platform")]
    lines += [f"{name}: {version or 'not installed'}" for name, version in report["packages"].items()]
    cann = report["cann"]
    lines += [f"vendor: {report['vendor'] or 'none'}", f"soc: {report['soc'] or 'none'}"]
    lines.append(f"cann: {(cann['version'] or 'of unknown version') + ' in ' + cann['folder'] if cann else 'none'}")
    lines.append(f"autoload: {report['autoload']}")
    seams = report["seams"]
    lines.append(f"seams of LMDeploy {seams['lmdeploy'] or '(not installed)'}: {seams['found']} of {seams['of']} found")
    for vendor, rows in report["routes"].items():
        lines += [f"route of {operator} on {vendor}: {serves}" for operator, serves in rows.items()]
    lines += [f"{name}={row['value']}  # {row['doc']}" for name, row in report["variables"].items()]
    findings = report["doctor"]["findings"]
    fits = [f["component"] for f in findings if f["state"] == "fits"]
    lines.append(f"doctor ({report['doctor']['machine'] or 'no card'}): {', '.join(fits) or 'nothing'} as in the table")
    lines += [
        f"doctor: {line}"
        for line, f in zip(report["doctor"]["lines"], findings, strict=True)
        if f["state"] in ("untried", "missing")
    ]
    if report["dlinfer"] is not None:
        lines.append(f"dlinfer {report['dlinfer']['version']}: {_count(report['dlinfer'])}")
    lines += [f"problem: {p}" for p in report["problems"]] or ["no problems"]
    return "\n".join(lines)
