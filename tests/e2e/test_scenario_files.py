"""Scenario files: the shipped ones can be used, bad ones are named, prompts have the tokens that they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dlinfer_ext.e2e import prompts, scenario
from dlinfer_ext.e2e.scenario import Request, ScenarioError
from tests.e2e.engine import ROOT

TRAINED = ROOT / "examples" / "checkpoints" / "tiny_qwen3_5"
SHIPPED = [f.stem for f in scenario.shipped()]
# What the suite is for; a scenario that goes missing is missed here.
WANTED = {
    "short_beside_long", "short_tails", "batch_equals_alone", "chunk_sizes", "drafts_on_off", "ends_and_reuse",
    "prefix_cache", "preemption", "sampling", "two_ranks", "padded_batch", "two_engines", "soak", "server_disconnects",
    "two_ranks_ray", "lost_rank", "lost_engine", "lost_worker", "acceptance", "bf16", "soak_load", "soak_short",
}  # fmt: skip


def test_every_wanted_scenario_is_shipped() -> None:
    assert set(SHIPPED) == WANTED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_scenario_loads(name: str) -> None:
    one = scenario.load(scenario.find(name))
    assert one.name == name
    labels = [run.label for run in one.runs()]
    assert len(labels) == len(set(labels)) > 0


BAD = {
    "not-yaml": ("what: [", "while parsing"),
    "not-settings": ("- 1", "holds list; wanted settings by name"),
    "unknown-setting": ("what: x\nround: []", "round: Extra inputs are not permitted"),
    "unknown-request-setting": ("what: x\nrounds: [[{tokens: 3, lines: 2}]]", "lines: Extra inputs"),
    "nothing-to-ask": ("what: x", "exactly one of rounds, soak and law"),
    "empty-round": ("what: x\nrounds: [[]]", "a round has no request"),
    "negative-length": ("what: x\nrounds: [[{tokens: -3}]]", "greater than 0"),
    "tail-without-shared": ("what: x\nrounds: [[{tokens: 9, tail: 3}]]", "tail and shared belong together"),
    "shared-too-long": ("what: x\nrounds: [[{tokens: 9, tail: 3, shared: 9}]]", "wanted less than tokens, 9"),
    "soak-without-server": (
        "what: x\nsoak: {requests: 1, seed: 1, tokens: [1], new: [1], per_second: 1}",
        "soak needs via: server",
    ),
    "unknown-place": ("what: x\nwhere: [gpu]\nrounds: [[{tokens: 3}]]", "where.0: Input should be 'cpu' or 'npu'"),
    "object": ("what: !!python/object/apply:os.system [true]\nrounds: [[{tokens: 3}]]", "could not determine"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "why"), BAD.values(), ids=BAD)
def test_bad_file_is_refused_by_name(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ScenarioError) as caught:
        scenario.load(file)
    assert str(file) in str(caught.value)
    assert why in str(caught.value)


def test_unknown_name_lists_the_shipped() -> None:
    with pytest.raises(ScenarioError, match=r"no such file; shipped are acceptance, batch_equals_alone"):
        scenario.find("nothing")


def test_runs_are_drafts_times_varied_settings() -> None:
    one = scenario.Scenario(
        name="x", what="x", drafts=(0, 3), engine={"a": 1}, vary={"b": [1, 2]}, rounds=((Request(tokens=1),),)
    )
    runs = [(run.drafts, run.engine) for run in one.runs()]
    assert runs == [(0, {"a": 1, "b": 1}), (0, {"a": 1, "b": 2}), (3, {"a": 1, "b": 1}), (3, {"a": 1, "b": 2})]


@pytest.mark.parametrize("tokens", [1, 2, 3, 63, 64, 65, 341, 480])
def test_prompt_has_the_tokens_that_it_says(tokens: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    for number in range(3):
        prompt = prompts.build(tokenizer, Request(tokens=tokens), number)
        assert len(prompt.ids) == tokens
        assert tuple(tokenizer(prompt.text).input_ids) == prompt.ids


def test_prompts_share_what_they_say_and_no_more() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    whole = prompts.build(tokenizer, Request(tokens=200, line=0), 0)
    tailed = prompts.build(tokenizer, Request(tokens=230, line=0, shared=150, tail=90), 1)
    assert tailed.ids[:150] == whole.ids[:150]
    assert tailed.ids[150:160] != whole.ids[150:160]
    assert prompts.build(tokenizer, Request(tokens=50), 0).ids != prompts.build(tokenizer, Request(tokens=50), 1).ids
