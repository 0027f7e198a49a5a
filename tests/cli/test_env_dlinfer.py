"""`env --dlinfer`: a dlinfer's sources against what LMDeploy and this package call and expect, nothing imported."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from dlinfer_ext.cli import dlinfer_contract
from dlinfer_ext.cli.dlinfer_contract import NEEDS, OPS, Difference, differences, open_tree
from dlinfer_ext.cli.main import main
from dlinfer_ext.cli.sources import Call, Tree, signature
from dlinfer_ext.framework.lmdeploy import contract

EXTENSION: Final = "dlinfer/framework/lmdeploy_ext"
ASCEND: Final = "dlinfer/vendor/ascend"


def definition(call: str) -> str:
    """Return a function that a call of NEEDS fits, with every keyword as a parameter."""
    name = call.partition("(")[0]
    wanted = Call.of(call)
    parameters = [sorted(names)[0] for names in wanted.positional] + [f"{k}=None" for k in sorted(wanted.keywords)]
    return f"def {name}({', '.join(parameters)}):\n    return None\n"


def operator(call: str) -> str:
    """Return an operator that hands on what it is given to the vendor's registered function."""
    name = call.partition("(")[0]
    text = definition(call).replace("=None", "")
    parameters = text[text.index("(") + 1 : text.index(")")]
    defaults = dict.fromkeys(Call.of(call).keywords)
    return (
        f'@register_custom_op("dlinfer::{name}", default_value={defaults!r})\n'
        f'def {name}({parameters}):\n    return vendor_ops_registry["{name}"]({parameters})\n'
    )


def sources() -> dict[str, str]:
    """Return a small dlinfer that fits: file name → text."""
    files = {
        "dlinfer/__init__.py": 'raise RuntimeError("imported")\n__version__ = "9.9.9"\n',
        "dlinfer/ops/__init__.py": "from .llm import *\n",
        "dlinfer/ops/llm.py": "",
        "dlinfer/vendor/__init__.py": 'with open("vendor.yaml") as f:\n    vendor_name = f.read()\n',
        f"{ASCEND}/__init__.py": "",
        f"{ASCEND}/torch_npu_ops.py": "from dlinfer.utils.registry import register_ops\n",
        f"{EXTENSION}/__init__.py": "from . import device\n",
        f"{EXTENSION}/device/__init__.py": "",
    }
    for need in NEEDS:
        if need.module == OPS:
            files["dlinfer/ops/llm.py"] += operator(need.call)
            files[f"{ASCEND}/torch_npu_ops.py"] += "@register_ops(registry)\n" + definition(need.call)
        elif need.call and need.call != "vendor_name":
            file = need.module.replace(".", "/") + ".py"
            text = definition(need.call) if "(" in need.call else f"class {need.call}:\n    pass\n"
            files[file] = files.get(file, "") + text
    return files


@dataclass
class Small:
    """A small dlinfer on disk."""

    root: Path

    def write(self, files: dict[str, str]) -> Small:
        for name, text in files.items():
            file = self.root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return self

    def change(self, name: str, old: str, new: str) -> Small:
        text = (self.root / name).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}"
        (self.root / name).write_text(text.replace(old, new), encoding="utf-8")
        return self

    def found(self, *, host: bool = False) -> list[Difference]:
        return differences(open_tree(self.root), Tree(contract.host_root()) if host else None)


@pytest.fixture
def small(tmp_path: Path) -> Small:
    return Small(tmp_path / "checkout").write(sources())


def only(found: list[Difference]) -> Difference:
    (one,) = found
    return one


def test_a_dlinfer_that_fits_has_no_difference(small: Small) -> None:
    assert small.found(host=True) == []
    assert dlinfer_contract.version(open_tree(small.root)) == "9.9.9"


@pytest.mark.parametrize("place", [".", "dlinfer"])
def test_a_checkout_and_the_package_itself_are_taken(small: Small, place: str) -> None:
    assert differences(open_tree(small.root / place)) == []


def test_a_source_layout_below_src_is_taken(tmp_path: Path) -> None:
    Small(tmp_path / "src").write(sources())
    assert differences(open_tree(tmp_path)) == []


def test_a_keyword_that_is_gone_is_named(small: Small) -> None:
    """The difference that every dlinfer release up to 0.2.8 has from LMDeploy 0.18."""
    file = f"{EXTENSION}/cudagraph/ascend_cudagraph.py"
    one = only(small.change(file, ", is_mla=None", "").found())
    assert (one.kind, one.fault) == ("call", True)
    assert one.name.endswith("ascend_cudagraph.AscendGraphRunner")
    assert one.where == f"{file}:1"
    assert "takes no argument 'is_mla'" in one.why


