"""The reference of the command line and of the configuration, in Markdown, from the parsers."""

import argparse
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import tyro

from surrogap.cli.commands import COMMANDS

_OBJECTIVE = "--objective"
# Code as it is, then commands, flags, calls, names with underscores and file names.
_CODE = re.compile(
    rf"`[^`]*`|(?<![\w-])(surrogap (?:{'|'.join(COMMANDS)})\b|--[a-z][\w-]*(?: [A-Z]+\b)?"
    r"|\w+\.\w+\([^)]*\)|\w+_\w+|[\w*/-]*\.[a-z]\w+)(?!\w)"
)


class _ParserError(Exception):
    """Carries the parser out of a command."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser(command: str, *arguments: str) -> argparse.ArgumentParser:
    """Return the parser that a command uses where these are its arguments."""

    def cli(kind: Any, args: Any, **settings: Any) -> None:
        raise _ParserError(tyro.extras.get_parser(kind, **settings))

    module = import_module(f"surrogap.cli.{command.replace('-', '_')}")
    with mock.patch.object(tyro, "cli", cli):
        try:
            module.main(list(arguments))
        except _ParserError as found:
            return found.parser
    raise RuntimeError(f"{command} must read its options with tyro.cli.")


def commands() -> str:
    """Return a section for each command; settings of a configuration are left to its own page."""
    return "\n\n".join(f"## {name}\n\n{_command(name)}" for name in COMMANDS)


def configuration() -> str:
    """Return a section for each group of fields, and one for each objective's own."""
    groups = list(_groups(parser("train")))
    sections = []
    for title, about, actions in groups:
        if title == "objective":
            sections.append(
                f"## {title}\n\n{_coded(about)} Each objective has the fields that it uses."
            )
            sections += _objectives()
        elif title:
            sections.append(f"## {title}\n\n{_coded(about)}\n\n{_definitions(actions, _field)}")
    return "\n\n".join(sections)


GENERATED: dict[str, Callable[[], str]] = {"commands": commands, "configuration": configuration}


def _command(name: str) -> str:
    found = parser(name)
    parts = [_coded(str(found.description)), f"```\n{_usage(name, found)}\n```"]
    has_config = False
    for title, _, actions in _groups(found):
        if title:
            has_config = True
        elif actions:
            parts.append(_definitions(actions, _flag))
    if has_config:
        parts.append("It also takes a flag for each field of a [configuration](configuration.md).")
    return "\n\n".join(parts)


def _usage(name: str, found: argparse.ArgumentParser) -> str:
    positional = [
        str(a.metavar) if a.nargs != "?" else f"[{str(a.metavar).strip('[]')}]"
        for a in found._actions
        if not a.option_strings
    ]
    return " ".join(["surrogap", name, *positional, "[OPTIONS]"])


def _objectives() -> Iterator[str]:
    """Return the fields that all objectives share, then those of each."""
    (choose,) = (a for a in parser("train")._actions if _OBJECTIVE in a.option_strings)
    names = str(choose.metavar).strip("{}").split(",")
    fields = {}
    for name in names:
        groups = _groups(parser("train", _OBJECTIVE, name))
        fields[name] = next(actions for title, _, actions in groups if title == "objective")
    texts = {name: {_definition(a, _field) for a in actions} for name, actions in fields.items()}
    shared = set.intersection(*texts.values())
    everywhere = [a for a in fields[names[0]] if _definition(a, _field) in shared]
    yield _definitions([choose, *everywhere], _field)
    for name, actions in fields.items():
        own = [a for a in actions if _definition(a, _field) not in shared and a.dest != choose.dest]
        yield f"### {name}\n\n{_definitions(own, _field) or 'No other fields.'}"


def _groups(
    found: argparse.ArgumentParser,
) -> Iterator[tuple[str, str, list[argparse.Action]]]:
    """Yield groups of a configuration, and groups of a command's own options without a name."""
    for group in found._action_groups:
        actions = [a for a in group._group_actions if a.dest != "help"]
        names = {a.dest.split(".")[1] for a in actions if a.dest.startswith("config.")}
        yield "".join(names), str(group.description or ""), actions


def _definitions(actions: list[argparse.Action], title: Callable[[argparse.Action], str]) -> str:
    return "\n\n".join(_definition(action, title) for action in actions)


def _definition(action: argparse.Action, title: Callable[[argparse.Action], str]) -> str:
    text = " ".join(str(action.help).split())
    text = re.sub(r" \(default: (.*)\)$", r" Default: `\1`.", text).replace(" Default: ``.", "")
    return f"{title(action)}\n: {_coded(text)}"


def _coded(text: str) -> str:
    """Return a text of a parser with its code in backticks."""
    return _CODE.sub(lambda found: f"`{found[0].strip('`')}`", text)


def _flag(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {action.metavar}"
    if not action.option_strings:
        return f"`{action.metavar}`"
    return ", ".join(f"`{flag}{value}`" for flag in action.option_strings)


def _field(action: argparse.Action) -> str:
    name = action.dest.rpartition(".")[2].replace("-", "_")
    return f"`{name}`, {_flag(action)}"
