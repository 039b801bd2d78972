"""The steps of a Dream as a page and as an animation."""

import json
from xml.etree import ElementTree

import pytest
import steps
from conftest import refused_by

TEXT = [["a", 0, 1.0], ["b", 2, 0.5], ["<\f", 1, 0.9], ["\n", 0, 1.0], ["c", 2, 0.7]]


def written(tmp_path, *texts, out):
    (tmp_path / "steps.json").write_text("".join(json.dumps({"steps": x}) + "\n" for x in texts))
    steps.main(steps.Config(str(tmp_path / "steps.json"), str(tmp_path / out)))
    return (tmp_path / out).read_text()


def test_an_animation_writes_every_token_at_its_place_in_its_step(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "STEPS_S", 2.0)
    monkeypatch.setattr(steps, "REST_S", 2.0)
    text = written(tmp_path, TEXT, out="steps.svg")
    assert "white-space:pre" in text  # Chromium no longer reads xml:space
    tree = ElementTree.fromstring(text)
    first, last, *texts = [node for node in tree if node.tag.endswith("text")]
    assert (first.text, last.text) == ("first", "last")
    assert [node.text for node in texts] == ["a", "b", "< ", "c"]  # XML has no form feed
    assert [node.get("y") for node in texts] == ["43", "43", "43", "64"]  # c is on the next line
    starts = [[child.get("keyTimes") for child in node] for node in texts]
    assert starts == [[], ["0;0.500"], ["0;0.250"], ["0;0.500"]]  # of 4 seconds; a was given


def test_a_page_holds_all_texts_and_no_markup_of_theirs(tmp_path):
    page = written(tmp_path, TEXT, TEXT[:2], out="steps.html")
    assert "<\f" not in page
    record = page.partition('<script id="record" type="application/json">')[2].partition("</")[0]
    first, second = json.loads(record)
    assert first == [[*token, "", []] for token in TEXT]
    assert len(second) == 2


def test_a_file_without_steps_is_refused_in_one_line(tmp_path):
    path = tmp_path / "steps.json"
    for line in ('{"steps": 3}', "{}", "x", "[1]", '{"steps": [["a", 1]]}', "[" * 100_000):
        path.write_text(line)
        assert "holds no steps" in refused_by(steps, f"--file={path}")
    for line in ("", "[]", "\n \n"):
        path.write_text(line)
        assert "holds no steps" in refused_by(steps, f"--file={path}")
    assert "neither" in refused_by(steps, f"--file={path}", "--out=x.png")
    with pytest.raises(FileNotFoundError):
        steps.main(steps.Config(str(tmp_path / "none.json")))
