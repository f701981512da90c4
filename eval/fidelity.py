"""Fidelity: how near a Raptor stays to its teacher, layer by layer, and what the two cost."""

from dataclasses import dataclass, field
from itertools import groupby

from torch.utils.data import DataLoader

from raptor_hf import RaptorModel
from raptor_hf.cost import cost
from raptor_hf.fidelity import check_same_shape, compare, epsilon_brh
from raptor_hf.images import CenterCrop, PixelValues, crop_size
from raptor_hf.parser import ConfigArgumentParser
from raptor_hf.plots import plot_fidelity, save_figure
from raptor_hf.probes import EvalArguments
from raptor_hf.summary import table
from raptor_hf.teachers import load_teacher, load_teacher_config


@dataclass(kw_only=True)
class Arguments(EvalArguments):
    teacher: str = field(metadata={"help": "The teacher that the Raptor was distilled from: Hub name or folder."})
    test_split: str = field(default="validation", metadata={"help": "Split that is measured on."})


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(Arguments, description=__doc__)
    (args,) = parser.parse(argv)
    try:
        teacher_config = load_teacher_config(args.teacher)
        model, processor = args.load_model()
        if not isinstance(model, RaptorModel):
            raise ValueError(f"{args.model} is a {model.config.model_type} model: --model must be a Raptor.")
        check_same_shape(model.config, teacher_config)
        images = args.load_test()
        teacher = load_teacher(args.teacher).to(model.device)
        pixel_values = PixelValues(images, CenterCrop(processor))
        loader = DataLoader(pixel_values, args.batch_size, num_workers=args.dataloader_num_workers)
        fidelity = compare(model, teacher, loader, progress=True)
    except ValueError as error:
        parser.error(str(error))
    epsilon = {name: epsilon_brh(curves["relative_error"]) for name, curves in fidelity["closed_loop"].items()}
    # Of an assignment that isn't contiguous, every run of layers of one block.
    phases = [len(list(run)) for _, run in groupby(model.config.layer_blocks)]
    costs = {name: cost(m, crop_size(processor)) for name, m in (("model", model), ("teacher", teacher))}
    path = args.write_results(
        "fidelity",
        {
            "fidelity": fidelity,
            "epsilon_brh": epsilon,
            "cost": costs,
            "phases": phases,
            "images": len(images),
            "image_size": crop_size(processor),
        },
    )
    by_type = {way: {name: c for name, c in curves.items() if name != "all"} for way, curves in fidelity.items()}
    for metric in ("cosine", "relative_error"):
        figure = plot_fidelity(by_type, phases, metric)
        save_figure(figure, path.with_name(f"fidelity_{metric}"))
    print(
        table(
            ["token", "cosine, last layer", "lowest", "one step, lowest", "R², last layer", "epsilon-BRH"],
            [
                [
                    name,
                    f"{curves['cosine'][-1]:.4f}",
                    f"{min(curves['cosine']):.4f}",
                    f"{min(fidelity['one_step'][name]['cosine']):.4f}",
                    f"{curves['r2'][-1]:.4f}",
                    f"{epsilon[name]:.4f}",
                ]
                for name, curves in fidelity["closed_loop"].items()
            ],
        )
    )
    print(
        table(
            ["", "parameters", "megabytes", "GFLOP an image"],
            [
                [name, f"{c['parameters']:,}", f"{c['stored_bytes'] / 1e6:.1f}", f"{c['flops'] / 1e9:.2f}"]
                for name, c in costs.items()
            ],
        )
    )


if __name__ == "__main__":
    main()
