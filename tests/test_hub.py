"""The model card, saving with it, and a round trip through huggingface_hub's own client."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hub_server import HubServer
from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.errors import HFValidationError
from PIL import Image
from safetensors import safe_open
from transformers import BitImageProcessorPil

from raptor_hf import RaptorConfig, RaptorForImageClassification, RaptorModel
from raptor_hf.hub import push_to_hub, save_with_card
from raptor_hf.model_card import Comparison, model_card

HOSTILE = [
    "<script>alert(1)<",
    '"><img src=x onerror=alert(1)>',
    "[a](b) ![c](d)",
    "a\n---\nlicense: evil\n---\n# b",
    "a | b | c",
    "`a` **b** __c__ ~~d~~ <e> &lt;f&gt;",
    "a: {b: [c]} # 'd' \"e\" !!python/object",
    "{{ 7 * 7 }}{% raw %}",
    "```\n\n> a\n\n- b",
    "a\\|b\u202e\x00\u2028c",
    "&#60;b&#62;",
]


def tiny_config(**kwargs):
    fields = {"phase_sizes": [2, 1], "hidden_size": 16, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    return RaptorConfig(**(fields | kwargs))


def figures(offset=0.0):
    return {
        "cosine": [0.2, 0.9 - offset, 0.7 - offset, 0.8 - offset],
        "r2": [1.0, 0.6, 0.5, 0.55],
        "relative_error": [0.9, 0.2, 0.45, 0.3],
    }


def full_results(**kwargs):
    results = {
        "teacher": "facebook/dinov2-small",
        "dataset": "someone/photos",
        "phase_sizes": [2, 1],
        "image_size": 224,
        "arguments": {"learning_rate": 3e-4, "seed": 7, "init": "teacher", "output_dir": "/home/me/out"},
        "wall_time_seconds": 7200.0,
        "images_seen": 123456,
        "parameters": {"teacher": 2000000, "raptor": 500000},
        "fidelity": {
            "before": {"cls": figures(0.3), "patch": figures(0.3)},
            "after_stage2": {"cls": figures(), "patch": figures(0.05)},
        },
    }
    return results | kwargs


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return RaptorModel(tiny_config()).eval()


def test_metadata(model):
    data = model_card(model, full_results()).data
    assert data.license == "apache-2.0"
    assert data.base_model == "facebook/dinov2-small"
    assert data.datasets == ["someone/photos"]
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "image-feature-extraction"
    assert {"raptor", "dinov2", "arxiv:2512.19941"} <= set(data.tags)
    measured = {result.metric_name: result.metric_value for result in data.eval_results}
    # Of the last stage only, and without index 0, the embeddings.
    assert measured["cls: cosine to the teacher, last layer"] == 0.8
    assert measured["cls: cosine to the teacher, lowest of all layers"] == 0.7
    assert measured["cls: relative error to the teacher, largest of all layers"] == 0.45
    assert measured["cls: R² of the teacher's state, last layer"] == 0.55
    assert measured["patch: cosine to the teacher, last layer"] == 0.75
    assert len(measured) == 8
    assert {result.dataset_name for result in data.eval_results} == {"someone/photos"}


def test_body_states_what_was_measured(model):
    text = model_card(model, full_results(), repo_id="me/raptor").text
    assert "[facebook/dinov2-small](https://huggingface.co/facebook/dinov2-small)" in text
    assert "| 1 | 1, 2 | 2 |" in text and "| 2 | 3 | 1 |" in text
    assert "| Before training | cls | 0.500 | 0.400 | 0.550 | 0.450 |" in text
    assert "| After stage 2 | patch | 0.750 | 0.650 | 0.550 | 0.450 |" in text
    assert "| 3 | 0.800 | 0.550 | 0.300 | 0.750 | 0.550 | 0.300 |" in text
    assert "| Parameters | 2,000,000 | 500,000 | 25.0 % |" in text
    for words in ("123,456", "2.0 hours", "| seed | 7 |", "2512.19941", 'from_pretrained("me/raptor")'):
        assert words in text
    assert "register" not in text and "After stage 1" not in text


def test_figures_name_the_images_they_were_measured_on(model):
    card = model_card(model, full_results(arguments={"validation_dataset": "/srv/held out"}))
    assert {result.dataset_name for result in card.data.eval_results} == {"held out"}
    assert "on images of held out." in card.text and "- Dataset: someone/photos" in card.text
    assert card.data.datasets == ["someone/photos"]


def test_silent_about_what_is_not_given(model):
    text = model_card(model).text
    for words in ("keeps of its teacher", "How it was trained", "cosine", "its teacher.", "None", "nan", "undefined"):
        assert words not in text
    data = model_card(model).data.to_dict()
    assert not {"license", "base_model", "datasets", "model-index", "model_name"} & set(data)
    full = full_results()
    for key in full:
        partial = {name: value for name, value in full.items() if name != key}
        assert "None" not in model_card(model, partial).text
        assert "None" not in model_card(model, {key: full[key]}).text
        model_card(model, full | {key: None})
    # A run that went wrong: figures that are no numbers are not stated.
    broken = figures() | {"r2": [1.0, 0.5, 0.5, float("nan")]}
    card = model_card(model, full_results(fidelity={"after_stage1": {"cls": broken, "patch": {"cosine": []}}}))
    assert "| After stage 1 | cls | 0.800 | 0.700 | – | 0.450 |" in card.text
    assert len(card.data.eval_results) == 3


def test_local_paths_stay_out(model, tmp_path, monkeypatch):
    (tmp_path / "teachers" / "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    arguments = {"logging_dir": "/srv/logs", "output_dir": "/srv/out", "config": "a.yaml", "hub_token": "hf_secret"}
    arguments |= {"source": "/srv/x", "places": ["C:\\srv\\x"], "teacher": "q", "teacher_dir": "q", "width": 3}
    for teacher in (str(tmp_path / "teachers" / "small"), "teachers/small", "~/srv/small/", "C:\\srv\\small"):
        card = model_card(model, full_results(teacher=teacher, dataset="/srv/photos", arguments=arguments))
        assert "Raptor of small" in card.text and "photos" in card.text and "| width | 3 |" in card.text
        for words in ("srv", str(tmp_path), "teachers/small", "secret", "a.yaml", "| teacher"):
            assert words not in str(card)
        assert card.data.base_model is None and card.data.datasets is None and card.data.license is None
        assert card.data.eval_results[0].dataset_name == "photos"


@pytest.mark.parametrize("hostile", HOSTILE)
def test_names_do_not_break_out(model, hostile):
    markdown_it = pytest.importorskip("markdown_it")
    parser = markdown_it.MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])

    def structure_and_texts(card):
        structure, texts = [], []
        for token in parser.parse(card.text):
            children = token.children or []
            texts.append("".join(child.content for child in children if child.type.startswith("text")))
            structure += [(part.type, part.tag, part.attrs) for part in (token, *children) if part.type != "text"]
        return structure, texts

    def card(name):
        labelled = RaptorForImageClassification(tiny_config(id2label={0: name, 1: "b"}, label2id={name: 0, "b": 1}))
        evaluation = EvalResult("image-classification", name, name, name, name, metric_name=name, task_name=name)
        results = full_results(
            teacher=f"x y/{name}", dataset=f"x y/{name}", arguments={name: name, "a": [name]}, image_size=name
        )
        return model_card(labelled, results, eval_results=[evaluation], license=name)

    hostile_card, plain_card = card(hostile), card("name")
    structure, texts = structure_and_texts(hostile_card)
    assert structure == structure_and_texts(plain_card)[0]
    # Name and value of an argument, task, dataset, metric and value of a result: readable as they are, on one line.
    assert texts.count(" ".join(re.sub(r"[^ -~]", " ", hostile).split())) == 7
    metadata = yaml.safe_load(re.match(r"---\n(.*?)\n---\n", str(hostile_card), re.DOTALL)[1])
    assert metadata["license"] == hostile and metadata.keys() == plain_card.data.to_dict().keys()
    assert ModelCard(str(hostile_card)).data.to_dict() == metadata
    assert "49" not in hostile_card.text


def test_what_a_published_raptor_tells_besides(model):
    def verdicts(*words):
        return {"claims": [{"name": f"claim {i}", "verdict": word} for i, word in enumerate(words)]}

    earlier = {"images_seen": 13000, "wall_time_seconds": 3000.0}
    results = full_results(
        teacher="facebook/dinov2_small",
        arguments={"early_image_size": 112, "early_image_ratio": 0.96},
        earlier_training=earlier,
        float16_bytes={"teacher": 8000, "raptor": 1000},
    )
    card = model_card(
        model,
        results,
        fidelity_at={112: {"cls": figures()}, 224: {"cls": figures(0.1)}},
        speed={
            "machine": "A <b>, 2 threads",
            "results": [
                {"batch_size": 8, "image_size": 112, "dtype": "float32", "mode": "eager"}
                | {"median": {"Dinov2Model": 2.0, "RaptorModel": 1.0}}
                | {"ratio": {"median": 2.0, "lowest": 1.9, "highest": 2.1}}
            ],
        },
        dynamics=[verdicts("holds", "<b>"), verdicts("does not hold", "holds")],
        recipes=["the_first.yaml", "then.yaml --phase_sizes 7 5 --init outputs/the-first"],
    )
    text = card.text
    measured = [(result.dataset_config, result.metric_name) for result in card.data.eval_results]
    assert len(set(measured)) == len(measured) and {size for size, _ in measured} == {"112 pixels", "224 pixels"}
    assert "| Before this training, at 224 pixels | cls |" in text and "After stage 2" not in text
    assert "| 8 | 112 | float32 | eager | 4.0 | 8.0 | 2.00, 1.90 to 2.10 |" in text
    assert "| Bytes in float16 | 8,000 | 1,000 | 12.5 % |" in text
    assert "<summary>At 112 pixels, layer by layer</summary>" in text and "After stage 2, layer by layer" not in text
    assert "| Layer | cls, cosine | cls, R&#178; | cls, relative error |" in text.replace("R²", "R&#178;")
    assert "| 3 | 0.700 | 0.550 | 0.300 |" in text.partition("At 224 pixels")[2]
    assert "| claim 0 | holds | does not hold |" in text and "<b>" not in text
    assert "the training of the Raptor it went on from, 13,000 images seen in 50 minutes" in text
    launch = "accelerate launch training/distill.py --config training/configs/"
    flags = "--phase_sizes 7 5 --init outputs/the-first"
    first, then = (
        text.index(f"{launch}{recipe} --teacher facebook/dinov2_small")
        for recipe in ("the_first.yaml", f"then.yaml {flags}")
    )
    assert first < then and "how well is in the tables above" in text
    assert "- Image size: 224 pixels, 112 in the first 96 % of the steps" in html.unescape(text)
    for recipe in ("a\n```", "a.yaml; ls", "a.yaml --init $(ls)"):
        with pytest.raises(ValueError, match="recipes must be names of files"):
            model_card(model, recipes=[recipe])


def test_comparisons_with_the_teacher_and_a_warning_of_few_images(model):
    comparisons = [
        Comparison("linear probe", "Stamps", "accuracy", 0.8, 0.6, errors=(0.02, 0.03)),
        Comparison("kNN", "x", "y", 0.0, 0.1),
    ]
    card = model_card(model, full_results(train_images=5000), comparisons=comparisons, picture="components.png")
    assert "| linear probe | Stamps | accuracy | 0.800 ± 0.020 | 0.600 ± 0.030 | 75.0 % |" in html.unescape(card.text)
    assert "| kNN | x | y | 0.000 | 0.100 | – |" in card.text
    assert "  - linear probe, Stamps: 75.0 %" in html.unescape(card.text) and "  - kNN" not in card.text
    assert "](components.png)" in card.text and "- Different images: 5,000" in card.text
    assert "few pictures" in card.text and "--init path/to/this-raptor --teacher" in card.text
    values = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert values["linear probe: accuracy"] == 0.6
    assert "few pictures" not in model_card(model, full_results(train_images=1_000_000)).text


def test_further_results_and_licence(model):
    result = EvalResult("image-classification", "stamps", "Stamps", "accuracy", 0.913, metric_name="kNN top-1")
    card = model_card(model, eval_results=[result], license="mit")
    assert "| image-classification | Stamps | kNN top-1 | 0.913 |" in card.text
    assert card.data.license == "mit" and card.data.eval_results == [result]


def test_phases_in_words():
    text = model_card(RaptorModel(tiny_config(phase_sizes=[3, 1], phase_iterations=[5, 1]))).text
    assert "| 1 | 1 to 3 | 5 |" in text
    text = model_card(RaptorModel(tiny_config(phase_sizes=None, block_assignment=[0, 1, 0, 0]))).text
    assert "| 1 | 1, 3, 4 | 3 |" in text and "| 2 | 2 | 1 |" in text


def test_saved_folder_holds_each_block_once(model, tmp_path):
    folder = save_with_card(model, BitImageProcessorPil(), full_results(), tmp_path / "raptor")
    assert {"README.md", "config.json", "preprocessor_config.json"} < {path.name for path in folder.iterdir()}
    assert ModelCard.load(folder / "README.md").data.base_model == "facebook/dinov2-small"
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    assert {key.split(".")[1] for key in stored if key.startswith("blocks.")} == {"0", "1"}
    assert {key: list(value.shape) for key, value in model.state_dict().items()} == stored
    # No second copy lies in the file either: float32 weights, and a header that is small beside them.
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert weights < (folder / "model.safetensors").stat().st_size < weights + 8192


def test_bad_calls_say_what_to_do(model, tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json.*save_with_card"):
        push_to_hub(tmp_path, "me/raptor")
    with pytest.raises(ValueError, match="save_with_card"):
        push_to_hub(tmp_path, "me/raptor", results={})
    for repo_id in ("a/b/c", 'me/x"); import os #', "../x"):
        with pytest.raises(HFValidationError):
            push_to_hub(tmp_path, repo_id)
        with pytest.raises(HFValidationError):
            model_card(model, repo_id=repo_id)


# HF_ENDPOINT counts only if it is set before the client is imported, so the client has a process of its own.
CLIENT = """
import json, logging, re, sys
from pathlib import Path
import torch
from huggingface_hub import HfApi, ModelCard, hf_hub_download, logging as hub_logging
from huggingface_hub.errors import HfHubHTTPError
from transformers import BitImageProcessorPil
from raptor_hf import RaptorModel
from raptor_hf.hub import push_to_hub, save_with_card

