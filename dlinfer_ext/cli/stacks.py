"""configs/hosts.json as typed records: which versions go together on which machine, and how that is known."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Annotated, Final, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Component = Literal[
    "lmdeploy", "python", "torch", "transformers", "torch_npu", "triton-ascend", "cann", "dlinfer-ascend"
]


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError(f"{text!r} is no version specifier: write one such as '==2.9.0' or '>=3.10,<3.12'") from error
    return text


Specifier = Annotated[str, AfterValidator(_specifier)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Host(_Record):
    """A version of LMDeploy that was tried: with what, and how each model was checked."""

    torch: str
    transformers: str
    python: str
    qwen3_5: str
    qwen3_5_moe: str
    qwen3_next: str
    glm5_next: str
    ascend: str


class Stack(_Record):
    """What goes together on one kind of machine; None: not needed on a CPU, not known on a card."""

    machine: Literal["cpu", "a2", "a3", "a5"]
    lmdeploy: Specifier
    python: Specifier
    torch: Specifier | None
    transformers: Specifier
    torch_npu: Specifier | None
    triton_ascend: Specifier | None = Field(alias="triton-ascend")
    cann: Specifier | None
    dlinfer_ascend: Specifier | None = Field(alias="dlinfer-ascend")
    evidence: Literal["run natively on CPU", "not run on NPU", "run on NPU"]
    note: str
    sources: tuple[str, ...]

    def wanted(self, component: Component) -> str | None:
        """Return the specifier of a component, or None."""
        value: str | None = getattr(self, component.replace("-", "_"))
        return value


class Pair(_Record):
    """A release of torch_npu with the torch and the CANN that it was built for."""

    torch_npu: Specifier
    torch: Specifier
    cann: Specifier


class Fault(_Record):
    """Versions of a package that are known not to work with versions of LMDeploy."""

    package: Component
    versions: Specifier
    lmdeploy: Specifier
    why: str
    fix: str
    source: str


class Hosts(_Record):
    """The whole file."""

    lmdeploy: dict[str, Host]
    stacks: tuple[Stack, ...]
    pairs: tuple[Pair, ...]
    pairs_source: str
    faults: tuple[Fault, ...]


FILE: Final = "hosts.json"


def parse(text: str) -> Hosts:
    """Return the records of a hosts.json.

    Raises:
        pydantic.ValidationError: an unknown key, a missing one, or a version that is no PEP 440 specifier.
    """
    return Hosts.model_validate_json(text)


@cache
def load() -> Hosts:
    """Return the records of configs/hosts.json."""
    return parse((files("dlinfer_ext.configs") / FILE).read_text(encoding="utf-8"))