def test_the_init_of_a_class_is_what_is_called(small: Small) -> None:
    file = f"{EXTENSION}/cudagraph/ascend_cudagraph.py"
    (small.root / file).write_text(
        "class AscendGraphRunner(Base):\n"
        "    def __init__(self, model, model_config, cache_config, backend_config, device, is_mla=False):\n"
        "        pass\n\n\ndef get_ascend_compatible_size(n):\n    return n\n",
        encoding="utf-8",
    )
    assert small.found() == []
    assert "takes no argument 'is_mla'" in only(small.change(file, ", is_mla=False", "").found()).why


def test_a_renamed_argument_given_by_place_is_named(small: Small) -> None:
    (small.root / "dlinfer/ops/llm.py").write_text(
        (small.root / "dlinfer/ops/llm.py").read_text().replace("epsilon", "eps"), encoding="utf-8"
    )
    one, two = small.found()
    assert {one.name, two.name} == {f"{OPS}.rms_norm", f"{OPS}.add_rms_norm"}
    assert (one.kind, one.fault) == ("renamed", False)
    assert "argument 3 is 'eps', wanted 'epsilon'" in one.why


def test_a_new_argument_that_must_be_given_is_named(small: Small) -> None:
    found = small.change("dlinfer/ops/llm.py", "def silu_and_mul(input_tensor)", "def silu_and_mul(input_tensor, dim)")
    one = only(found.found())
    assert one.kind == "call"
    assert "missing a required argument: 'dim'" in one.why
    # With a default, by the signature or by the decorator, it may be there.
    small.change("dlinfer/ops/llm.py", '"dlinfer::silu_and_mul", default_value={}',
                 '"dlinfer::silu_and_mul", default_value={"dim": -1}')  # fmt: skip
    assert small.found() == []


def test_a_missing_function_is_named(small: Small) -> None:
    small.change("dlinfer/ops/llm.py", "def fused_moe(", "def fused_experts(")
    one = only(small.found())
    assert (one.name, one.why.partition(" (")[0]) == (f"{OPS}.fused_moe", "there is no fused_moe")


def test_a_missing_module_is_named_once_for_each_thing_in_it(small: Small) -> None:
    (small.root / f"{ASCEND}/version.py").unlink()
    one = only(small.found())
    assert one.where == "dlinfer.vendor.ascend.version"
    assert "this module does not exist" in one.why


@pytest.mark.parametrize(
    "imports",
    [
        "from ..kernels.all import *\n",
        "from dlinfer.kernels.all import *\n",
        "from ..kernels import all as everything\nfrom ..kernels.all import *\n",
    ],
    ids=["relative", "absolute", "both"],
)
def test_another_layout_with_the_same_names_fits(small: Small, imports: str) -> None:
    text = (small.root / "dlinfer/ops/llm.py").read_text()
    (small.root / "dlinfer/ops/llm.py").unlink()
    small.write({"dlinfer/kernels/__init__.py": "", "dlinfer/kernels/all.py": text, "dlinfer/ops/__init__.py": imports})
    assert small.found() == []


def test_names_that_are_given_one_by_one_are_followed(small: Small) -> None:
    names = [n.name for n in NEEDS if n.module == OPS]
    small.write({"dlinfer/ops/__init__.py": f"from .llm import {', '.join(names)}\n"})
    assert small.found() == []
    small.write({"dlinfer/ops/__init__.py": f"from .llm import {', '.join(names[1:])}\n"})
    assert only(small.found()).name == f"{OPS}.{names[0]}"


def test_stars_in_a_circle_end(small: Small) -> None:
    small.write({"dlinfer/ops/llm.py": "from . import *\n"})
    assert {d.name for d in small.found()} == {f"{OPS}.{n.name}" for n in NEEDS if n.module == OPS}


def test_a_file_that_is_no_python_is_named_with_its_line(small: Small) -> None:
    small.write({"dlinfer/ops/llm.py": "import torch\n\ndef rms_norm(:\n"})
    found = small.found()
    assert {d.name for d in found} == {f"{OPS}.{n.name}" for n in NEEDS if n.module == OPS}
    assert {d.where for d in found} == {"dlinfer/ops/llm.py:3"}
    assert all("cannot be parsed" in d.why for d in found)


def test_an_operator_without_its_implementation_is_named(small: Small) -> None:
    text = (small.root / f"{ASCEND}/torch_npu_ops.py").read_text()
    removed = text.replace("@register_ops(registry)\ndef linear(", "def linear(")
    small.write({f"{ASCEND}/torch_npu_ops.py": removed})
    one = only(small.found())
    assert (one.kind, one.name) == ("registration", f"{OPS}.linear")
    assert "registers 'linear'" in one.why