hub_logging.set_verbosity_debug()
logging.basicConfig(level=logging.DEBUG)
token, folder, results = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
model = RaptorModel.from_pretrained(folder)
pixels = torch.randn(2, 3, 28, 42, generator=torch.Generator().manual_seed(0))
expected = model(pixels).last_hidden_state
report = {"equal": {}}
try:
    push_to_hub(folder, "me/refused", token="hf_wrong_token")
except HfHubHTTPError as error:
    report["refused"] = error.response.status_code

report["url"] = push_to_hub(
    model, "me/raptor", image_processor=BitImageProcessorPil(), results=results, token=token, private=True
)
push_to_hub(folder, "me/first", token=token)
push_to_hub(folder, "short", token=token, revision="v1")
model.push_to_hub("me/raptor", token=token)
model.push_to_hub("me/own", token=token, tags=["birds"])
for name, revision in (("me/raptor", "main"), ("me/short", "v1")):
    again = RaptorModel.from_pretrained(name, revision=revision)
    report["equal"][name] = torch.equal(again(pixels).last_hidden_state, expected)
report["files"] = sorted(HfApi().list_repo_files("me/short", revision="v1"))
report["main_files"] = sorted(HfApi().list_repo_files("me/short"))
card = ModelCard.load("me/raptor")
report["base_model"] = card.data.base_model
code = re.search(r"```python\\n(.*?)```", card.text, re.DOTALL)[1]
scope = {}
exec(code, scope)
report["shape"] = list(scope["outputs"].last_hidden_state.shape)
print("REPORT" + json.dumps(report))
"""


def test_round_trip_through_the_client(model, tmp_path):
    folder = save_with_card(model, BitImageProcessorPil(), full_results(), tmp_path / "raptor")
    Image.new("RGB", (300, 260), "orange").save(tmp_path / "photo.jpg")
    # What a training folder holds besides must stay at home.
    (folder / "checkpoint-1").mkdir()
    for name in ("training_args.bin", "results.json", "checkpoint-1/model.safetensors", "checkpoint-1/config.json"):
        (folder / name).write_text("{}")
    with HubServer() as hub:
        environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        arguments = [hub.TOKEN, str(folder), json.dumps(full_results())]
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, *arguments],
            cwd=tmp_path,
            env={key: value for key, value in environment.items() if key not in ("HF_TOKEN", "HF_HUB_CACHE")},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        report = json.loads(done.stdout.split("REPORT")[1])
        raptor, short = hub.repos["me/raptor"], hub.repos["me/short"]
        requests = hub.requests
    assert report["equal"] == {"me/raptor": True, "me/short": True}
    # A repository's name without its owner is completed, and the card's code ran as it stands there.
    assert 'from_pretrained("me/short")' in short.branches["v1"]["README.md"].decode()
    assert report["base_model"] == "facebook/dinov2-small" and report["shape"] == [1, 257, 16]
    assert report["url"].startswith(hub.url) and report["refused"] == 401
    assert (raptor.visibility, short.visibility) == ("private", None)
    # Pushing the model again by its own method keeps the card.
    assert "What it keeps of its teacher" in raptor.branches["main"]["README.md"].decode()
    # Its own method gives a new repository a Raptor's card too.
    own = ModelCard(hub.repos["me/own"].branches["main"]["README.md"].decode())
    assert "weight-tied blocks" in own.content and 'from_pretrained("me/own")' in own.content
    assert {"raptor", "birds"} <= set(own.data.tags)
    assert report["main_files"] == []
    assert report["files"] == [
        "README.md",
        "config.json",
        "configuration_raptor.py",
        "model.safetensors",
        "modeling_raptor.py",
        "preprocessor_config.json",
    ]
    for path, content in (raptor.branches["main"] | short.branches["v1"]).items():
        assert str(tmp_path).encode() not in content, path
    # The token went to the server, and to no log.
    assert ("POST", "/api/models/me/raptor/commit/main", f"Bearer {hub.TOKEN}") in requests
    assert hub.TOKEN not in done.stdout + done.stderr
