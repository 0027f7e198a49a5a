"""What of this machine does not go together, against configs/hosts.json, and what to do about each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from .stacks import Component, Hosts, Stack

State = Literal["fits", "untried", "missing", "wrong"]
CARDS: Final = ("a2", "a3", "a5")
COMPONENTS: Final[tuple[Component, ...]] = get_args(Component)
# Without these LMDeploy does not start on a card; the operators have a form without triton-ascend.
NEEDED_ON_A_CARD: Final = ("lmdeploy", "torch", "torch_npu", "cann", "dlinfer-ascend")
CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Facts:
    """What was found.

    Attributes:
        vendor: that serves, or None.
        machine: "cpu", a chip of configs/soc, or None where the chip is not known.
        versions: of each component, None where it is not installed.
        also: further packages that are installed and matter only by being there ("triton").
    """

    vendor: str | None
    machine: str | None
    versions: dict[Component, str | None]
    also: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Finding:
    """One component.

    Attributes:
        state: "fits": as in the table; "untried": another version than the table's, which may work; "missing":
            something is slower or not checked without it; "wrong": known not to work.
        found: its version, or None.
        wanted: what the table has, or "".
        why: what it means.
        fix: a command, or a variable to set.
        source: where that is written.
    """

    component: str
    state: State
    found: str | None
    wanted: str
    why: str = ""
    fix: str = ""
    source: str = ""

    def line(self) -> str:
        """Return the finding as `env` prints it; the sources stand beside the table."""
        text = f"{self.component} {self.found or 'not found'}: {self.state}"
        if self.state != "fits":
            text += f", wanted {self.wanted}" if self.wanted else ""
            text += f": {self.why}" if self.why else ""
            text += f". Fix: {self.fix}" if self.fix else ""
        return text


def stacks_for(facts: Facts, hosts: Hosts) -> tuple[Stack, ...]:
    """Return the stacks that this machine may be compared with: those of all cards where the chip is not known."""
    if facts.vendor == "cpu" or facts.machine == "cpu":
        wanted: tuple[str, ...] = ("cpu",)
    else:
        wanted = (facts.machine,) if facts.machine else CARDS
    return tuple(s for s in hosts.stacks if s.machine in wanted)


def examine(facts: Facts, hosts: Hosts) -> list[Finding]:
    """Return a finding for each component that this machine should have, and for each pair that does not go together.

    Args:
        facts: what was found.
        hosts: configs/hosts.json.
    """
    stacks = stacks_for(facts, hosts)
    on_card = facts.vendor != "cpu" and facts.machine != "cpu"
    findings = [*_chip(facts, stacks)] if on_card else []
    for component in COMPONENTS:
        wanted = list(dict.fromkeys(w for s in stacks if (w := s.wanted(component))))
        known = _known_fault(facts, hosts, component) if on_card else None
        if known is not None:
            findings.append(known)
        elif wanted:
            findings.append(_compared(component, facts.versions.get(component), wanted, stacks, on_card))
    return [*findings, *(_pairs(facts, hosts) if on_card else ())]


def _chip(facts: Facts, stacks: tuple[Stack, ...]) -> list[Finding]:
    if facts.machine is None:
        return [
            Finding(
                "SoC",
                "missing",
                None,
                "a2, a3 or a5",
                "no card was found, so versions are compared with those of every chip",
                "npu-smi info shows the cards; source /usr/local/Ascend/ascend-toolkit/set_env.sh",
            )
        ]
    if not stacks:
        why = "Triton has no kernels for this chip: the operators run in their batched PyTorch form"
        return [Finding("SoC", "untried", facts.machine, "a2, a3 or a5", why)]
    return [Finding("SoC", "fits", facts.machine, facts.machine)]


def _accepts(specifier: str, version: str) -> bool:
    """Return whether a version satisfies a specifier; one that is no version of PEP 440 satisfies none."""
    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _compared(
    component: Component, found: str | None, wanted: list[str], stacks: tuple[Stack, ...], on_card: bool
) -> Finding:
    text, evidence = " or ".join(wanted), ", ".join(dict.fromkeys(s.evidence for s in stacks))
    sources = " ".join(dict.fromkeys(source for s in stacks for source in s.sources)) if on_card else ""
    if found is None:
        needed = component in (NEEDED_ON_A_CARD if on_card else ("lmdeploy", "torch"))
        why = (
            "LMDeploy does not start without it"
            if needed
            else "operators run in their batched PyTorch form without it"
            if component == "triton-ascend"
            else "answers cannot be compared without it"
        )
        return Finding(
            component, "wrong" if needed else "missing", None, text, why, _fix(component, wanted[0], on_card), sources
        )
    if any(_accepts(w, found) for w in wanted):
        return Finding(component, "fits", found, text)
    why = f"not the version of the table, whose evidence is: {evidence}"
    return Finding(component, "untried", found, text, why, _fix(component, wanted[0], on_card), sources)


def _fix(component: Component, specifier: str, on_card: bool) -> str:
    version = specifier.lstrip("=<>!~").removesuffix(".*")
    if component == "cann":
        return f"install CANN {version}, then source its set_env.sh, which sets ASCEND_HOME_PATH"
    if component == "python":
        return f"an environment of Python {version}: python{version} -m venv .venv"
    if component == "dlinfer-ascend":
        return "python -m dlinfer_ext env --dlinfer PATH checks the sources of a dlinfer before it is installed"
    index = f" --index-url {CPU_INDEX}" if component == "torch" and not on_card else ""
    return f"pip install --no-deps {component.replace('_', '-')}=={version}{index}"


def _known_fault(facts: Facts, hosts: Hosts, component: Component) -> Finding | None:
    version, lmdeploy = facts.versions.get(component), facts.versions.get("lmdeploy")
    if version is None or lmdeploy is None:
        return None
    for fault in hosts.faults:
        if fault.package == component and _accepts(fault.versions, version) and _accepts(fault.lmdeploy, lmdeploy):
            return Finding(component, "wrong", version, f"not {fault.versions}", fault.why, fault.fix, fault.source)
    return None


def _pairs(facts: Facts, hosts: Hosts) -> list[Finding]:
    torch, npu, cann = (facts.versions.get(c) for c in ("torch", "torch_npu", "cann"))
    findings = []
    if torch and npu and _release(torch) != _release(npu):
        base = npu.partition(".post")[0]
        findings.append(
            Finding(
                "torch_npu with torch",
                "wrong",
                f"{npu} with {torch}",
                f"torch=={base}",
                "torch_npu is built for one version of torch and does not import with another",
                f"pip install --no-deps torch=={base}",
                hosts.pairs_source,
            )
        )
    for pair in hosts.pairs if npu and cann else ():
        if npu and cann and _accepts(pair.torch_npu, npu) and not _accepts(pair.cann, cann):
            findings.append(
                Finding(
                    "torch_npu with CANN",
                    "untried",
                    f"{npu} with {cann}",
                    f"CANN {pair.cann}",
                    "this release of torch_npu was built for another CANN",
                    _fix("cann", pair.cann, on_card=True),
                    hosts.pairs_source,
                )
            )
    if "triton" in facts.also and facts.versions.get("triton-ascend"):
        version = facts.versions["triton-ascend"]
        findings.append(
            Finding(
                "triton with triton-ascend",
                "wrong",
                version,
                "triton-ascend alone",
                "both install the module `triton`, and the one installed last wins",
                f"pip uninstall -y triton && pip install --no-deps --force-reinstall triton-ascend=={version}",
            )
        )
    return findings


def _release(version: str) -> tuple[int, ...]:
    try:
        return Version(version).release
    except InvalidVersion:
        return ()
