"""Puts every layer of a teacher in every other's place, and compares layers of one phase with layers of two."""

from pathlib import Path

from raptor_hf.controls import layer_swap
from raptor_hf.parser import ConfigArgumentParser
from raptor_hf.plots import save_figure


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(layer_swap.Arguments, description=__doc__)
    (args,) = parser.parse(argv)
    try:
        results = layer_swap.measure(args)
    except ValueError as error:
        parser.error(str(error))
    args.write_results("layer_swap", results)
    save_figure(layer_swap.plot(results), Path(args.output_dir) / "layer_swap")
    print(layer_swap.summary(results))
    print(f"Saved to {args.output_dir}")


if __name__ == "__main__":
    main()
