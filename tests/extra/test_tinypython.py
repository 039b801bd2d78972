"""tinypython.py: solutions pass tests and examples, sentences name one function, splits hold out
what they say.
"""

import ast
import dataclasses
import doctest
import json
import random
from pathlib import Path

import pytest
import tinypython
from conftest import run

import problems
import prompts

CONFIG = tinypython.Config(n=3000, tasks=20)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    out = tmp_path_factory.mktemp("world")
    tinypython.main(dataclasses.replace(CONFIG, out=str(out)))
    return out


def rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_examples_and_hidden_tests_pass_for_the_solutions(world):
    sources = [row["prompt"] + row["response"] for row in rows(world / "pairs.jsonl")]
    for split in tinypython.SPLITS:
        for row in rows(world / f"{split}.jsonl"):
            source = row["prompt"] + row["canonical_solution"]
            sources.append(source)
            assert len(row["test_cases"]) >= 5
            scope = tinypython.load(source)
            exec(row["test"], scope)
            scope["check"](scope[row["entry_point"]])
            for test in row["test_cases"]:
                exec(test, scope)
    examples = 0
    for source in sources:
        text = ast.get_docstring(ast.parse(source).body[-1])
        scope = tinypython.load(source)
        found = doctest.DocTestParser().get_doctest(text, scope, "example", None, 0)
        examples += bool(found.examples)
        assert not doctest.DocTestRunner().run(found).failed, source
    assert 0.4 < examples / len(sources) < 0.6


def test_tests_reject_constants_and_mutants():
    made, rng, survivors, tried = tinypython.World(2), random.Random(0), 0, 0
    for _ in range(60):
        f, _ = made.draw(rng, (1, 2, 3, 4))
        tests = tinypython.tests_of(f, rng)
        if not tests:
            continue
        assert len({repr(out) for _, out in tests}) > 1  # no constant answer passes
        calls = [tinypython.call(f, rng) for _ in range(50)]
        right = tinypython.load(f.prompt() + f.solution)
        for body in tinypython.mutants(f.solution, rng):
            body = body.replace("while ", "while next(ticks) and ")
            try:
                wrong = tinypython.load(f.prompt() + body, ticks=iter([1] * 9999))
            except SyntaxError:
                continue
            if any(tinypython.result(wrong, x) != tinypython.result(right, x) for x in calls):
                tried += 1
                survivors += all(tinypython.result(wrong, text) == [out] for text, out in tests)
    assert tried > 200
    assert survivors < 0.05 * tried  # ten mutants are tried when tests are chosen, here all


def test_no_sentence_describes_two_functions_and_splits_hold_out_what_they_say():
    made, described = tinypython.World(1), {}
    draw = made.draw

    def noted(*args):
        f, split = draw(*args)
        if not split:
            described.setdefault(f.template, []).append(f.what)
        return f, split

    made.draw = noted
    list(made.train(3000))
    made.draw = draw
    assert sum(map(len, described.values())) == 3000 > len(described)  # some sentences come twice
    assert all(what == first for first, *others in described.values() for what in others)
    for split in ("constants", "composed", "phrased"):
        trained = set(made.sentences)
        for row in made.tasks(split, 20):
            operations = row["operations"]
            combination = tuple(sorted(operations[row["level"] == 2 and len(operations) > 2 :]))
            assert (combination in made.combinations) == (split != "composed")
        assert trained < set(made.sentences)


def test_a_world_is_decided_by_its_seed(world, tmp_path, capsys):
    cfg = dataclasses.replace(CONFIG, out=str(tmp_path / "again"))
    tinypython.main(cfg)
    files = ["train", "pairs", "holes", *tinypython.SPLITS]
    for file in ("meta.json", *(f"{name}.jsonl" for name in files)):
        assert (world / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    tinypython.main(cfg)
    assert "nothing to do" in capsys.readouterr().out
    (tmp_path / "again" / "holes.jsonl").unlink()
    tinypython.main(cfg)
    assert (world / "holes.jsonl").read_bytes() == (tmp_path / "again/holes.jsonl").read_bytes()
    with pytest.raises(ValueError, match="another world"):
        tinypython.main(dataclasses.replace(cfg, seed=1))


def test_holes_pairs_and_rows_are_the_same_programs(world):
    pairs = [row["prompt"] + row["response"] for row in rows(world / "pairs.jsonl")]
    holes = rows(world / "holes.jsonl")
    assert pairs == [row["prompt"] + row["response"] + row["suffix"] for row in holes]
    assert pairs == [row["content"] for row in rows(world / "train.jsonl")]
    assert len(pairs) == CONFIG.n


def test_benchmarks_and_coupled_grpo_read_the_tasks(world):
    for split in tinypython.SPLITS:
        path = world / f"{split}.jsonl"
        assert len(problems.parse_problems("humaneval", path.read_bytes())) == len(rows(path)) > 0
        assert len(prompts.read_tasks(path)) == len(rows(path))


def test_every_operation_and_template_has_at_least_six_phrasings():
    operations = [*tinypython.MAPS.values(), *tinypython.PREDICATES.values(), tinypython.FOLDS]
    for table in [*operations, *tinypython.LEVELS.values()]:
        for key, (_, _, _, groups) in table.items():
            assert sum(len(texts) for group in groups for texts in group) >= 6, key


def test_files_of_somebody_else_are_not_touched(tmp_path):
    (tmp_path / "train.jsonl").write_text("mine")
    with pytest.raises(ValueError, match="holds other files than a TinyPython"):
        tinypython.main(dataclasses.replace(CONFIG, out=str(tmp_path)))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_split_that_is_none_is_refused(tmp_path):
    result = run("extra/tinypython.py", "--splits", "nowhere", f"--out={tmp_path / 'out'}")
    assert result.returncode
    assert all(word in result.stderr for word in ("--splits", "nowhere", "composed"))
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
