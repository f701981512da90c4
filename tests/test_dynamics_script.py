import html
import json
import re
import runpy
from pathlib import Path

import datasets
import numpy as np
import pytest
from matplotlib.figure import Figure
from tiny import picture, tiny_teacher

from raptor_hf import RaptorModel
from raptor_hf.dynamics import report
from raptor_hf.images import load_image_processor

script = runpy.run_path(str(Path(__file__).parents[1] / "eval" / "dynamics.py"))
main = script["main"]
NASTY = "<script>alert($1_$)</script>&"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher, its undistilled Raptor, and nine pictures of three classes in a folder that names itself badly."""
    folder = tmp_path_factory.mktemp("dynamics")
    teacher = tiny_teacher(registers=2)
    raptor = RaptorModel.from_teacher(teacher, [3, 3])
    for name, model in (("teacher", teacher), (NASTY.replace("/", "-"), raptor)):
        model.save_pretrained(folder / name)
        load_image_processor("no model here", 28).save_pretrained(folder / name)
    text = datasets.Value("string")
    features = datasets.Features({"image": datasets.Image(), "kind": text, "words": [text], "sparse": text})
    kinds = [f"class {i % 3}" for i in range(9)]
    rows = {"image": [picture(seed) for seed in range(9)], "kind": kinds, "words": [kinds] * 9}
    rows["sparse"] = [None, *kinds[1:]]
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "images&<b>.parquet")
    return folder


@pytest.fixture
def no_figures(monkeypatch):
    """Drawing is slow, and one test looks at figures."""
    monkeypatch.setitem(main.__globals__, "draw_figures", lambda *args: {})


def run(folder, out, *flags):
    data = ["--dataset", str(folder / "images&<b>.parquet"), "--batch_size", "4"]
    main([*data, "--output_dir", str(folder / out), *flags])
    return json.loads((folder / out / "dynamics.json").read_text())


def test_teacher_and_raptor_side_by_side(folder, capsys, monkeypatch):
    # Saving takes the time: every figure is drawn, some are saved.
    sections = {section.name: section for section in report.SECTIONS}
    saved = ["angular_speed", "boundaries", "self_correction", "recurrence"]
    monkeypatch.setattr(report, "SECTIONS", [sections[name] for name in saved])
    raptor = folder / NASTY.replace("/", "-")
    flags = ["--teacher", str(folder / "teacher"), "--model", str(raptor), "--label_column", "kind", "--report"]
    results = run(folder, "both", *flags, "--perturbed_samples", "3", "--epsilons", "0.1", "--iterations", "12")
    teacher, model = results["models"]
    assert (teacher["family"], model["family"]) == ("dinov2_with_registers", "raptor")
    assert teacher["phase_sizes"] == model["phase_sizes"] == [3, 3]
    for result in (teacher, model):
        assert result["images"] == 9 and set(result["tokens"]) == {"cls", "register", "patch"}
        assert set(result["self_correction"]) == {"cls", "register", "patch"}
        assert result["tokens"]["cls"]["basins"]["classes"] == 3
        assert len(result["claims"]) == 8
    assert "recurrence" in model and "recurrence" not in teacher
    assert sum(model["recurrence"][0]["outcomes"].values()) == 8
    assert model["parameters"] < teacher["parameters"]
    (comparison,) = results["comparisons"]
    assert comparison["model"] == raptor.name and min(comparison["epsilon"].values()) > 0
    for result in (teacher, model):
        for section in sections.values():
            if section.needs is None or section.needs in result:
                figure = section.plot(result, "title")
                assert isinstance(figure, Figure) and figure.axes[0].has_data()
        for name in ("angular_speed", "self_correction"):
            for ending in ("png", "svg"):
                assert (folder / "both" / f"{result['slug']}_{name}.{ending}").stat().st_size > 1000
    printed = capsys.readouterr().out
    for claim in model["claims"]:
        assert f"- {claim['name']}: {claim['verdict']}. {claim['measured']}" in printed

    page = (folder / "both" / "report.html").read_text()
    assert NASTY.replace("/", "-") not in page and html.escape(NASTY.replace("/", "-"), quote=True) in page
    assert "<b>" not in page and "images&amp;&lt;b&gt;.parquet" in page
    # Nothing is fetched and nothing is run.
    assert not re.search(r"<script|<link|<iframe|(src|href)=\"(?!data:image/svg|#)|url\(|@import|https?:", page)
    assert page.count("<img ") == 3 * 2 + 1
    for claim in (*teacher["claims"], *model["claims"]):
        assert html.escape(claim["measured"]) in page.replace("&#39;", "&#x27;")


def test_a_raptor_that_is_its_teacher_has_its_dynamics(folder, tmp_path, no_figures):
    teacher = tiny_teacher(registers=2)
    RaptorModel.from_teacher(teacher, [1] * 6).save_pretrained(tmp_path / "same")
    load_image_processor("no model here", 28).save_pretrained(tmp_path / "same")
    flags = ["--teacher", str(folder / "teacher"), "--model", str(tmp_path / "same"), "--perturbed_samples", "0"]
    results = run(folder, "same", *flags)
    first, second = (result["tokens"]["patch"] for result in results["models"])
    for key in ("convergence", "angular_speed", "coherence"):
        np.testing.assert_allclose(first[key]["mean"], second[key]["mean"], atol=1e-5)
    assert max(results["comparisons"][0]["epsilon"].values()) < 1e-5
    assert "self_correction" not in results["models"][0]


def test_phases_are_found_or_given(folder, no_figures):
    flags = ["--model", str(folder / "teacher"), "--perturbed_samples", "0", "--max_samples", "3"]
    (found,) = run(folder, "found", *flags, "--num_phases", "2")["models"]
    assert len(found["phase_sizes"]) == 2 and found["phases_from"] == "found on its layer similarity"
    (given,) = run(folder, "given", *flags, "--phase_sizes", "1", "5")["models"]
    assert given["phase_sizes"] == [1, 5] and given["images"] == 3


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--phase_sizes", "4", "4"], "sum to the 6 layers"),
        (["--start_layers", "6"], "below the model's 6 layers"),
        (["--epsilons", "0"], "epsilons must be numbers from 1e-4 to 10"),
        (["--epsilons", "0.1", "nan"], "epsilons must be numbers from 1e-4 to 10"),
        (["--dataset", "digits", "--split", "nowhere"], "no split nowhere"),
        (["--label_column", "image"], "holds no classes"),
        (["--label_column", "words"], "holds no classes"),
        (["--label_column", "sparse"], "lacks 1 of 9 labels"),
        (["--label_column", "colour"], "no column colour"),
        (["--image_size", "30"], "30"),
        (["--num_phases", "7"], "7 phases"),
        (["--max_samples", "0"], "max_samples must be at least 1"),
        (["--teacher", "no/such/folder/at/all"], "can't be loaded"),
    ],
)
def test_refuses_in_one_line(folder, capsys, flags, message):
    with pytest.raises(SystemExit) as exit_info:
        run(folder, "refused", "--model", str(folder / "teacher"), *flags)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert exit_info.value.code == 2 and message in error and error.count("error:") == 1
    assert not (folder / "refused").exists()


def test_no_two_models_share_their_files():
    slugs = script["slugs"](["teach-6", "teach_6", "teach_6_2", "teach 6"])
    assert slugs == ["teach_6", "teach_6_2", "teach_6_2_2", "teach_6_3"]


def test_the_split_is_validation_or_the_only_one(tmp_path):
    data = datasets.Dataset.from_dict({"image": [picture(0)]}, features=datasets.Features({"image": datasets.Image()}))
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "two")
    datasets.DatasetDict({"test": data}).save_to_disk(tmp_path / "one")
    assert script["default_split"]("digits") == "validation"
    assert script["default_split"](str(tmp_path / "one")) == "test"
    with pytest.raises(ValueError, match="no split validation: --split must name one of train, test"):
        script["default_split"](str(tmp_path / "two"))


def test_all_are_measured_at_the_first_raptors_size_and_each_raptor_is_compared(folder, tmp_path, capsys, no_figures):
    raptor = RaptorModel.from_teacher(tiny_teacher(registers=2), [2, 4])
    for name, size in (("small", 28), ("large", 56)):
        raptor.save_pretrained(tmp_path / name)
        load_image_processor("no model here", size).save_pretrained(tmp_path / name)
    models = [str(folder / "teacher"), str(tmp_path / "large"), str(tmp_path / "small")]
    results = run(folder, "sizes", "--model", *models, "--perturbed_samples", "0", "--max_samples", "2")
    assert results["arguments"]["image_size"] == 56
    assert [model["image_size"] for model in results["models"]] == [56] * 3
    assert f"{models[0]} is measured at 56 pixels, the size of {models[1]}." in capsys.readouterr().out
    compared = [(each["target"], each["model"]) for each in results["comparisons"]]
    assert compared == [("teacher", "large"), ("teacher", "small")]
    last = ["--model", models[1], models[0], "--perturbed_samples", "0", "--max_samples", "2"]
    (comparison,) = run(folder, "last", *last)["comparisons"]
    assert comparison["target"] == "teacher"


def test_an_output_folder_that_is_a_file_is_refused(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SystemExit) as exit_info:
            run(folder, path, "--model", str(folder / "teacher"))
        assert exit_info.value.code == 2 and "is no folder that can be written to" in capsys.readouterr().err


def test_json_holds_no_nan():
    assert script["finite"]({"a": [1.0, float("nan")], "b": float("inf")}) == {"a": [1.0, None], "b": None}


def test_phases_are_told_where_there_are_several_or_one():
    similarity = [[1.0, 0.5, 0.25], [0.5, 1.0, 0.25], [0.25, 0.25, 1.0]]
    sentences = [
        report._similarity_sentence({"similarity": similarity, "phase_sizes": sizes}) for sizes in ([2, 1], [1] * 3)
    ]
    assert sentences[0].endswith("is 0.50 inside and 0.25 across phases.")
    assert sentences[1].endswith("is 0.33 across phases.")
    one = report._similarity_sentence({"similarity": [[1.0, 0.5], [0.5, 1.0]], "phase_sizes": [2]})
    assert one == "A single phase, of layers 1–2. Their mean similarity is 0.50."
    assert report._similarity_sentence({"similarity": [[1.0]], "phase_sizes": [1]}).endswith("layers 1–1.")
