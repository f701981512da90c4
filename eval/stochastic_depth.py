"""Stochastic depth and phases: trains teachers of several rates, distils each, and compares similarity with fit."""

from raptor_hf.controls import stochastic_depth
from raptor_hf.controls.command import run_control


def main(argv: list[str] | None = None):
    run_control(stochastic_depth, __file__, __doc__, argv)


if __name__ == "__main__":
    main()