def test_an_implementation_that_takes_less_than_it_is_given_is_named(small: Small) -> None:
    small.change(f"{ASCEND}/torch_npu_ops.py", "def silu_and_mul(input_tensor)", "def silu_and_mul()")
    one = only(small.found())
    assert (one.kind, one.name) == ("registration", "dlinfer.vendor.ascend silu_and_mul")
    assert "too many positional arguments" in one.why


@pytest.mark.parametrize(
    ("text", "kind", "name", "says", "fault"),
    [
        ("from lmdeploy.pytorch.nothing import x\n", "import", "lmdeploy.pytorch.nothing", "no such module", True),
        ("from lmdeploy.pytorch.config import Nothing\n", "import", "lmdeploy.pytorch.config.Nothing", "fails", True),
        (
            "if chip() == '310P':\n    from lmdeploy.pytorch.config import Nothing\n",
            "import", "lmdeploy.pytorch.config.Nothing", "where chip() == '310P'", False,
        ),
        (
            "def patch():\n    from lmdeploy.pytorch.models.qwen3_5 import Qwen3_5GatedDeltaNet\n"
            "    def forward(self, hidden_states, past_key_value, gated_delta_meta):\n        pass\n"
            "    Qwen3_5GatedDeltaNet.forward = forward\n",
            "replacement", "lmdeploy.pytorch.models.qwen3_5.Qwen3_5GatedDeltaNet.forward", "hook H20", False,
        ),
        (
            "from lmdeploy.pytorch.configurations.qwen3_5 import Qwen3_5ModelConfigBuilder\n"
            "Qwen3_5ModelConfigBuilder.build = None\n",
            "replacement", "lmdeploy.pytorch.configurations.qwen3_5.Qwen3_5ModelConfigBuilder.build", "hook H20", False,
        ),
        (
            "from lmdeploy.pytorch.paging.scheduler import Scheduler\nScheduler.schedule_metrics = None\n",
            "replacement", "lmdeploy.pytorch.paging.scheduler.Scheduler.schedule_metrics", "hook H19", True,
        ),
        (
            "from lmdeploy.pytorch.engine.model_agent import BaseModelAgent\n"
            "def other(self, logits):\n    pass\nBaseModelAgent.async_sampling_logits = other\n",
            "replacement", "lmdeploy.pytorch.engine.model_agent.BaseModelAgent.async_sampling_logits",
            "dlinfer's takes (self, logits); LMDeploy's takes (self, logits, inputs", True,
        ),
        (
            "from lmdeploy.pytorch.config import ModelConfig\nModelConfig.nothing = None\n",
            "replacement", "lmdeploy.pytorch.config.ModelConfig.nothing", "does nothing", False,
        ),
    ],
    ids=["module", "name", "guarded", "forward", "builder", "hook", "signature", "nothing"],
)  # fmt: skip
def test_what_the_extension_does_to_lmdeploy_is_looked_at(
    small: Small, text: str, kind: str, name: str, says: str, fault: bool
) -> None:
    one = only(small.write({f"{EXTENSION}/device/__init__.py": text}).found(host=True))
    assert (one.kind, one.name, one.fault) == (kind, name, fault)
    assert says in one.why
    assert one.where.startswith(f"{EXTENSION}/device/__init__.py:")


@pytest.mark.parametrize(
    "text",
    [
        # Applied again after dlinfer, or wrapped around whatever is found (docs/en/hosts.md).
        "from lmdeploy.pytorch.nn import gated_delta\ndef build_rmsnorm_gated(hidden_size, eps=1e-6, **kwargs):\n"
        "    pass\ngated_delta.build_rmsnorm_gated = build_rmsnorm_gated\n",
        "from lmdeploy.pytorch.models.utils.cudagraph import CudaGraphMixin\n"
        "def make(self, graph_meta, *args, **kwargs):\n    pass\nCudaGraphMixin.make_buffers_cudagraph = make\n",
        "import os\nos.environ = {}\n",
        "from lmdeploy.pytorch.config import ModelConfig\nthing = ModelConfig\n",
    ],
    ids=["norm", "graph", "not-lmdeploy", "no-attribute"],
)
def test_what_the_extension_may_do_is_no_difference(small: Small, text: str) -> None:
    assert small.write({f"{EXTENSION}/device/__init__.py": text}).found(host=True) == []


def test_other_vendors_and_graph_modes_are_not_looked_at(small: Small) -> None:
    text = "from lmdeploy.pytorch.nothing import x\n"
    small.write({f"{EXTENSION}/device/camb.py": text, f"{EXTENSION}/dynamo/patch.py": text})
    assert small.found(host=True) == []


# --- the data is that of the host -------------------------------------------------------------------------------------


