"""Tests what doctor and recipe offer where a run does not fit: complete commands that fit."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from g4spec.advisor import engines, lengths, lookup, questions, recipe, runtime_support
from g4spec.advisor.conditions import Situation
from g4spec.advisor.diagnosis import Diagnosis
from g4spec.advisor.doctor import diagnose
from g4spec.advisor.facts import facts
from g4spec.advisor.schema import DraftFact, FlagFact, ProblemFact, SizeFact, WeightsFact
from g4spec.cli import run
from tests.support.selection import sample

FACTS = facts()
CARDS = ("RTX 4060", "RTX 3060 12GB", "RTX 4060 Ti 16GB", "RTX 4090", "A40")


def ask(machine: str, model: str, draft: str | None = None, **options: object) -> Diagnosis:
    q = questions.build_question(
        FACTS,
        model,
        draft,
        options.get("c"),
        options.get("kv"),
        None,
        None,  # type: ignore[arg-type]
    )
    given = options.get("given", ())
    m = questions.build_machine(FACTS, machine, given)  # type: ignore[arg-type]
    return diagnose(FACTS, m, q, options.get("engine"))  # type: ignore[arg-type]


def kinds(d: Diagnosis) -> list[str]:
    assert d.brief is not None
    return [a.kind for a in d.brief.alternatives]


def follow(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command that was offered; it must report a run that works."""
    words = shlex.split(command)
    assert words[:2] == ["g4spec", "doctor"], command
    code = run([*words[1:], "--json"])
    out = json.loads(capsys.readouterr().out)
    assert code == 0 and out["works"], command
    assert out["brief"]["mark"] in ("good", "warn"), (command, out["brief"])


