"""
Distils a DINOv2 teacher into a Raptor: `accelerate launch training/distill.py --help`.

Exit codes: 0 finished; 2 refused, nothing was begun; 3 stopped, for what its last line says; 75 stopped by SIGTERM,
with a checkpoint if it was training; 130 by Ctrl-C, without one. After 3, 75 and 130 the same command goes on from the
last checkpoint.
"""

from pathlib import Path

from raptor_hf.distillation import DataArguments, DistillationArguments, ModelArguments
from raptor_hf.distillation.arguments import PHASE_FLAGS
from raptor_hf.distillation.faults import RunStopped, Terminated, on_sigterm, terminate
from raptor_hf.distillation.run import distill, use_every_core
from raptor_hf.parser import ConfigArgumentParser
from raptor_hf.summary import fidelity_table


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(
        (ModelArguments, DataArguments, DistillationArguments), exclusive=(PHASE_FLAGS,), description=__doc__
    )
    quickstart = Path(__file__).parent / "configs" / "quickstart.yaml"
    model_args, data_args, args = parser.parse(argv, quickstart, unless=("teacher", "dataset"))
    use_every_core(args)
    if args.process_index == 0:
        print(f"Distilling in {args.world_size} process(es), on {args.device.type}.", flush=True)
    try:
        with on_sigterm(terminate):
            results = distill(model_args, data_args, args)
    # ImportError: of what an argument of Trainer asks for.
    except (ValueError, ImportError) as error:
        if args.log_level == "debug":
            raise
        parser.error(str(error))
    except RunStopped as stop:
        if args.log_level == "debug":
            raise
        anew = " (Without --overwrite_output_dir: that would begin anew.)" if args.overwrite_output_dir else ""
        parser.exit(stop.exit_code, f"{parser.prog}: {' '.join(str(stop).split())}{anew}\n")
    except (KeyboardInterrupt, Terminated) as stop:
        exit_code = getattr(stop, "exit_code", 130)
        parser.exit(exit_code, f"{parser.prog}: interrupted; the same command goes on from the last checkpoint.\n")
    if args.process_index == 0:
        print(fidelity_table(results))
        print(f"Saved to {args.output_dir}: RaptorModel.from_pretrained({args.output_dir!r})")


if __name__ == "__main__":
    main()
