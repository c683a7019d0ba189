"""terraform/README.md against the files that it describes, and every variable and output described."""

import re
from pathlib import Path

import pytest
from terraform_docs import FOLDER, attribute, blocks, with_tables

MODULES = sorted(path.parent for path in FOLDER.rglob("variables.tf") if ".terraform" not in path.parts)


def test_tables_are_those_of_the_files() -> None:
    readme = (FOLDER / "README.md").read_text()
    assert readme == with_tables(readme), "run `python tests/terraform/terraform_docs.py`"


def test_every_module_is_named() -> None:
    named = re.findall(r"^\| `modules/(\w+)`", (FOLDER / "README.md").read_text(), flags=re.M)
    assert sorted(named) == sorted(path.name for path in (FOLDER / "modules").iterdir())


@pytest.mark.parametrize("folder", MODULES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_everything_has_a_type_and_a_description(folder: Path) -> None:
    variables = blocks((folder / "variables.tf").read_text(), "variable")
    assert variables
    for name, body in variables.items():
        assert attribute(body, "type") and attribute(body, "description"), name
    for name, body in blocks((folder / "outputs.tf").read_text(), "output").items():
        assert attribute(body, "description"), name


@pytest.mark.parametrize("folder", MODULES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_no_variable_is_unused(folder: Path) -> None:
    used = "".join(path.read_text() for path in folder.glob("*.tf") if path.name != "variables.tf")
    for name in blocks((folder / "variables.tf").read_text(), "variable"):
        assert re.search(rf"\bvar\.{name}\b", used), name
