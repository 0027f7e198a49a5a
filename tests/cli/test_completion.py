"""Shell completion: the script that is printed, asked by the shell it is for."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dlinfer_ext.cli import completion
from dlinfer_ext.cli.main import COMMANDS, build_parser, main
from dlinfer_ext.e2e import scenario
from dlinfer_ext.targets import model_names, soc_names


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def bash(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    file = tmp_path / "dlinfer-ext.bash"
    file.write_text(script("bash", capsys))
    return file


def asked(file: Path, line: str, cwd: Path | None = None) -> set[str]:
    """Return what bash offers at the end of a line, by the function that the script registers."""
    words = shlex.split(line) + ([""] if line.endswith(" ") else [])
    code = f"""
        set -e
        source {shlex.quote(str(file))}
        call=$(complete -p dlinfer-ext | sed -E 's/.* -F ([^ ]+) .*/\\1/')
        COMP_WORDS=({shlex.join(words)})
        COMP_CWORD={len(words) - 1}
        COMP_LINE={shlex.quote(line)}
        COMP_POINT={len(line)}
        set +e
        "$call" dlinfer-ext {shlex.quote(words[-1])} {shlex.quote(words[-2])}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", code], cwd=cwd, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_bash_offers_the_commands(bash: Path) -> None:
    assert asked(bash, "dlinfer-ext ") >= set(COMMANDS)
    assert asked(bash, "dlinfer-ext e") == {"env", "e2e"} | {c for c in COMMANDS if c.startswith("e")}


@pytest.mark.parametrize("command", COMMANDS)
def test_bash_offers_every_option_of_a_command(bash: Path, command: str) -> None:
    parser = completion.subparsers(build_parser())[command]
    options = {o for a in parser._actions for o in a.option_strings if a.help != "==SUPPRESS=="}
    assert {"--json", "--help"} <= options
    assert asked(bash, f"dlinfer-ext {command} -") == options
    assert asked(bash, f"dlinfer-ext {command} --j") == {"--json"}


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("dlinfer-ext env --d", {"--doctor", "--dlinfer"}),
        ("dlinfer-ext ops --vendor ", {"ascend", "cpu"}),
        ("dlinfer-ext ops --soc a", {n for n in soc_names() if n.startswith("a")}),
        ("dlinfer-ext verify --soc ", set(soc_names())),
        ("dlinfer-ext verify --model ", set(model_names())),
        ("dlinfer-ext e2e --config ", {f.stem for f in scenario.shipped()}),
        ("dlinfer-ext completion ", set(completion.SHELLS)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bash_offers_the_values_of_an_option(bash: Path, line: str, offered: set[str]) -> None:
    assert offered
    got = asked(bash, line)
    assert {word for word in got if not word.startswith("-")} == {w for w in offered if not w.startswith("-")}
    assert offered <= got


def test_bash_offers_files_where_a_file_is_wanted(bash: Path, tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "config.json").touch()
    assert "place/config.json" in asked(bash, "dlinfer-ext plan --config place/", tmp_path)
    # A folder is wanted here, so no file is offered.
    assert "place/config.json" not in asked(bash, "dlinfer-ext e2e --out place/", tmp_path)


def test_bash_offers_nothing_for_what_is_not_there(bash: Path) -> None:
    assert asked(bash, "dlinfer-ext nosuch") == set()
    assert asked(bash, "dlinfer-ext env --nosuch") == set()


@pytest.mark.parametrize(("shell", "check"), [("bash", ["-n"]), ("zsh", ["-n"]), ("fish", ["--no-execute"])])
def test_the_script_is_one_of_its_shell(
    shell: str, check: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = tmp_path / "script"
    file.write_text(script(shell, capsys))
    done = subprocess.run([shell, *check, str(file)], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_shell_gets_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert completion.PROGRAM in text
    assert all(command in text for command in COMMANDS)
    assert "python -m" not in text  # a shell completes a program by its name
    assert main(["completion", shell, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "shell": shell,
        "program": completion.PROGRAM,
        "script": text.removesuffix("\n"),
    }


def test_the_program_is_the_installed_one() -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name=completion.PROGRAM)
    assert script.load() is main


def test_without_shtab_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "completion: shtab is not installed: pip install shtab (no other command needs it)\n")


def test_values_are_those_of_options_that_exist() -> None:
    parsers = completion.subparsers(build_parser())
    for command, option in completion.VALUES:
        assert option in {o for a in parsers[command]._actions for o in a.option_strings}
