"""Max-cut phases against random ones: distils one Raptor for each partition of depth, with the same small budget."""

from raptor_hf.controls import partitions
from raptor_hf.controls.command import run_control


def main(argv: list[str] | None = None):
    run_control(partitions, __file__, __doc__, argv)


if __name__ == "__main__":
    main()
