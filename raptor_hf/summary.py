"""Results as tables of text."""


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, columns aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in [header, *rows]]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def fidelity_table(results: dict) -> str:
    """A run's `results.json` as a table: for each moment and token type the cosine and R² at the last layer."""
    rows = []
    for moment, tokens in results["fidelity"].items():
        for name, curves in tokens.items():
            lowest = min(range(len(curves["cosine"])), key=curves["cosine"].__getitem__)
            rows.append(
                [
                    moment.replace("_", " ").replace("stage", "stage "),
                    name,
                    f"{curves['cosine'][-1]:.4f}",
                    f"{curves['cosine'][lowest]:.4f} (layer {lowest})",
                    f"{curves['r2'][-1]:.4f}",
                ]
            )
    phases = ", ".join(map(str, results["phase_sizes"]))
    head = f"Phases ({phases}), {results['images_seen']} images in {results['wall_time_seconds']:.0f} s"
    return head + "\n" + table(["moment", "token", "cosine, last layer", "lowest cosine", "R², last layer"], rows)
