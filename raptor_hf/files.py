"""Files that appear whole or not at all."""

import json
from pathlib import Path


def write_json(path: str | Path, content):
    """Writes JSON to one side, then renames it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(content, indent=2) + "\n")
    aside.replace(path)
