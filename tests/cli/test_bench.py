"""`bench ops` and `bench compare`: counts, files, plots, comparisons; and that baselines do the operators' work."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dlinfer_ext.cli import bench_compare, bench_plots, bench_record, bench_text
from dlinfer_ext.cli.bench_cases import BASELINES, Case, MissingBaseline, conv, delta_rule, kda, norm, public, reject
from dlinfer_ext.cli.bench_cases.rules import Decode, Prefill, Rule
from dlinfer_ext.cli.bench_counts import measure as count
from dlinfer_ext.cli.bench_measure import measure
from dlinfer_ext.cli.bench_record import Baseline, Counts, Record, RecordError, Result
from dlinfer_ext.cli.main import main
from dlinfer_ext.testing import assert_close

RULES = [
    replace(delta_rule.RULE, heads=2, value_heads=4, dim=16),
    replace(kda.RULE, heads=2, value_heads=2, dim=16, unpadded=""),
]
EACH_RULE = pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)


def result(name: str = "a case", speedup: float = 4.0, **more: Any) -> Result:
    side = Baseline(
        ms=speedup,
        speedup=speedup,
        low=speedup * 0.9,
        high=speedup * 1.1,
        counts=Counts(calls=90, host_reads=3, bytes=64),
    )
    given: dict[str, Any] = {
        "name": name, "family": "conv", "runs": 3, "tokens": 8, "ms": 1.0, "spread": 0.1,
        "counts": Counts(calls=10, host_reads=0, bytes=32), "baselines": {"loop": side},
    }  # fmt: skip
    return Result(**(given | more))


def record(*cases: Result) -> Record:
    return bench_record.record("ops", "python -m dlinfer_ext bench ops", 1, cases)


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "calls", "reads"),
    [
        (lambda x: x + 1, 1, 0),
        (lambda x: x.t().view(-1)[1:], 0, 0),  # views move nothing
        (lambda x: (x + 1).sum().item(), 3, 1),
        (lambda x: bool((x > 0).any()), 3, 1),
        (lambda x: x.tolist(), 0, 1),
        (lambda x: [int(v) for v in x.flatten()], 6, 6),
        (lambda x: x[x > 0], 2, 1),
        (lambda x: torch.empty(3), 0, 0),
    ],
    ids=["add", "views", "item", "bool", "tolist", "int-each", "mask", "empty"],
)
def test_counts_of_expressions(run: Callable[[torch.Tensor], object], calls: int, reads: int) -> None:
    x = torch.ones(6, 1)
    with torch.inference_mode():
        counts = count(lambda: run(x))
    assert (counts.calls, counts.host_reads, counts.launches) == (calls, reads, 0)


def test_bytes_are_those_of_the_tensors_taken_and_given() -> None:
    x, pool, at = torch.ones(6), torch.ones(100, 4), torch.tensor([7, 3])
    assert count(lambda: x + x).bytes == 3 * 24
    assert count(lambda: pool[at]).bytes == 2 * 32 + 16  # of a pool only the rows gathered, read and written

    def put() -> None:
        pool[at] = 1.0

    assert count(put).bytes == pytest.approx(16 + 4 + 4, abs=4)
    assert count(lambda: pool.copy_(pool)).bytes == 2 * 1600


def test_a_read_and_a_loop_planted_into_an_operator_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from dlinfer_ext.ops import _registry

    case = Decode(RULES[0], 6, 2, 8)
    with torch.inference_mode():
        clean = count(case.run)
    assert clean.host_reads == 0
    form = _registry.chosen("gated_delta_rule_update", "cpu")

    def read(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        float(q.sum())
        return form(q, *rest)  # type: ignore[no-any-return]

    def loop(*given: Any) -> torch.Tensor:
        q, k, v, g, beta, state, slots, histories, *rest = given
        rows = [form(*(x[i : i + 1] for x in (q, k, v, g, beta)), state, slots[i : i + 1], histories[i : i + 1], *rest)
                for i in range(len(q))]  # fmt: skip
        return torch.cat(rows)

    for planted, more in ((read, 1.0), (loop, 4.0)):
        monkeypatch.setattr(_registry, "chosen", lambda name, vendor, planted=planted: planted)
        with torch.inference_mode():
            counts = count(case.run)
        assert counts.host_reads == (planted is read)
        assert counts.calls >= clean.calls * more if planted is loop else counts.calls > clean.calls


# --- baselines do the work of the operator ----------------------------------------------------------------------------


def packed(output: Any) -> torch.Tensor:
    """Return outputs of any baseline as rows of one tensor, [tokens, heads, V]."""
    parts = [output] if isinstance(output, torch.Tensor) else output
    return torch.cat([p.flatten(0, -3) for p in parts])


@EACH_RULE
@pytest.mark.parametrize("baseline", ["loop", "padded", "naive"])
def test_baselines_of_prompts_give_the_operators_output_and_states(rule: Rule, baseline: str) -> None:
    case = Prefill(rule, (3, 70, 1))
    with torch.inference_mode():
        wanted, states = case.run(), case.pool.clone()
        case.pool.zero_()
        got = packed(getattr(case, baseline)())
    assert_close(baseline, got, wanted, limit=1e-5)
    # The operator keeps [V, K] and the baselines [K, V]; the states are square, so that one pool serves both.
    assert_close("state", case.pool.transpose(-1, -2), states, limit=1e-5)


@EACH_RULE
@pytest.mark.parametrize("baseline", ["loop", "transformers", "naive"])
@pytest.mark.parametrize("ring", [None, 3], ids=["one", "ring"])
def test_baselines_of_steps_give_the_operators_output_and_states(rule: Rule, baseline: str, ring: int | None) -> None:
    case = Decode(rule, 4, 2, 16, steps=ring or 1, ring=ring)
    before = case.pool.clone()
    with torch.inference_mode():
        wanted, states = case.run().flatten(0, 1), case.pool.clone()
        case.pool.copy_(before.transpose(-1, -2))
        output = getattr(case, baseline)()
    if baseline == "loop":
        got = torch.cat([torch.cat(row, 1) for row in output]).flatten(0, 1)
    else:
        got = torch.cat(output, 1).flatten(0, 1)
    assert_close(baseline, got, wanted, limit=1e-5)
    assert_close("state", case.pool.transpose(-1, -2), states, limit=1e-5)


@pytest.mark.parametrize("baseline", ["loop", "transformers"])
def test_baselines_of_the_convolution_give_its_output_and_windows(baseline: str) -> None:
    case = conv.Prefill(3, 5, 8, torch.float32)
    before = case.pool.clone()
    with torch.inference_mode():
        wanted, pool = case.run(), case.pool.clone()
        case.pool.copy_(before)
        got = getattr(case, baseline)()
    assert_close(baseline, got if baseline == "loop" else got.transpose(0, 1).flatten(1), wanted, limit=1e-5)
    assert torch.equal(case.pool, pool)


def test_the_loop_of_verify_steps_gives_output_and_ring() -> None:
    case = conv.Update(3, 4, 8, 7)
    before = case.pool.clone()
    with torch.inference_mode():
        wanted, pool = case.run(), case.pool.clone()
        case.pool.copy_(before)
        got = torch.stack(case.loop())
    assert_close("loop", got.float(), wanted.float(), limit=8e-3)
    assert torch.equal(case.pool, pool)


def test_baselines_of_the_norm_give_its_output() -> None:
    case = norm.Norm(5, torch.float32)
    with torch.inference_mode():
        wanted = case.run()
        for form in (case.plain, case.transformers):
            assert_close("norm", form(), wanted, limit=1e-5)


def test_the_loops_of_sampling_run() -> None:
    with torch.inference_mode():
        assert len(reject.Verify(3, 2, 50, False).loop()) == len(reject.Verify(3, 2, 50, True).loop_of_probs()) == 3  # type: ignore[arg-type]


# --- measuring --------------------------------------------------------------------------------------------------------


def nothing() -> None: ...


def test_a_missing_baseline_is_named_and_an_unwanted_one_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    def gone() -> None:
        public("models.qwen3_5.modeling_qwen3_5", "no_such_form")

    def unwanted() -> None:
        raise AssertionError("it was not asked for")

    case = Case("a case", nothing, {"transformers": gone, "loop": nothing, "plain": unwanted}, nothing, 2.0)
    found = measure(case, "conv", 3, 1.0, ("transformers", "loop"))
    assert list(found.baselines) == ["loop"]
    assert "no_such_form" in found.missing["transformers"]
    assert found.target is None  # the target is about the first baseline, which did not run
    assert "baseline transformers: transformers.models" in bench_text.missing([found])[0]
    with pytest.raises(MissingBaseline):
        public("models.no_such_model", "x")


def test_names_of_baselines_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ops", "--compare", "loops"]) == 2
    assert "--compare loops: wanted some of " + ", ".join(BASELINES) in capsys.readouterr().err


def test_a_run_says_what_no_case_is_compared_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    line = ["bench", "ops", "--family", "norm", "--only", "rows=1024", "--repeats", "3", "--compare", "fla-naive"]
    assert main([*line, "--out", str(file), "--out", str(file.with_suffix(".md"))]) == 0
    assert "missing: norm: no case has a baseline fla-naive" in capsys.readouterr().out
    (page,) = tmp_path.glob("*.md")
    assert "| norm rows | 1024 | 1.00 |" in page.read_text()
    found = bench_record.read(file)
    assert found.command.endswith("--compare fla-naive --repeats 3 --seconds 20.0 --threads 1 --out r.json --out r.md")
    (case,) = found.cases
    assert case.counts is not None
    assert case.counts.host_reads == 0
    assert case.runs == 3
    assert (case.growth, case.point) == ("norm rows", 1024)


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_commit_is_that_of_the_start() -> None:
    assert bench_record.record("ops", "x", 1, [], "abc+").commit == "abc+"
    assert bench_record.record("ops", "x", 1, []).commit == bench_record.commit() != ""


def test_a_record_says_where_and_with_what_and_is_read_again(tmp_path: Path) -> None:
    found = record(result(), result("another", missing={"transformers": "not installed"}, baselines={}))
    file = tmp_path / "r.json"
    bench_record.write(found, file)
    assert bench_record.read(file) == found
    written = json.loads(file.read_text())
    assert set(written["versions"]) == {"dlinfer_ext", "python", "torch", "lmdeploy", "transformers"}
    assert written["versions"]["torch"] == torch.__version__.partition("+")[0] or torch.__version__
    assert all(written[name] for name in ("commit", "cpu", "date", "command", "threads", "route"))


def test_csv_has_a_row_per_case_and_side(tmp_path: Path) -> None:
    file = tmp_path / "r.csv"
    bench_record.write(record(result(missing={"transformers": "not installed"})), file)
    with file.open() as stream:
        rows = list(csv.DictReader(stream))
    assert [r["side"] for r in rows] == ["ours", "loop", "transformers"]
    assert [r["calls"] for r in rows] == ["10.0", "90.0", ""]
    assert [r["bytes_per_token"] for r in rows] == ["4.0", "8.0", ""]
    assert rows[2]["missing"] == "not installed"
    assert all(r["commit"] and r["version_torch"] for r in rows)


@pytest.mark.parametrize("name", ["r.txt", "nowhere/r.json"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "ops", "--out", str(tmp_path / name)]) == 2
    assert "--out: " in capsys.readouterr().err


# --- plots ------------------------------------------------------------------------------------------------------------


def test_plots_are_small_pngs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = [result(f"rows={n}", growth="conv rows", point=n, ms=float(n), baselines={}) for n in (1, 2, 4)]
    files = bench_plots.draw(record(result(), *points), tmp_path)
    assert [f.name for f in files] == ["ratios.png", "growth.png", "calls.png"]
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")
        assert file.stat().st_size < 60_000
    assert [f.name for f in bench_plots.draw(record(*points), tmp_path)] == ["growth.png"]


def test_missing_matplotlib_is_named_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "ops", "--plots", str(tmp_path)]) == 2
    assert "pip install -r requirements/report.txt" in capsys.readouterr().err


# --- compare ----------------------------------------------------------------------------------------------------------


def compared(old: Record, new: Record, tmp_path: Path, *options: str) -> int:
    bench_record.write(old, tmp_path / "old.json")
    bench_record.write(new, tmp_path / "new.json")
    return main(["bench", "compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *options])


def test_equal_records_hold_however_fast_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(record(result()), record(result(ms=50.0)), tmp_path) == 0
    assert "holds: 1 ratios compared with limit 1.25" in capsys.readouterr().out


def test_what_may_be_noise_is_named_and_does_not_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def noisy(speedup: float, **more: Any) -> Result:
        return result(baselines={"loop": Baseline(ms=1, speedup=speedup, low=1.0, high=9.0)}, **more)

    assert compared(record(noisy(8.0, target=4.0)), record(noisy(2.0, target=4.0)), tmp_path) == 0
    out = capsys.readouterr().out
    assert "unclear, measure again: a case, beside loop: 8.00 → 2.00" in out
    assert "unclear, measure again: a case: misses its target" in out
    limit = {"extra_memory": 3.0, "memory_limit": 1.0}  # which is no matter of noise
    assert bench_compare.compare(record(noisy(8.0)), record(noisy(8.0, **limit))).failing != []


def test_a_case_that_got_slower_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = record(result(speedup=3.0))
    assert compared(record(result()), new, tmp_path) == 1
    assert "slower: a case, beside loop: 4.00 → 3.00 times as fast (1.33 > 1.25" in capsys.readouterr().out
    assert compared(record(result()), new, tmp_path, "--limit", "1.5") == 0
    assert compared(new, record(result()), tmp_path) == 0  # faster is no fault


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        (Counts(calls=300, host_reads=0, bytes=32), "calls 10 → 300"),
        (Counts(calls=10, host_reads=1, bytes=32), "host reads 0 → 1"),
        (Counts(calls=10, host_reads=0, bytes=64), "bytes 32 → 64"),
    ],
    ids=["calls", "host-read", "bytes"],
)
def test_a_case_that_asks_for_more_is_named(
    counts: Counts, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = (record(result(baselines={}, counts=c)) for c in (result().counts, counts))
    assert compared(old, new, tmp_path) == 1
    assert f"asks for more: a case: {says}" in capsys.readouterr().out


def test_what_vanished_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = record(result(), result("another"))
    assert compared(old, record(result(), result("a new one")), tmp_path) == 1
    out = capsys.readouterr().out
    assert "vanished: another" in out
    assert "new: a new one" in out
    gone = result(baselines={}, missing={"loop": "not installed"})
    assert compared(record(result()), record(gone), tmp_path) == 1
    assert "vanished: a case, beside loop: not installed" in capsys.readouterr().out


def test_a_case_that_no_longer_holds_is_named() -> None:
    old, new = (record(result(target=t)) for t in (3.9, 4.5))
    assert bench_compare.compare(old, new).failing == ["a case: misses its target or memory limit"]


def test_versions_that_differ_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = record(result())
    new = old.model_copy(update={"versions": {**old.versions, "torch": "9.9"}, "threads": 2})
    assert compared(old, new, tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["differ"] == [f"torch: {old.versions['torch']} → 9.9", "threads: 1 → 2"]


@pytest.mark.parametrize("text", [None, "{}", "no json", '{"format": 2}'], ids=["gone", "empty", "text", "format"])
def test_a_file_that_is_no_record_is_refused(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.json"
    if text is not None:
        bad.write_text(text)
    with pytest.raises(RecordError, match="wanted"):
        bench_record.read(bad)
    assert main(["bench", "compare", str(bad), str(bad)]) == 2
    assert "bad.json: " in capsys.readouterr().err


def test_records_of_two_kinds_and_limits_below_one_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = record(result())
    assert compared(one, one.model_copy(update={"what": "engine"}), tmp_path) == 2
    assert compared(one, one, tmp_path, "--limit", "0.9") == 2
    assert "--limit 0.9: wanted 1 or more" in capsys.readouterr().err
