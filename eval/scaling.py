"""Accuracy against parameters: distils a Raptor for each number of blocks, up to one for each layer."""

from raptor_hf.controls import scaling
from raptor_hf.controls.command import run_control


def main(argv: list[str] | None = None):
    run_control(scaling, __file__, __doc__, argv)


if __name__ == "__main__":
    main()
