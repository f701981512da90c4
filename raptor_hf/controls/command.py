"""The command line of a control: arguments in, JSON, figure and table out."""

from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from ..distillation import DataArguments, DistillationArguments, ModelArguments
from ..distillation.arguments import PHASE_FLAGS
from ..distillation.faults import RunStopped
from ..distillation.run import run_settings, use_every_core
from ..files import write_json
from ..parser import ConfigArgumentParser, check_at_least_one
from ..plots import save_figure
from .experiment import Experiment


def run_control(control: ModuleType, script: str, description: str, argv: list[str] | None = None):
    """
    Runs a control and writes `<output_dir>/<script>.json`, its figure beside it, and a table to the screen.

    Args:
        control: a module with `Arguments` (a dataclass), `measure(experiment) -> dict`, `plot(results) -> Figure` and
            `summary(results) -> str`.
        script: the script's own path; `configs/<script>_digits.yaml` beside it is read where no teacher, data set or
            other config is given.
        description: for `--help`.
        argv: the command line.
    """
    path = Path(script)
    parser = ConfigArgumentParser(
        (control.Arguments, ModelArguments, DataArguments, DistillationArguments),
        exclusive=(PHASE_FLAGS,),
        description=description,
    )
    default = path.parent / "configs" / f"{path.stem}_digits.yaml"
    own, model, data, run = parser.parse(argv, default, unless=("teacher", "dataset"))
    use_every_core(run)
    try:
        check_at_least_one(own, "max_samples")
        if data.streaming:
            raise ValueError("streaming is not for controls, which draw images from the whole split: leave it out.")
        results = control.measure(Experiment(own, model, data, run))
    except ValueError as error:
        if run.log_level == "debug":
            raise
        parser.error(str(error))
    except RunStopped as stop:
        if run.log_level == "debug":
            raise
        parser.exit(stop.exit_code, f"{parser.prog}: {' '.join(str(stop).split())}\n")
    if run.process_index == 0:
        arguments = asdict(own) | run_settings(model, data, run)
        write_json(Path(run.output_dir) / f"{path.stem}.json", {"arguments": arguments, "results": results})
        save_figure(control.plot(results), Path(run.output_dir) / path.stem)
        print(control.summary(results))
        print(f"Saved to {run.output_dir}")
