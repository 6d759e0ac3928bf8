"""Run examples/tour.ipynb in an empty folder, and write it with what its cells print and draw.

pip install nbclient ipykernel && python docs/generate_tour.py
"""

import base64
import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

PAGE = Path(__file__).parents[1] / "examples/tour.ipynb"


def without(place: str, text: object) -> object:
    return text.replace(f"{place}/", "") if isinstance(text, str) else text


def main() -> None:
    notebook = nbformat.read(PAGE, as_version=4)
    kernel = notebook.metadata["kernelspec"]
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        NotebookClient(notebook, kernel_name="python3").execute()
        picture = base64.b64encode(Path("hits.svg").read_bytes()).decode()
        for cell in notebook.cells:
            cell.metadata.clear()
            for output in cell.get("outputs", ()):
                said = output.get("data", output)
                said.update({kind: without(place, text) for kind, text in said.items()})
    for cell in notebook.cells:
        if cell.id == "hit-rates":
            cell.attachments = {"hits.svg": {"image/svg+xml": picture}}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    nbformat.write(notebook, PAGE)


if __name__ == "__main__":
    main()
