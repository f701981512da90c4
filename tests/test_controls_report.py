import json
import runpy
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from raptor_hf.controls.report import QUESTIONS, flatten, write_report
from raptor_hf.files import write_json

SCRIPT = Path(__file__).parents[1] / "eval" / "report.py"
NASTY = "<script>alert('x')</script> | ** \n`a`"


class Tags(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.found, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def run_dir(tmp_path):
    members = {"2": {"accuracy": 0.9, "final_cosine": 0.8, "parameters": 1234, "phase_sizes": [6, 6]}}
    scaling = {"members": members, "teacher": {"accuracy": 0.95, "parameters": 5678}}
    write_json(tmp_path / "a" / "scaling.json", {"arguments": {"teacher": NASTY}, "results": scaling})
    write_json(tmp_path / "runs_of_mine" / "knn.json", {"results": {NASTY: 0.123456, "accuracy": {"k = 10": 0.5}}})
    figure = Figure(figsize=(1, 1))
    figure.savefig(tmp_path / "a" / "scaling.png")
    # A member's own results, a checkpoint's state and a file of something else are no answers.
    write_json(tmp_path / "a" / "runs" / "k2" / "results.json", {"fidelity": {}, "phase_sizes": [1]})
    write_json(tmp_path / "a" / "checkpoint-2" / "results.json", {"fidelity": {}, "phase_sizes": [1]})
    write_json(tmp_path / "a" / "similarity.json", {"similarity": []})
    return tmp_path


def test_figures_are_embedded_and_everything_from_the_data_is_escaped(run_dir):
    page, _ = write_report(run_dir)
    tags = Tags(page.read_text())
    names = {tag for tag, _ in tags.found}
    assert not names & {"script", "link", "iframe"}
    images = [attributes for tag, attributes in tags.found if tag == "img"]
    assert len(images) == 1 and images[0]["src"].startswith("data:image/png;base64,iVBOR")
    assert not any("href" in attributes for _, attributes in tags.found)
    assert NASTY in tags.text and "0.1235" in tags.text and "90.00% cosine 0.8000, 1,234 parameters" in tags.text


def test_the_markdown_table_has_a_row_for_each_question_and_says_what_was_not_run(run_dir):
    _, markdown = write_report(run_dir, run_dir / "elsewhere")
    lines = markdown.read_text().strip().splitlines()
    assert markdown.parent == run_dir / "elsewhere" and len(lines) == 2 + len(QUESTIONS)
    # Pipes that aren't escaped delimit cells.
    assert {line.replace("\\|", "").count("|") for line in lines} == {5}
    assert sum("not run" in line for line in lines) == len(QUESTIONS) - 2
    assert "<script>" not in markdown.read_text()
    (scaling,) = (line for line in lines if "scaling.json" in line)
    assert "k = 2: 90.00%" in scaling and "<br>teacher: 95.00%" in scaling and "96.1 % of the teacher" in scaling


def test_a_file_that_is_broken_or_of_another_version_is_said_to_be(run_dir):
    (run_dir / "depth.json").write_text('{"results": ')
    write_json(run_dir / "partitions.json", {"results": {"rmse": 0.5}})
    page, markdown = write_report(run_dir)
    assert "depth.json can&#39;t be read" in page.read_text()
    (partitions,) = (line for line in markdown.read_text().splitlines() if "partitions.json" in line)
    assert "rmse: 0.5" in partitions and "is not as this version writes it (KeyError: 'groups')" in partitions


def test_scalars_are_found_wherever_they_are():
    value = {"a": {"b": [1, 2.0], "c": None}, "d": [{"e": True}, {"e": 0.123456}], "matrix": [[1.0]], "n": 12345}
    assert dict(flatten(value)) == {"a, b": "1 2", "d 1, e": "True", "d 2, e": "0.1235", "n": "12,345"}
    assert dict(flatten({"x": float("nan")})) == {"x": "nan"}


def test_the_script_writes_both_and_refuses_a_folder_without_results(run_dir, tmp_path_factory, capsys):
    main = runpy.run_path(str(SCRIPT))["main"]
    main(["--run_dir", str(run_dir)])
    assert "report.html" in capsys.readouterr().out and (run_dir / "report.md").is_file()
    for folder, message in ((tmp_path_factory.mktemp("empty"), "holds no results"), (run_dir / "no", "no folder")):
        with pytest.raises(SystemExit) as refused:
            main(["--run_dir", str(folder)])
        assert refused.value.code == 2 and message in capsys.readouterr().err


def test_what_a_model_is_found_to_do_is_told_of_the_dynamics(tmp_path):
    claims = [{"name": "low rank", "verdict": "holds", "measured": "6.1 dimensions"}]
    write_json(tmp_path / "dynamics.json", {"arguments": {}, "models": [{"name": "k3", "claims": claims}]})
    _, markdown = write_report(tmp_path)
    assert "k3, low rank: holds. 6.1 dimensions" in markdown.read_text()


def test_a_distillations_results_are_an_answer(tmp_path):
    curve = {"cosine": [1.0, 0.9, 0.95], "r2": [1, 1, 1], "relative_error": [0, 0, 0]}
    results = {"fidelity": {"after_stage2": {"cls": curve}}, "phase_sizes": [1, 1]}
    (tmp_path / "results.json").write_text(json.dumps(results))
    _, markdown = write_report(tmp_path)
    assert "cls cosine at the last layer, after stage2: 0.950, lowest 0.900" in markdown.read_text()
