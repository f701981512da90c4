"""Gathers a folder of results into one self-contained HTML page and one Markdown table."""

from dataclasses import dataclass, field

from raptor_hf.controls.report import write_report
from raptor_hf.parser import ConfigArgumentParser


@dataclass
class Arguments:
    run_dir: str = field(default="outputs", metadata={"help": "Folder that holds results, perhaps in folders of it."})
    output_dir: str | None = field(default=None, metadata={"help": "Where the report goes. Default: run_dir."})


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(Arguments, description=__doc__)
    (args,) = parser.parse(argv)
    try:
        page, markdown = write_report(args.run_dir, args.output_dir)
    except ValueError as error:
        parser.error(str(error))
    print(f"Saved to {page} and {markdown}")


if __name__ == "__main__":
    main()
