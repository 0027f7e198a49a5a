"""Every environment variable of this package: one entry each, read when asked for and never cached."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class EnvVar:
    """One variable.

    Attributes:
        name: the full name.
        default: the value when unset.
        choices: the values allowed (empty: any text).
        doc: one line for `env` and the documentation page.
    """

    name: str
    default: str
    choices: tuple[str, ...]
    doc: str

    def get(self) -> str:
        """Return the value set or the default.

        Raises:
            ValueError: the value is not one of the choices.
        """
        value = os.environ.get(self.name, "").strip() or self.default
        if self.choices and value not in self.choices:
            raise ValueError(f"{self.name}={value!r} is not supported: set it to one of {', '.join(self.choices)}")
        return value

    def flag(self) -> bool:
        return self.get() == "1"


VENDOR: Final = EnvVar(
    "DLINFER_EXT_VENDOR",
    "",
    ("", "ascend", "cpu"),
    "which vendor serves LMDeploy's device_type='ascend'; unset means ascend if torch_npu is installed, else an error",
)
ROUTE: Final = EnvVar(
    "DLINFER_EXT_ROUTE",
    "auto",
    ("auto", "eager", "triton", "fused", "native", "interpret"),
    "which form of an operator runs; native and interpret run the Triton kernels on CPU tensors",
)
STRICT: Final = EnvVar("DLINFER_EXT_STRICT", "0", ("0", "1"), "1: a route that cannot serve is an error")
CHECK: Final = EnvVar(
    "DLINFER_EXT_CHECK",
    "0",
    ("0", "1"),
    "1: also check slots, histories, acceptance, and that no NaN or infinity enters a state, with host reads",
)
DUMP: Final = EnvVar(
    "DLINFER_EXT_DUMP",
    "",
    (),
    "folder for dumps of what calls find and leave in the state pools, for `explain-state`; reads from the device",
)
DUMP_STEPS: Final = EnvVar(
    "DLINFER_EXT_DUMP_STEPS",
    "0-3",
    (),
    "steps that DLINFER_EXT_DUMP writes, such as 0-3,100 or none; a fault of DLINFER_EXT_CHECK is written in any step",
)
AUTOLOAD: Final = EnvVar("DLINFER_EXT_AUTOLOAD", "1", ("0", "1"), "0: `import torch` registers nothing for LMDeploy")
CPU_DTYPE: Final = EnvVar(
    "DLINFER_EXT_CPU_DTYPE",
    "auto",
    ("auto", "float32"),
    "float32: the CPU vendor runs the whole engine and its state pools in fp32 (LMDeploy itself allows 16-bit only)",
)
CPU_MEMORY: Final = EnvVar(
    "DLINFER_EXT_CPU_MEMORY",
    "2147483648",
    (),
    "bytes that the CPU vendor reports to LMDeploy as device memory",
)

TOOLCHAIN: Final = EnvVar(
    "DLINFER_EXT_TOOLCHAIN",
    "",
    (),
    "folder of the Ascend compiler wheels for `verify` and the routes native and interpret; unset means "
    "share/dlinfer_ext/toolchain of this Python environment",
)

COUNTERS: Final = EnvVar(
    "DLINFER_EXT_COUNTERS",
    "",
    (),
    "folder in which each process that ran a model leaves its counts and its verify steps; reads from the device",
)

ALL: Final = (VENDOR, ROUTE, STRICT, CHECK, DUMP, DUMP_STEPS, AUTOLOAD, CPU_DTYPE, CPU_MEMORY, TOOLCHAIN, COUNTERS)
