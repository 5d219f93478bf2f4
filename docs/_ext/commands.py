"""Sphinx directive `commands`: the help text of `keyhole` and of each of its commands."""

from __future__ import annotations

from typing import Any

WIDTH = 88
"""Columns of a help text on the page."""


def help_texts() -> dict[str, str]:
    """The help text of every command, by its name; "keyhole" is that of all of them."""
    import typer.main

    from keyhole.cli import app

    group: Any = typer.main.get_command(app)
    context = group.make_context("keyhole", [], resilient_parsing=True)
    texts = {"keyhole": _help_of(group, None, "keyhole")}
    for name in group.list_commands(context):
        texts[name] = _help_of(group.get_command(context, name), context, name)
    return texts


def _help_of(command: Any, parent: Any, name: str) -> str:
    """The text that `--help` prints, at a fixed width."""
    settings = {"terminal_width": WIDTH, "max_content_width": WIDTH}
    context = type(command).context_class(command, info_name=name, parent=parent, **settings)
    return str(command.get_help(context))


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx about the directive. docutils is imported here: tests go without it."""
    from docutils import nodes
    from docutils.parsers.rst import Directive

    class Commands(Directive):
        def run(self) -> list[Any]:
            sections = []
            for name, text in help_texts().items():
                title = name if name == "keyhole" else f"keyhole {name}"
                section = nodes.section(ids=[title.replace(" ", "-")], names=[title])
                section += nodes.title(text=title)
                section += nodes.literal_block(text, text, language="text")
                sections.append(section)
            return sections

    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True}
