"""Finding phases: the time of the exact search, and that of the layer similarity beside the teacher's own pass."""

from dataclasses import asdict, dataclass, field
from itertools import combinations, pairwise
from pathlib import Path

import torch
from timing import compare
from transformers import Dinov2Config, Dinov2Model

from raptor_hf.files import write_json
from raptor_hf.parser import ConfigArgumentParser, check_at_least_one
from raptor_hf.phases import check_partition, find_phases, layer_similarity, partition_objective
from raptor_hf.summary import table


@dataclass
class Arguments:
    num_layers: list[int] = field(default_factory=lambda: [12, 24, 40], metadata={"help": "Depths."})
    num_phases: int = field(default=4, metadata={"help": "Phases to find."})
    hidden_size: int = field(default=384, metadata={"help": "Width of the teacher for the similarity."})
    image_size: int = field(default=112, metadata={"help": "Pixels."})
    batch_size: int = field(default=32, metadata={"help": "Images a batch."})
    rounds: int = field(default=5, metadata={"help": "Times that each side is measured, in turn."})
    output_dir: str = field(default="outputs/benchmarks", metadata={"help": "Where phases.json goes."})

    def __post_init__(self):
        check_at_least_one(self, "num_phases", "hidden_size", "image_size", "batch_size", "rounds")
        for layers in self.num_layers:
            check_partition(layers, self.num_phases, min_size=2)


def try_all_cuts(similarity, num_phases: int, min_size: int = 2) -> list[int]:
    """The same answer as find_phases gives, by trying every segmentation."""
    num_layers, best = len(similarity), (-float("inf"), None)
    for cuts in combinations(range(min_size, num_layers - min_size + 1), num_phases - 1):
        edges = [0, *cuts, num_layers]
        sizes = [high - low for low, high in pairwise(edges)]
        if min(sizes) >= min_size:
            assignment = [block for block, size in enumerate(sizes) for _ in range(size)]
            best = max(best, (partition_objective(similarity, assignment), sizes))
    return best[1]


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(Arguments, description=__doc__)
    (args,) = parser.parse(argv)
    torch.manual_seed(0)
    results = {"search": {}, "similarity": {}}
    for num_layers in args.num_layers:
        states = torch.randn(num_layers, 64).cumsum(dim=0)
        states = torch.nn.functional.normalize(states, dim=1).double()
        similarity = states @ states.T
        sides = {
            "all cuts": lambda s=similarity: try_all_cuts(s, args.num_phases),
            "find_phases": lambda s=similarity: find_phases(s, args.num_phases),
        }
        results["search"][num_layers] = compare(sides, args.rounds, 0.2, f"{num_layers} layers")
    config = Dinov2Config(hidden_size=args.hidden_size, num_attention_heads=6, image_size=args.image_size)
    teacher = Dinov2Model(config).eval().requires_grad_(False)
    pixel_values = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    results["similarity"] = compare(
        {
            "forward": lambda: teacher(pixel_values),
            "layer_similarity": lambda: layer_similarity(teacher, [pixel_values]),
        },
        args.rounds,
        desc="similarity",
    )
    write_json(Path(args.output_dir) / "phases.json", {"arguments": asdict(args), "results": results})
    rows = [
        [f"{layers} layers", *(f"{1000 * seconds:.2f}" for seconds in row["median"].values())]
        for layers, row in results["search"].items()
    ]
    print(table([f"{args.num_phases} phases of", "all cuts, ms", "find_phases, ms"], rows))
    median = results["similarity"]["median"]
    print(
        f"Layer similarity: {args.batch_size / median['layer_similarity']:.1f} images/s, the forward pass alone "
        f"{args.batch_size / median['forward']:.1f}"
    )


if __name__ == "__main__":
    main()