@pytest.mark.parametrize("machine", CARDS)
@pytest.mark.parametrize("model", sample(["31b", "26b", "12b", "e4b"], 2))
def test_every_offered_command_fits(
    machine: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {f.format for f in FACTS.all(WeightsFact) if f.model == model}
    types = [f":{name.lower()}" for name in ("BF16", "FP8", "Q4_K_M") if name in known]
    for name in ("", *types):
        d = ask(machine, f"{model}{name}", "mtp")
        assert d.brief is not None
        if d.brief.mark == "bad":
            assert d.brief.alternatives, "something fits on each of these cards"
            assert d.brief.command == d.brief.alternatives[0].command
            assert d.steps[0] == d.brief.alternatives[0].fix
        assert len(set(kinds(d))) == len(kinds(d))
        for other in d.brief.alternatives:
            follow(other.command, capsys)


@pytest.mark.parametrize(
    ("machine", "model", "draft", "options"),
    [
        ("RTX 3090", "31b:q4_k_m", "zlab", {"c": 131072}),
        ("RTX 3090", "31b:q4_k_m", "zlab", {"c": 131072, "kv": "f16"}),
        ("RTX 4060 Ti 16GB", "31b", "mtp", {"engine": "llama.cpp"}),
        ("RTX 4060 Ti 16GB", "31b", "mtp", {"engine": "vllm"}),
        ("RTX 3090", "31b:q8_0", None, {"engine": "g4spec"}),
        ("RTX 4060 Ti 16GB", "31b", None, {"given": ("vllm=0.33.0",)}),
        ("RTX 4060 Ti 16GB", "31b:q4_k_m", "mtp", {"given": ("llama.cpp=b11739",)}),
        ("RTX 3090", "someone/gemma-4-12B-it-tuned", None, {"engine": "llama.cpp"}),
        ("RTX 3060", "unsloth/gemma-4-26B-A4B-it-GGUF", "mtp", {}),
        ("2x RTX 4060", "31b:q8_0", "mtp", {}),
        ("CPU 8GB", "12b:q8_0", "mtp", {}),
    ],
)
def test_offers_keep_the_other_options(
    machine: str,
    model: str,
    draft: str | None,
    options: dict[str, object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    d = ask(machine, model, draft, **options)
    assert d.brief is not None and d.brief.alternatives
    for other in d.brief.alternatives:
        follow(other.command, capsys)


def test_what_an_8_gb_and_a_16_gb_card_are_offered() -> None:
    assert ask("RTX 4060", "12b").works, "in Q3_K_M"
    pair = ask("RTX 4060", "12b:q4_k_m", "mtp")
    assert kinds(pair) == ["type", "split", "size"]
    named = ask("RTX 4060 Ti 16GB", "26b:qat-q4_0", "mtp")
    assert kinds(named)[:3] == ["draft", "ngram", "type"] and "split" in kinds(named)
    fits = ask("RTX 4060 Ti 16GB", "26b", "mtp")
    assert fits.works and kinds(fits) == ["draft", "ngram"], (
        "Q3_K_M, or more bits without the draft"
    )
    long = ask("RTX 3090", "31b:q4_k_m", "zlab", c=131072)
    assert kinds(long)[0] == "context"


def test_a_command_that_leaves_out_the_draft_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ["-m", "26b:qat-q4_0", "-md", "mtp", "--assume", "RTX 4060 Ti 16GB"]
    assert run(["doctor", *pair, "--verbose"]) == 1
    shown = capsys.readouterr()
    assert "Try without the draft: g4spec doctor -m 26b:qat-q4_0 --assume" in shown.err
    assert "1. without the draft: g4spec doctor -m 26b:qat-q4_0 --assume" in shown.out
    assert "Fix: without the draft: g4spec doctor" in " ".join(shown.out.split())
    assert run(["recipe", "llama.cpp", *pair]) == 1
    assert "Instead: without the draft: g4spec recipe llama.cpp" in capsys.readouterr().err
    assert run(["doctor", "-m", "26b:bf16", "--assume", "RTX 4060 Ti 16GB"]) == 1
    assert "without the draft" not in "".join(capsys.readouterr()), "none was requested"


def test_a_speed_that_does_not_count_the_draft_says_so() -> None:
    q = questions.build_question(FACTS, "26b", "mtp", None, None, None, None)
    brief = diagnose(FACTS, questions.build_machine(FACTS, "RTX 4060 Ti 16GB", ()), q).brief
    assert brief is not None
    assert "tokens/s without the draft (computed" in dict(brief.rows)["speed"]
    refused = ask("RTX 4060 Ti 16GB", "26b:qat-q4_0", "mtp").brief
    assert refused is not None
    for other in refused.alternatives:
        assert "without the draft" in other.text or "speed not known" in other.text


@pytest.mark.parametrize("engine", engines.NAMES)
def test_n_gram_lookup_is_offered_where_the_engine_has_it(engine: str) -> None:
    d = ask("RTX 3090", "31b:q4_k_m", "redhat-dflash", c=40000, engine=engine)
    offers = {a.kind: a for a in d.brief.alternatives} if d.brief else {}
    has = "ngram" in engines.engine_fact(FACTS, engine).drafts
    assert has == (engine in ("llama.cpp", "g4spec")) == ("ngram" in offers)
    if has:
        assert " -md ngram " in offers["ngram"].command and not offers["ngram"].drops_draft
        assert "needs no file" in offers["ngram"].text


def test_an_engine_that_is_not_installed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    d = ask("RTX 3060", "12b", "mtp", given=("vllm=0.33.0",))
    assert d.brief is not None and not d.works
    assert d.brief.said.endswith("llama.cpp b11739 (newest known, not installed)")
    assert d.brief.command in d.steps and d.brief.command.startswith("g4spec recipe llama.cpp ")


@pytest.mark.parametrize("machine", ["4x GB10", "2x RTX 3090", "CPU 16GB"])
def test_the_next_step_of_the_overview_runs(
    machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    m = questions.build_machine(FACTS, machine, ())
    follow(diagnose(FACTS, m, None).steps[0], capsys)


def test_offers_have_a_known_checkpoint() -> None:
    d = ask("2x RTX 3090", "31b", "mtp", c=262144, engine="vllm")
    assert d.brief is not None and kinds(d)[0] == "context"
    assert "-m 31b:int4-autoround" in d.brief.command, "no checkpoint in AWQ is known"


def test_much_of_a_dense_model_in_ram_is_not_the_first_offer() -> None:
    assert kinds(ask("RTX 4060", "31b", "mtp")) == ["size", "split"]
    assert kinds(ask("RTX 4060 Ti 16GB", "31b", "mtp"))[0] == "split"


@pytest.mark.parametrize("machine", CARDS)
@pytest.mark.parametrize("size", [s.id for s in FACTS.all(SizeFact)])
def test_the_choice_between_engines_has_a_reason(machine: str, size: str) -> None:
    m = questions.build_machine(FACTS, machine, ())
    for draft in (None, "mtp"):
        q = questions.build_question(FACTS, size, draft, None, None, None, None)
        assert q is not None
        working = [n for n in ("vllm", "llama.cpp") if engines.judge(FACTS, m, q, n).works]
        brief = diagnose(FACTS, m, q).brief
        assert brief is not None
        assert ("why" in dict(brief.rows)) == (len(working) == 2)


def test_a_recipe_that_does_not_fit_names_one_that_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["recipe", "llama.cpp", "-m", "12b:q8_0", "--assume", "RTX 4060", "--json"]) == 1
    fix = json.loads(capsys.readouterr().out)["blocked"][0]["fix"]
    assert fix.startswith("g4spec recipe llama.cpp -m 12b:")
    assert run([*shlex.split(fix)[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["commands"]


# ---- draft lengths have one source


@pytest.mark.parametrize("model", ["31b:qat-q4_0", "26b:qat-q4_0", "12b:qat-q4_0"])
@pytest.mark.parametrize("split", [(), ("-ncmoe", "4")])
def test_doctor_and_recipe_give_one_draft_length(
    model: str, split: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    if split and not model.startswith("26b"):
        return
    options = ["-m", model, "-md", "mtp", "--assume", "RTX 5090", *split, "--json"]
    assert run(["recipe", "llama.cpp", *options]) == 0
    words = shlex.split(json.loads(capsys.readouterr().out)["commands"][0])
    n = words[words.index("--spec-draft-n-max") + 1]
    assert int(n) <= 3, "a QAT target agrees less with the assistant"
    assert run(["doctor", "--engine", "llama.cpp", *options]) == 0
    sections = json.loads(capsys.readouterr().out)["sections"]
    (advice,) = [s for s in sections if s["title"].startswith("Draft length")]
    assert f"--spec-draft-n-max {n} for code" in advice["lines"][0]["text"]


def test_no_problem_states_a_draft_length_of_its_own() -> None:
    own = re.compile(r"\d+ drafted|draft-n-max \d|num_speculative_tokens \d")
    assert [p.id for p in FACTS.all(ProblemFact) if own.search(p.fix)] == []


# ---- targets come from a named place


def test_a_recipe_names_files_that_somebody_has() -> None:
    for size in FACTS.all(SizeFact):
        for engine in ("llama.cpp", "g4spec"):
            m = questions.build_machine(FACTS, "H100", ())
            q = questions.build_question(FACTS, size.id, "mtp", None, None, None, None)
            assert q is not None
            r = recipe.make(FACTS, m, q, engine)
            assert re.match(r"(unsloth|google)/gemma-4-\S+(gguf|GGUF)", r.model), r.model
    for row in FACTS.all(WeightsFact):
        if "llama.cpp" in row.engines and row.rank < 90:
            assert row.gguf, row.id


def test_a_tuned_checkpoint_is_converted(capsys: pytest.CaptureFixture[str]) -> None:
    given = "someone/gemma-4-12B-it-tuned:q8_0"
    assert run(["recipe", "llama.cpp", "-m", given, "--assume", "H100", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    made = "g4spec convert someone/gemma-4-12B-it-tuned --type q8_0 -o target.gguf"
    assert out["prepare"][0] == made and "-m target.gguf" in out["commands"][0]


def test_llama_cpp_is_measured_with_its_own_server() -> None:
    row = FACTS.get(FlagFact, "flag-bench-llamacpp")
    assert "vllm" not in row.text and row.text.startswith("curl")
    assert "timings" in row.reason and "draft_n_accepted" in row.reason


# ---- names of drafts and types


def test_help_and_docs_list_every_draft(capsys: pytest.CaptureFixture[str]) -> None:
    from g4spec.advisor.document import document
    from g4spec.cli import _host_options

    option = _host_options.Draft.__metadata__[0]  # type: ignore[attr-defined]
    page = document()
    for row in FACTS.all(DraftFact):
        names = lookup.draft_names(row)
        assert names[0] in re.findall(r"[\w-]+", option.help), row.id
        assert all(f"`{name}`" in page for name in names), row.id
    assert "ngram" in option.help


@pytest.mark.parametrize("engine", ["llama.cpp", "g4spec"])
def test_n_gram_lookup_is_a_draft(engine: str) -> None:
    d = ask("RTX 3090", "12b:q4_k_m", "ngram", engine=engine)
    plain = ask("RTX 3090", "12b:q4_k_m", engine=engine)
    assert d.works and d.plans[0].total == plain.plans[0].total
    m = questions.build_machine(FACTS, "RTX 3090", ())
    q = questions.build_question(FACTS, "12b:q4_k_m", "ngram", None, None, None, None)
    assert q is not None
    command = recipe.make(FACTS, m, q, engine).commands[0]
    assert ("-md ngram" if engine == "g4spec" else "--spec-type ngram-simple") in command
    assert "draft.gguf" not in command


def test_a_misspelled_n_gram_lookup_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "-m", "31b", "-md", "ngrams", "--assume", "RTX 3090"]) == 2
    assert "Did you mean ngram?" in capsys.readouterr().err


def test_an_unknown_type_gets_the_list_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "-m", "12b:q9"]) == 2
    listed = set(re.findall(r"[a-z0-9_-]+", capsys.readouterr().err))
    assert {"q3_k_m", "q2_k", "iq3_xxs", "q8_0", "qat-q4_0"} <= listed


@pytest.mark.parametrize("type", ["q3_k_s", "q3_k_l", "q4_k_s", "q5_k_s"])
def test_a_type_is_not_taken_for_one_with_another_suffix(type: str) -> None:
    (option,) = lookup.find_target(FACTS, f"12b:{type}").formats
    assert option.format == type.upper()


def test_computed_sizes_are_near_those_of_published_files() -> None:
    for row in FACTS.all(WeightsFact):
        size = FACTS.get(SizeFact, row.model)
        if row.format.lower() in ("q8_0", "q4_k_m") and row.model in ("31b", "26b", "12b"):
            made = runtime_support.file_bytes(size, row.format.lower())
            assert made == pytest.approx(row.gb * 1e9, rel=0.06), row.id


def test_lengths_for_experts_in_ram() -> None:
    draft = lookup.find_draft(FACTS, "zlab", lookup.find_target(FACTS, "26b"))
    when = Situation(engine="llama.cpp", cc=(8, 9), experts_in_ram=True)
    assert lengths.start_length(FACTS, draft, when) == 1


# ---- names of machines


def test_headings_name_the_memory_and_the_product() -> None:
    m = questions.build_machine(FACTS, "rtx 4060 ti 8gb", ())
    assert m.title == "RTX 4060 Ti 8GB"
    assert questions.build_machine(FACTS, "2x sm_86 24GB", ()).title == "2x sm_86 24GB"
    d = ask("4060 ti", "12b", "mtp")
    assert d.brief is not None and '"RTX 4060 Ti 16GB"' in d.brief.command


def test_a_wrong_size_suggests_the_capability_of_the_card(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["doctor", "--assume", "RTX 4060 Ti 24GB"]) == 2
    assert "sm_89 24GB" in capsys.readouterr().err
