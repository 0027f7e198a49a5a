"""Nothing of a model folder or of a settings file runs, nothing is fetched, and nobody else is listened to."""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from dlinfer_ext.cli.main import main
from dlinfer_ext.e2e import model_folder, report, scenario
from dlinfer_ext.framework.lmdeploy import contract
from tests.packaging.traps import ROOT, Trapped, guarded

LOOPBACK: Final = {"127.0.0.1", "::1"}

# --- what the package's own code does ---------------------------------------------------------------------------------

# Calls and imports that run data, or fetch it. Each place that has one stands here with its reason.
ALLOWED: Final = {
    ("setup.py", "exec"): "reads this package's own version.py as it is built",
    ("dlinfer_ext/framework/lmdeploy/cpu_graphs.py", "exec"): "compiles a function of the installed LMDeploy alone, "
    "out of a module that cannot be imported on a CPU; the file is found by the import system",
    ("dlinfer_ext/framework/lmdeploy/requests.py", "pickle"): "writes, never reads: whether a request can be sent on",
}
RUNS: Final = {"eval", "exec", "__import__"}
PICKLES: Final = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
SHELLS: Final = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
YAML: Final = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "yaml.unsafe_load_all"}
FETCHES: Final = {"snapshot_download", "hf_hub_download", "cached_download", "urlretrieve", "load_state_dict_from_url"}


def risks(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield what a module does that could run data or fetch it, with the line."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name.partition(".")[0] for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").partition(".")[0]] if not node.level else []
        yield from ((name, getattr(node, "lineno", 0)) for name in names if name in PICKLES)
        if isinstance(node, ast.Call):
            yield from ((what, node.lineno) for what in _risky_call(node))


def _risky_call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    options = {k.arg: k.value for k in node.keywords if k.arg}

    def is_set(option: str, value: object) -> bool:
        given = options.get(option)
        return isinstance(given, ast.Constant) and given.value is value

    if name in RUNS | SHELLS | YAML or last in FETCHES:
        yield name
    if name == "torch.load" and not is_set("weights_only", True):
        yield "torch.load without weights_only=True"
    if (
        "shell" in options
        and last in ("run", "Popen", "call", "check_call", "check_output")
        and not is_set("shell", False)
    ):
        yield "shell=True"
    if "trust_remote_code" in options and not is_set("trust_remote_code", False):
        yield "trust_remote_code"
    # Without it transformers asks at the terminal whether code of the folder may run.
    if (
        last == "from_pretrained"
        and name.startswith(("Auto", "transformers.Auto"))
        and "trust_remote_code" not in options
    ):
        yield "from_pretrained without trust_remote_code=False"
    if "allow_pickle" in options and not is_set("allow_pickle", False):
        yield "allow_pickle"


def sources() -> list[Path]:
    folders = ("dlinfer_ext", "kernels", "examples")
    links = (ROOT / "dlinfer_ext/kernels", ROOT / "dlinfer_ext/configs")
    files = [f for folder in folders for f in sorted((ROOT / folder).rglob("*.py"))]
    return [ROOT / "setup.py", *(f for f in files if not any(f.is_relative_to(link) for link in links))]


def test_no_module_runs_data_or_fetches_it() -> None:
    found = {
        (str(file.relative_to(ROOT)), what): line
        for file in sources()
        for what, line in risks(ast.parse(file.read_text(encoding="utf-8")))
    }
    assert len(sources()) > 100
    assert {k: v for k, v in found.items() if k not in ALLOWED} == {}
    assert [k for k in ALLOWED if k not in found] == []  # what is not there any more needs no leave


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib.numpy_pickle",
        "eval('1')",
        "exec(text)",
        "__import__(name)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "yaml.load(text, yaml.Loader)",
        "yaml.unsafe_load(text)",
        "os.system('ls')",
        "subprocess.run(line, shell=True)",
        "subprocess.Popen(line, shell=wanted)",
        "AutoConfig.from_pretrained(path)",
        "transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust)",
        "np.load(file, allow_pickle=True)",
        "huggingface_hub.snapshot_download(name)",
    ],
)
def test_each_of_these_is_seen(code: str) -> None:
    assert list(risks(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "torch.load(file, weights_only=True)",
        "yaml.safe_load(text)",
        "subprocess.run([name])",
        "model.eval()",
        "AutoConfig.from_pretrained(path, trust_remote_code=False)",
        "safetensors.torch.load_file(file)",
    ],
)
def test_none_of_these_is_seen(code: str) -> None:
    assert list(risks(ast.parse(code))) == []


