"""How `--help` reads: options and commands under headings, examples below, in plain text.

Headings are typer's `rich_help_panel`; rich's own tables would cut the names of long options short.
"""

from typing import Any

from typer.core import TyperCommand, TyperGroup

OPTIONS = "Options"
RUN = "Run a service"
USE = "Use a service that runs"


class Command(TyperCommand):
    """Its options under their headings, those without one first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Called by the parser's help."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                heading = getattr(parameter, "rich_help_panel", None) or OPTIONS
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class Commands(TyperGroup):
    """Its commands under their headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Called by the parser's help."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        width = formatter.width - 6 - max(len(name) for name, _ in commands)
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in commands:
            if command is not None and not command.hidden:
                heading = getattr(command, "rich_help_panel", None) or "Commands"
                sections.setdefault(heading, []).append((name, command.get_short_help_str(width)))
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def examples(*lines: str) -> str:
    """An epilog whose lines stay as they are."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))
