"""The embedded example: a digits teacher, its Raptors of 2 and 3 phases, and a table of what they keep."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from transformers import AutoModelForImageClassification

from raptor_hf import RaptorForImageClassification
from raptor_hf.digits import digits_teacher, load_digits_dataset
from raptor_hf.files import read_json, write_json
from raptor_hf.images import CenterCrop, PixelValues, load_image_processor
from raptor_hf.summary import table
from raptor_hf.teachers import token_slices

OUTPUT_DIR = Path("outputs/quickstart")
DISTILL = Path(__file__).with_name("distill.py")


@torch.no_grad()
def classify(classifier, pixel_values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Features [cls, mean of patches] (images, 2 * hidden_size) and the classes (images,) that its head gives them."""
    tokens = classifier.base_model(pixel_values).last_hidden_state
    patches = tokens[:, token_slices(classifier.config)["patch"]]
    features = torch.cat((tokens[:, 0], patches.mean(dim=1)), dim=1)
    return features.numpy(), classifier.classifier(features).argmax(dim=1).numpy()


def summary(results: dict) -> str:
    """The results as a table, a column for each model."""
    rows = []
    for name, found in results.items():
        shares = {kind: found.get(f"{kind}_accuracy_share_of_teacher") for kind in ("head", "probe")}
        row = [f"Raptor, {name.replace('k', 'k = ')}" if name != "teacher" else name, f"{found['parameters']:,}"]
        for kind, share in shares.items():
            row.append(f"{found[f'{kind}_accuracy']:.2%}" + (f" ({share:.1%})" if share else ""))
        for token in ("cls", "patch"):
            curve = found["fidelity"]["after_stage2"][token]["cosine"] if "fidelity" in found else None
            row.append(f"{curve[-1]:.3f} / {min(curve):.3f}" if curve else "")
        rows.append(row)
    header = ["model", "parameters", "teacher's head", "linear probe", "cls cosine, last / lowest", "patch cosine"]
    return table(header, rows)


def main():
    folder = digits_teacher()
    for k in (2, 3):
        command = [sys.executable, "-m", "accelerate.commands.launch", str(DISTILL)]
        command += ["--config", str(DISTILL.parent / "configs" / "quickstart.yaml")]
        command += ["--num_phases", str(k), "--output_dir", str(OUTPUT_DIR / f"k{k}"), *sys.argv[1:]]
        subprocess.run(command, check=True, env=os.environ | {"TOKENIZERS_PARALLELISM": "false"})

    teacher = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()
    centre = CenterCrop(load_image_processor(str(folder)))
    images, labels = {}, {}
    for split in ("train", "test"):
        dataset = load_digits_dataset(split)
        rows = PixelValues(dataset, centre)
        images[split] = torch.stack([rows[i]["pixel_values"] for i in range(len(rows))])
        labels[split] = np.array(dataset["label"])

    results = {}
    for name in ("teacher", "k2", "k3"):
        classifier = teacher
        if name != "teacher":
            classifier = RaptorForImageClassification.from_pretrained(OUTPUT_DIR / name, dtype=torch.float32).eval()
            classifier.classifier.load_state_dict(teacher.classifier.state_dict())
        train_features, _ = classify(classifier, images["train"])
        test_features, predicted = classify(classifier, images["test"])
        probe = LogisticRegression(max_iter=2000).fit(train_features, labels["train"])
        results[name] = {
            "head_accuracy": float(np.mean(predicted == labels["test"])),
            "probe_accuracy": float(probe.score(test_features, labels["test"])),
            "parameters": classifier.base_model.num_parameters(),
        }
        if name != "teacher":
            run = read_json(OUTPUT_DIR / name / "results.json")
            results[name] |= {"phase_sizes": run["phase_sizes"], "fidelity": run["fidelity"]}
            for kind in ("head", "probe"):
                share = results[name][f"{kind}_accuracy"] / results["teacher"][f"{kind}_accuracy"]
                results[name][f"{kind}_accuracy_share_of_teacher"] = share
    write_json(OUTPUT_DIR / "results.json", results)
    print(summary(results))
    print(f"Results and figures: {OUTPUT_DIR}")


if __name__ == "__main__":
    main()