# --- model folders that are refused -----------------------------------------------------------------------------------


def index_of(*names: str) -> Callable[[Trapped], Any]:
    """Take the weights away and put an index there instead that names these files."""

    def change(model: Trapped) -> None:
        (model.folder / "model.safetensors").rename(model.folder.parent / "outside.safetensors")
        model.write(model_folder.INDEX, json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(names)}}))

    return change


def only_pickles(model: Trapped) -> None:
    model.add_pickles()
    (model.folder / "model.safetensors").unlink()


def strange_type(model: Trapped) -> None:
    model.add_code().change("config.json", lambda c: c.update(model_type="trap", architectures=["Trap"]))


REFUSED: Final[dict[str, tuple[Callable[[Trapped], Any], str]]] = {
    "pickled": (only_pickles, "has its weights in consolidated.00.pth, a pickle"),
    "absolute": (index_of("/etc/x.safetensors"), "weight_map names '/etc/x.safetensors'; wanted a .safetensors file"),
    "outside": (index_of("../outside.safetensors"), "weight_map names '../outside.safetensors'; wanted"),
    "far outside": (index_of("../../etc/x"), "weight_map names '../../etc/x'; wanted a .safetensors file inside"),
    "inside and out": (index_of("a/../../outside.safetensors"), "weight_map names 'a/../../outside.safetensors'"),
    "other slashes": (index_of("..\\outside.safetensors"), "wanted a .safetensors file inside the folder"),
    "pickle by index": (index_of("pytorch_model.bin"), "weight_map names 'pytorch_model.bin'; wanted a .safetensors"),
    "not there": (index_of("model-00001.safetensors"), "'model-00001.safetensors', which is not there"),
    "no table": (lambda m: index_of()(m), "weight_map is dict; wanted file names by tensor"),
    "code": (strange_type, "auto_map names code in the folder for model type 'trap'"),
    "no JSON": (lambda m: m.write("config.json", "{"), "config.json is no JSON"),
    "no object": (lambda m: m.write("config.json", "[]"), "config.json holds list; wanted a JSON object"),
    "deep": (lambda m: m.write("config.json", "[" * 100_000), "config.json is no JSON"),
    "large": (lambda m: m.write("config.json", " " * (17 << 20)), "bytes; wanted at most 16777216"),
    "empty": (lambda m: (m.folder / "config.json").unlink(), "holds no config.json"),
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("command", ["demo", "e2e"])
def test_a_folder_that_could_do_harm_is_refused_by_name(
    command: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, says = REFUSED[why]
    model = Trapped.make(tmp_path)
    change(model)
    assert main([command, "--json", "--model", str(model.folder)]) == {"demo": 1, "e2e": 2}[command]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{command}: ")
    assert says in err
    assert not model.canary.exists()


def test_a_folder_that_does_no_harm_is_taken(tmp_path: Path) -> None:
    """What lies beside safe weights is passed over, and so is code where transformers has the model itself."""
    model = Trapped.make(tmp_path).all()
    model_folder.check(model.folder)
    for file in sorted(ROOT.glob("examples/checkpoints/*/config.json")):
        model_folder.check(file.parent)
    # Weights in parts, as large models have them.
    parts = {"weight_map": {"a": "model-1.safetensors", "b": "parts/model-2.safetensors"}}
    (model.folder / "model.safetensors").rename(model.folder / "model-1.safetensors")
    (model.folder / "parts").mkdir()
    (model.folder / "parts/model-2.safetensors").write_bytes(b"")
    model.write(model_folder.INDEX, json.dumps(parts))
    model_folder.check(model.folder)
    assert not model.canary.exists()


@pytest.mark.parametrize("name", ["pipeline", "AutoTokenizer", "nothing", "utils"])
def test_an_architecture_that_is_no_model_is_refused(name: str, tmp_path: Path) -> None:
    from dlinfer_ext.e2e import reference

    model = Trapped.make(tmp_path)
    model.change("config.json", lambda c: c.update(architectures=[name]))
    with pytest.raises(ValueError, match=f"architectures names '{name}', which is no model of transformers"):
        reference.load(model.folder)


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    """What LMDeploy and our tests hand a conversation to."""
    from jinja2.exceptions import SecurityError
    from transformers import AutoTokenizer

    model = Trapped.make(tmp_path).add_template()
    tokenizer = AutoTokenizer.from_pretrained(model.folder, trust_remote_code=False)
    with pytest.raises(SecurityError, match="unsafe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert not model.canary.exists()
    # The same template outside the sandbox: the trap works.
    import jinja2

    template = (model.folder / "chat_template.jinja").read_text()
    jinja2.Environment(autoescape=True).from_string(template).render()
    assert model.canary.exists()


# --- processes under the guard ----------------------------------------------------------------------------------------


def test_the_guard_sees_what_it_is_for(tmp_path: Path) -> None:
    """Without this the tests below would also hold with a guard that sees nothing."""
    model = Trapped.make(tmp_path).all()
    code = f"""
import pickle, runpy, socket, subprocess, sys
server = socket.create_server(("0.0.0.0", 0))
for address in (("192.0.2.1", 9), ("127.0.0.1", 9)):
    try: socket.create_connection(address, timeout=0.01)
    except OSError: pass
try: socket.getaddrinfo("huggingface.invalid", 443)
except OSError: pass
runpy.run_path({str(model.folder / "modeling_trap.py")!r})
subprocess.run([sys.executable, "-c", "import socket; socket.socket(type=2).connect(('192.0.2.2', 9))"], check=False)
import time; time.sleep(1)
"""
    ended = guarded(["-c", code], tmp_path, model.folder)
    assert (ended.code, ended.processes) == (0, 2), ended.err
    assert [e["address"][0] for e in ended.reached("socket.connect")] == ["192.0.2.1", "192.0.2.2"]
    assert {e["host"] for e in ended.reached("socket.getaddrinfo")} == {"192.0.2.1", "huggingface.invalid"}
    assert [Path(e["file"]).name for e in ended.reached("exec")] == ["modeling_trap.py"]
    assert "0.0.0.0" in ended.listening
    assert model.canary.exists()
    model.canary.unlink()
    import torch

    torch.load(model.folder / "pytorch_model.bin", weights_only=False)
    assert model.canary.exists()


@pytest.mark.long
def test_plan_runs_nothing_and_asks_nobody(tmp_path: Path) -> None:
    model = Trapped.make(tmp_path).all()
    line = ["-m", "dlinfer_ext", "plan", "--json", "--config", str(model.folder), "--drafts", "2", "--batch", "4"]
    ended = guarded(line, tmp_path, model.folder)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["fits"] is True
    assert ended.reached("socket.connect", "socket.getaddrinfo", "socket.sendto", "exec") == []
    assert not model.canary.exists()


def test_plan_says_why_a_model_of_its_own_code_cannot_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Trapped.make(tmp_path).add_code()
    model.change("config.json", lambda c: c["auto_map"].update(AutoModelForCausalLM="modeling_trap.Trap"))
    assert main(["plan", "--json", "--config", str(model.folder)]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "plan: Can not found rewrite for auto_map: Trap\n")
    assert not model.canary.exists()


@pytest.mark.long
@pytest.mark.lmdeploy
def test_demo_runs_nothing_and_asks_nobody(tmp_path: Path) -> None:
    """The server, its engine and transformers, on a folder full of traps, online as far as settings go."""
    model = Trapped.make(tmp_path).all()
    line = ["-m", "dlinfer_ext", "demo", "--json", "--model", str(model.folder), "--tokens", "8", "--drafts", "2"]
    ended = guarded(line, tmp_path, model.folder)
    assert ended.code in (0, 1), ended.err[-4000:]
    assert json.loads(ended.out)["token_identical"] is True
    assert ended.processes > 1
    assert ended.reached("socket.connect", "socket.getaddrinfo", "socket.sendto", "exec") == []
    assert ended.listening
    assert ended.listening <= LOOPBACK
    assert not model.canary.exists()


@pytest.mark.long
@pytest.mark.lmdeploy
def test_demo_leaves_a_server_on_loopback_only(tmp_path: Path) -> None:
    line = ["-m", "dlinfer_ext", "demo", "--json", "--serve", "--model", "qwen", "--drafts", "0"]
    ended = guarded(line, tmp_path, until=lambda out: "url" in out)
    assert ended.code == 0, ended.err[-4000:]
    assert json.loads(ended.out)["url"].startswith("http://127.0.0.1:")
    assert ended.listening
    assert ended.listening <= LOOPBACK
    assert ended.reached("socket.bind") == []


@pytest.mark.long
@pytest.mark.lmdeploy
@pytest.mark.parametrize("via", ["pipeline", "server"])
def test_e2e_runs_nothing_and_asks_nobody(via: str, tmp_path: Path) -> None:
    model = Trapped.make(tmp_path).all()
    file = tmp_path / "small.yaml"
    file.write_text(f"what: small\nvia: {via}\ntokens: 4\ndrafts: [2]\nrounds: [[{{tokens: 20}}]]\n")
    out = tmp_path / "out"
    line = [
        "-m",
        "dlinfer_ext",
        "e2e",
        "--json",
        "--model",
        str(model.folder),
        "--config",
        str(file),
        "--out",
        str(out),
    ]
    before = set(ROOT.iterdir())
    ended = guarded(line, tmp_path, model.folder)
    assert ended.code == 0, (ended.out[-2000:], ended.err[-4000:])
    (ran,) = json.loads(ended.out)["scenarios"]
    assert (ran["name"], ran["holds"]) == ("small", True)
    assert ended.reached("socket.connect", "socket.getaddrinfo", "socket.sendto", "exec") == []
    assert ended.listening <= LOOPBACK
    assert bool(ended.listening) >= (via == "server")
    assert not model.canary.exists()
    assert set(ROOT.iterdir()) == before


PIPELINE: Final = """
import sys
from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline

if __name__ == "__main__":
    config = PytorchEngineConfig(
        device_type="ascend", eager_mode=True, num_gpu_blocks=64, session_len=256, language_model_only=True
    )
    pipe = pipeline(sys.argv[1], backend_config=config)
    print("answer:", pipe(["Hello"], gen_config=GenerationConfig(max_new_tokens=2))[0].generate_token_len)
"""


@pytest.mark.long
@pytest.mark.lmdeploy
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (Trapped.add_template, ("answer: 2",)),  # LMDeploy takes another template where this one cannot be used
        (only_pickles, ("Weights only load failed", "weights_only")),
        (index_of("../outside.safetensors"), ("answer: 2",)),  # LMDeploy follows an index; our commands refuse it
    ],
    ids=["template", "pickles", "index"],
)
def test_lmdeploys_own_pipeline_runs_nothing(
    change: Callable[[Trapped], Any], says: tuple[str, ...], tmp_path: Path
) -> None:
    """A user's own script is not stopped by the checks of our commands; LMDeploy's own care is relied on there."""
    model = Trapped.make(tmp_path)
    change(model)
    script = tmp_path / "script.py"
    script.write_text(PIPELINE)
    ended = guarded([str(script), str(model.folder)], tmp_path, model.folder, timeout_s=120)
    assert any(text in ended.err + ended.out for text in says), (ended.out[-2000:], ended.err[-4000:])
    assert ended.reached("socket.connect", "socket.getaddrinfo", "exec") == []
    assert not model.canary.exists()


# --- settings files ---------------------------------------------------------------------------------------------------

VALID: Final = "what: small\nrounds: [[{tokens: 20}]]\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("what: !!python/object/apply:os.system ['touch CANARY']\n", "could not determine a constructor"),
        ("what: !!python/name:os.system\n", "could not determine a constructor"),
        ("- 1\n", "holds list; wanted settings by name"),
        (VALID + "shell: touch CANARY\n", "shell: Extra inputs are not permitted"),
        (VALID + "engine: {trust_remote_code: true}\n", "engine.trust_remote_code is no setting of a scenario"),
        (VALID + "engine: {server_name: 0.0.0.0}\n", "engine.server_name is no setting of a scenario"),
        (VALID + "vary: {hf_overrides: [{a: 1}]}\n", "vary.hf_overrides is no setting of a scenario"),
        (VALID + "engine: {custom_module_map: CANARY}\n", "engine.custom_module_map is no setting"),
        (VALID + "engine: {download_dir: /tmp/x}\n", "engine.download_dir is no setting"),
        (VALID + "name: ../../elsewhere\n", "multiple values for keyword argument 'name'"),
        ("[" * 2000, "recursion"),
        (VALID + "#" * (1 << 20), "bytes; wanted at most 1048576"),
    ],
    ids=["apply", "name", "list", "unknown", "code", "address", "vary", "map", "download", "path", "deep", "large"],
)
def test_a_scenario_is_data_and_bounded(text: str, says: str, tmp_path: Path) -> None:
    canary, file = tmp_path / "canary", tmp_path / "one.yaml"
    file.write_text(text.replace("CANARY", str(canary)), encoding="utf-8")
    with pytest.raises(scenario.ScenarioError, match=r"one\.yaml") as refused:
        scenario.load(file)
    assert says.lower() in str(refused.value).lower()
    assert not canary.exists()


