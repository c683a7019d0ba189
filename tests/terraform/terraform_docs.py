"""The tables of inputs and outputs in terraform/README.md, in terraform-docs' form, from the .tf files.

python tests/terraform/terraform_docs.py      writes them
"""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "terraform"
BEGIN, END = "<!-- BEGIN_TF_DOCS -->", "<!-- END_TF_DOCS -->"


def blocks(text: str, kind: str) -> dict[str, str]:
    """The bodies of top-level blocks, by name."""
    return dict(re.findall(rf'^{kind} "(\w+)" {{\n(.*?)^}}', text, flags=re.M | re.S))


def attribute(body: str, name: str) -> str | None:
    """The expression of an attribute of a block, without the indentation of the block."""
    found = re.search(rf"^  {name}\s*= (.*?)(?=^  \w|^$|\Z)", body, flags=re.M | re.S)
    return re.sub(r"^  ", "", found[1].rstrip(), flags=re.M) if found else None


def cell(expression: str) -> str:
    """A long expression is a block, as terraform-docs has it."""
    if "\n" in expression:
        return f"<pre>{expression}</pre>".replace("\n", "<br/>").replace("|", "\\|")
    return f"`{expression}`"


def text_of(body: str) -> str:
    return (attribute(body, "description") or '""').strip('"')


def inputs(text: str) -> str:
    rows = []
    for name, body in sorted(blocks(text, "variable").items()):
        default = attribute(body, "default")
        shown = "n/a" if default is None else cell(default)
        required = "yes" if default is None else "no"
        rows.append(f"| {name} | {text_of(body)} | {cell(attribute(body, 'type') or 'any')} | {shown} | {required} |")
    head = "| Name | Description | Type | Default | Required |\n|------|-------------|------|---------|:--------:|\n"
    return "## Inputs\n\n" + head + "\n".join(rows)


def outputs(text: str) -> str:
    rows = [f"| {name} | {text_of(body)} |" for name, body in sorted(blocks(text, "output").items())]
    return "## Outputs\n\n| Name | Description |\n|------|-------------|\n" + "\n".join(rows)


def tables(folder: Path = FOLDER) -> str:
    return f"{inputs((folder / 'variables.tf').read_text())}\n\n{outputs((folder / 'outputs.tf').read_text())}"


def with_tables(readme: str) -> str:
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    path = FOLDER / "README.md"
    path.write_text(with_tables(path.read_text()))
