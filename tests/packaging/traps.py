"""A model folder with everything in it that could run, and a process that writes down what it reaches for."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import torch

ROOT: Final = Path(__file__).resolve().parents[2]
TRAINED: Final = ROOT / "examples/checkpoints/tiny_qwen3_5"
GUARD: Final = Path(__file__).parent / "guarded"
# What a template of a careless engine would run: by way of a class, and by way of a helper's globals.
TEMPLATE: Final = (
    "{{% for c in ''.__class__.__mro__[1].__subclasses__() %}}{{% if c.__name__ == 'Popen' %}}"
    "{{{{ c(['touch', '{0}']) }}}}{{% endif %}}{{% endfor %}}"
    "{{{{ cycler.__init__.__globals__.os.system('touch {0}') }}}}"
)


class Trap:
    """Writes a file as it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.canary), "w")


@dataclass
class Trapped:
    """A copy of the trained tiny model.

    Attributes:
        folder: of the model.
        canary: a file that is there once anything of the folder has run.
    """

    folder: Path
    canary: Path

    @classmethod
    def make(cls, place: Path) -> Trapped:
        shutil.copytree(TRAINED, place / "model")
        return cls(place / "model", place / "canary")

    def change(self, file: str, change: Callable[[dict[str, Any]], Any]) -> Trapped:
        data = json.loads((self.folder / file).read_text(encoding="utf-8"))
        self.write(file, json.dumps(change(data) or data))
        return self

    def write(self, file: str, text: str) -> Trapped:
        (self.folder / file).write_text(text, encoding="utf-8")
        return self

    def add_pickles(self) -> Trapped:
        """Put a pickle beside the weights under every name that a loader looks for."""
        state = {"model.embed_tokens.weight": Trap(self.canary)}
        torch.save(state, self.folder / "pytorch_model.bin")
        (self.folder / "consolidated.00.pth").write_bytes(pickle.dumps(state))
        (self.folder / "training_args.bin").write_bytes(pickle.dumps(state))
        return self

    def add_code(self) -> Trapped:
        """Name Python files of the folder in every config, and put some where an import could find them."""
        code = f"open({str(self.canary)!r}, 'w').close()\nclass Trap:\n    pass\n"
        for name in ("configuration_trap", "modeling_trap", "tokenization_trap", "json", "conftest", "sitecustomize"):
            self.write(f"{name}.py", code)
        kinds = ("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText")
        self.change(
            "config.json",
            # LMDeploy looks the class's name up among its own models.
            lambda c: c.update(
                auto_map={"AutoConfig": "configuration_trap.Trap"}
                | dict.fromkeys(kinds, f"modeling_trap.{c['architectures'][0]}")
            ),
        )
        self.change(
            "tokenizer_config.json", lambda c: c.update(auto_map={"AutoTokenizer": ["tokenization_trap.Trap", None]})
        )
        return self

    def add_template(self) -> Trapped:
        template = TEMPLATE.format(self.canary)
        self.write("chat_template.jinja", template)
        return self.change("tokenizer_config.json", lambda c: c.update(chat_template=template))

    def all(self) -> Trapped:
        return self.add_pickles().add_code().add_template()


@dataclass
class Ended:
    """A process that has ended.

    Attributes:
        events: what the guard wrote down, of it and of its children.
        listening: addresses that it or a child listened on.
    """

    code: int
    out: str
    err: str
    events: list[dict[str, Any]]
    listening: set[str] = field(default_factory=set)

    def reached(self, *kinds: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"].startswith(kinds)]

    @property
    def processes(self) -> int:
        return len({e["pid"] for e in self.events if e["event"] == "guarded"})


def guarded(
    line: list[str],
    place: Path,
    folder: Path | None = None,
    until: Callable[[str], bool] | None = None,
    timeout_s: float = 240,
) -> Ended:
    """Run a command under the guard, online as far as its settings go, and watch what it listens on.

    Args:
        line: the arguments of the interpreter.
        place: an empty folder of the test's.
        folder: files of which no code may be executed.
        until: ends the process with SIGINT once its output satisfies this.
        timeout_s: after which it is killed, with an AssertionError.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_", "DLINFER_EXT_"))}
    environment |= {
        "PYTHONPATH": str(GUARD),
        "GUARD_LOG": str(place / "guard.log"),
        "GUARD_FOLDERS": os.pathsep.join(map(str, (*([folder] if folder else []), place / "hf"))),
        "HF_HOME": str(place / "hf"),  # where code of a folder would be copied to and imported from
        "OMP_NUM_THREADS": "1",
        "DLINFER_EXT_VENDOR": "cpu",
    }
    out, err = place / "stdout", place / "stderr"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = psutil.Popen(
            [sys.executable, *line], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
        )
        listening: set[str] = set()
        deadline, asked_to_end = time.monotonic() + timeout_s, False
        while process.poll() is None:
            listening |= _listening(process)
            if until is not None and not asked_to_end and until(out.read_text()):
                listening |= _listening(process)
                process.send_signal(2)
                asked_to_end = True
            if time.monotonic() > deadline:
                for child in (*process.children(recursive=True), process):
                    child.kill()
                raise AssertionError(f"{line} did not end:\n{out.read_text()[-2000:]}\n{err.read_text()[-4000:]}")
            time.sleep(0.2)
    log = place / "guard.log"
    events = [json.loads(row) for row in log.read_text().splitlines()] if log.is_file() else []
    return Ended(process.returncode, out.read_text(), err.read_text(), events, listening)


def _listening(process: psutil.Process) -> set[str]:
    found: set[str] = set()
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return found
    for one in family:
        try:
            found |= {c.laddr.ip for c in one.net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue
    return found
