"""Run examples/tour.ipynb and write it with what its cells print, where the argument says.

`python -m tests.notebook examples/tour.ipynb` does so in its own place, after a change of it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.pages import ROOT
from tests.support import HANGS

TOUR = ROOT / "examples" / "tour.ipynb"


def main(target: str) -> None:
    """A cell that raises raises here."""
    notebook = nbformat.read(TOUR, as_version=4)
    # as a front end does it: of a bar only what stands at last
    NotebookClient(notebook, timeout=HANGS, kernel_name="python3", coalesce_streams=True).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    nbformat.write(notebook, target)


def printed(path: Path) -> list[tuple[str, str]]:
    """The kinds and texts of each cell's outputs, without the times in bars."""
    outputs = []
    for cell in nbformat.read(path, as_version=4).cells:
        found = []
        for output in cell.get("outputs", ()):
            text = output.get("text") or output["data"]["text/plain"]
            kind = output.get("name") or output["output_type"]
            # a bar that gets shorter has blanks where it was longer
            found.append((kind, re.sub(r"\[\d+:.*\] *", "[times]", text)))
        outputs += sorted(found)  # a bar and what is printed after it arrive in either order
    return outputs


if __name__ == "__main__":
    main(sys.argv[1])
