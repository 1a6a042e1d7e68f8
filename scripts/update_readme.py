#!/usr/bin/env python
"""Write the table of all settings into README.md, from the config's own docs; ``--check`` only compares."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

from finetune.config import Config, field_docs

README = Path(__file__).resolve().parent.parent / "README.md"
START, END = "<!-- settings: made by scripts/update_readme.py -->", "<!-- end of settings -->"


def settings_table() -> str:
    """All settings with their defaults as a Markdown table."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    config = Config()
    for section in fields(config):
        values = getattr(config, section.name)
        docs = field_docs(type(values))
        for item in fields(values):
            value = getattr(values, item.name)
            default = "" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"
            lines.append(f"| `{section.name}.{item.name}` | {default} | {docs[item.name]} |")
    return "\n".join(lines)


def updated(text: str) -> str:
    """README text with the current table."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{settings_table()}\n\n{END}{after}"


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        sys.exit(0 if updated(text) == text else "README.md: run scripts/update_readme.py")
    README.write_text(updated(text), encoding="utf-8")