def calls_of_the_host(name: str) -> Iterator[ast.Call]:
    """Yield every call of a name such as `ext_ops.linear` in LMDeploy's dlinfer code."""
    root = contract.host_root() / "lmdeploy/pytorch"
    for folder in ("kernels/dlinfer", "backends/dlinfer"):
        for file in sorted((root / folder).rglob("*.py")):
            if file.name == "fused_rotary_emb.py":
                continue  # no module imports it, and its call fits no dlinfer
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
                    yield node


@pytest.mark.parametrize("need", [n for n in NEEDS if "(" in n.call], ids=lambda n: str(n.name))
def test_a_call_is_as_lmdeploy_writes_it(need: dlinfer_contract.Need) -> None:
    wanted = Call.of(need.call)
    name = f"ext_ops.{need.name}" if need.module == OPS else need.name.replace("MoeMetadata", "DlinferMoeMetadata")
    written = list(calls_of_the_host(name))
    assert written, f"LMDeploy does not call {need.name}"
    for call in written:
        assert len(call.args) <= len(wanted.positional)
        # What is given by place in one call may be given by name in another.
        by_name = {k.arg for k in call.keywords if k.arg}
        rest = set().union(*wanted.positional[len(call.args) :]) if wanted.positional[len(call.args) :] else set()
        assert by_name <= wanted.keywords | rest
    widest = max(written, key=lambda c: (len(c.args), len(c.keywords)))
    assert len(widest.args) == len(wanted.positional)
    assert {k.arg for call in written for k in call.keywords} >= wanted.keywords


def test_a_call_that_is_written_otherwise_is_seen() -> None:
    """The check above compares something: each of these is another call."""
    takes = signature(ast.parse("def f(a, b, *, c=None): pass").body[0])
    assert takes is not None
    assert Call.of("f(a, b, c=_)").misfits(takes) == ([], [])
    assert Call.of("f(a | x, b)").misfits(takes) == ([], [])
    assert Call.of("f(a)").misfits(takes) == (["missing a required argument: 'b'"], [])
    assert Call.of("f(b, a)").misfits(takes)[1] == ["argument 1 is 'a', wanted 'b'", "argument 2 is 'b', wanted 'a'"]
    assert Call.of("f(a, b, d=_)").misfits(takes)[0] == ["takes no argument 'd'"]
    assert Call.of("f(a, b, c)").misfits(takes)[0] == ["too many positional arguments"]


# --- the command ------------------------------------------------------------------------------------------------------


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["env", "--json", *arguments])
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, record


def test_the_command_checks_a_folder(
    small: Small, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLINFER_EXT_VENDOR", "cpu")
    code, record = report(capsys, "--dlinfer", str(small.root))
    assert (code, record["problems"]) == (0, [])
    assert record["dlinfer"] == {
        "path": str(small.root / "dlinfer"),
        "version": "9.9.9",
        "lmdeploy": contract.host_version(),
        "checked": len(NEEDS),
        "differences": [],
    }
    small.change("dlinfer/ops/llm.py", "def fused_moe(", "def fused_experts(")
    code, record = report(capsys, "--dlinfer", str(small.root))
    assert code == 1
    assert "dlinfer 9.9.9: dlinfer.ops.fused_moe (dlinfer/ops/__init__.py:1)" in record["problems"][0]
    assert main(["env", "--doctor", "--dlinfer", str(small.root)]) == 1
    out = capsys.readouterr().out
    assert f"{len(NEEDS)} calls checked, 1 difference\n" in out
    assert "call: dlinfer.ops.fused_moe (dlinfer/ops/__init__.py:1): there is no fused_moe" in out


def test_a_folder_without_a_dlinfer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--dlinfer", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"env: {tmp_path} holds no dlinfer: wanted a checkout")


def test_the_installed_one_is_checked_without_being_asked_for(
    small: Small, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A distribution on sys.path, as pip leaves it; importing the package would raise."""
    small.write({"dlinfer_ascend-0.3.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: dlinfer-ascend\n"
                 "Version: 0.3.0\n"})  # fmt: skip
    small.change("dlinfer/ops/llm.py", "def fused_moe(", "def fused_experts(")
    monkeypatch.syspath_prepend(str(small.root))
    monkeypatch.setenv("DLINFER_EXT_VENDOR", "cpu")
    code, record = report(capsys)
    # On a CPU the stand-in serves, so a dlinfer that does not fit is shown and is no fault.
    assert (code, record["dlinfer"]["version"], len(record["dlinfer"]["differences"])) == (0, "0.3.0", 1)
    monkeypatch.setenv("DLINFER_EXT_VENDOR", "ascend")
    code, record = report(capsys)
    assert code == 1
    assert any(p.startswith("dlinfer 0.3.0: dlinfer.ops.fused_moe") for p in record["problems"])