def test_a_scenario_of_aliases_of_aliases_takes_no_time(tmp_path: Path) -> None:
    """A billion strings in ten lines: they are shared as they are read, and must not be copied or printed."""
    rows = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    file = tmp_path / "many.yaml"
    file.write_text(VALID + "\n".join(rows) + "\n", encoding="utf-8")
    start = time.monotonic()
    with pytest.raises(scenario.ScenarioError) as refused:
        scenario.load(file)
    assert time.monotonic() - start < 5
    assert len(str(refused.value)) < 5000


def test_settings_of_a_scenario_are_judged_one_by_one() -> None:
    """A field that LMDeploy adds has to be allowed or refused by somebody."""
    refused = {
        *("adapters", "custom_module_map", "download_dir", "revision", "hf_overrides"),  # other files, other models
        *("device_type", "role", "migration_backend", "kv_transfer_config", "dp_rank"),  # other machines
        *("mp_engine_backend", "enable_mp_engine", "thread_safe", "empty_init", "enable_transfer_obj_ref"),
        *("enable_return_routed_experts", "dllm_block_length", "dllm_unmasking_strategy", "dllm_denoising_steps"),
        "dllm_confidence_threshold",
    }
    tree = ast.parse((contract.host_root() / "lmdeploy/messages.py").read_text(encoding="utf-8"))
    (node,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "PytorchEngineConfig")
    fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    assert fields == set(scenario.ENGINE) | refused
    assert set(scenario.ENGINE).isdisjoint(refused)


@pytest.mark.parametrize("stem", ["..", "...", ".hidden", "a b;c", "-rf"])
def test_a_report_is_written_below_its_folder_only(stem: str, tmp_path: Path) -> None:
    from dlinfer_ext.e2e.results import RunReport, ScenarioReport

    file = tmp_path / f"{stem}.yaml"
    file.write_text(VALID, encoding="utf-8")
    one = scenario.load(file)
    done = ScenarioReport(one.name, one.what, "transformers", "float32")
    done.runs.append(
        RunReport(label="x", drafts=0, verdicts=[], failures=[], counters={}, acceptance=None, seconds=1.0, tokens=1,
                  steps=1, executor="x", records=[])
    )  # fmt: skip
    before = set(tmp_path.rglob("*"))
    report.write_records([done], tmp_path / "out")
    written = set(tmp_path.rglob("*")) - before
    assert written
    assert all(f.is_relative_to(tmp_path / "out") for f in written)
