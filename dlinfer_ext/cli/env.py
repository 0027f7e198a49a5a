"""`env`: what is installed, which vendor and routes serve, and whether LMDeploy still has the seams we need."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
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
    parser.epilog = "Exit code 1: no vendor can serve, a variable has an unknown value, or a seam of LMDeploy changed."


def collect() -> dict[str, Any]:
    """Return the report; "problems" lists what is wrong, each with what to do."""
    problems: list[str] = []
    return {
        "dlinfer_ext": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "variables": _variables(problems),
        "vendor": _vendor(problems),
        "soc": _soc(),
        "autoload": _autoload(problems),
        "routes": _routes(problems),
        "seams": _seams(problems),
        "problems": problems,
    }


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


def run(args: argparse.Namespace) -> int:
    report = collect()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(text(report))
    return 1 if report["problems"] else 0


def text(report: dict[str, Any]) -> str:
    """Return the report as the `key: value` lines that LMDeploy's check_env prints, for a bug report."""
    lines = [f"{key}: {report[key]}" for key in ("dlinfer_ext", "python", "platform")]
    lines += [f"{name}: {version or 'not installed'}" for name, version in report["packages"].items()]
    lines += [f"vendor: {report['vendor'] or 'none'}", f"soc: {report['soc'] or 'none'}"]
    lines.append(f"autoload: {report['autoload']}")
    seams = report["seams"]
    lines.append(f"seams of LMDeploy {seams['lmdeploy'] or '(not installed)'}: {seams['found']} of {seams['of']} found")
    for vendor, rows in report["routes"].items():
        lines += [f"route of {operator} on {vendor}: {serves}" for operator, serves in rows.items()]
    lines += [f"{name}={row['value']}  # {row['doc']}" for name, row in report["variables"].items()]
    lines += [f"problem: {p}" for p in report["problems"]] or ["no problems"]
    return "\n".join(lines)
