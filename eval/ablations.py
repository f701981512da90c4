"""What each part of the method is worth: distils a base run, and one run for each change of it."""

from raptor_hf.controls import ablations
from raptor_hf.controls.command import run_control


def main(argv: list[str] | None = None):
    run_control(ablations, __file__, __doc__, argv)


if __name__ == "__main__":
    main()
