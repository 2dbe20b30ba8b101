"""What makes a gate of ``check`` and ``scan``: the options that say what fails, and what is let through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import click

from ckptool.checking.policy import (
    CONDITIONS,
    DEFAULT,
    IGNORED,
    UNREADABLE,
    Policy,
    Rule,
    read_baseline,
    read_policy,
    refuse_unknown_word,
)
from ckptool.cli.options import AnyPath, choices
from ckptool.cli.text import say
from ckptool.cli.verbs import F, takes, together
from ckptool.errors import MalformedFile
from ckptool.messages import show

_FAILS = (
    "Exit with 1 only for a code (CK205), for a grade (code, system) or severity (info, warning, error) and all that "
    f"is worse, or for what cannot be opened ({UNREADABLE}). Repeatable"
)


def gate_options(default: str) -> Callable[[F], F]:
    """Return what adds the options to a verb, which fails by ``default`` where none is given."""
    return together(
        click.option(
            "--fail-on",
            multiple=True,
            metavar="WHAT",
            shell_complete=choices(lambda: CONDITIONS),
            help=f"{_FAILS}; by default: {default}.",
        ),
        click.option("--policy", type=AnyPath(), metavar="FILE", help="Read from FILE what fails, and what is known."),
        takes(
            "--allow", "NAME", "Let calls of a name or glob through, but not to the system. Repeatable.", multiple=True
        ),
        takes("--ignore", "CODE", "Let findings with a code through. Repeatable.", multiple=True),
        click.option(
            "--baseline",
            type=AnyPath(),
            metavar="FILE",
            help="Let through what FILE has, which --digest --json -o FILE wrote, of files that are the same.",
        ),
    )


_NEEDED: Final = {
    "values": ("CK110", "CK111", "CK112", "CK113", "CK119"),
    "deep": ("CK104", "CK105"),
}
"""Codes that are found only with an option."""


def policy_of(options: Mapping[str, Any]) -> Policy | None:
    """Return what the options say; None if they say nothing."""
    if not any(options[name] for name in ("fail_on", "policy", "allow", "ignore", "baseline")):
        return None
    try:
        for name, known in (("fail_on", CONDITIONS), ("ignore", IGNORED)):
            for word in options[name]:
                refuse_unknown_word(word, known)
    except MalformedFile as error:
        hint = "The option is given once for each." if "," in word else error.hint
        raise click.BadParameter(f"{error.message}. {hint}") from error
    found = read_policy(options["policy"]) if options["policy"] else Policy()
    for option, codes in _NEEDED.items():
        unseen = [code for code in options["fail_on"] or found.fail_on or () if code in codes]
        if unseen and not (options.get(option) or (option == "deep" and options.get("values"))):
            raise click.UsageError(f"{unseen[0]} is found only with --{option}: add it, or leave out the code.")
    for rule in found.ended:
        say(f"Note: the policy no longer ignores {show(rule)}", err=True)
    return found._replace(
        fail_on=options["fail_on"] or found.fail_on or DEFAULT,
        is_gate=bool(options["fail_on"] or options["policy"]),
        allow=(*((name, "--allow") for name in options["allow"]), *found.allow),
        ignore=(*(Rule(code, reason="--ignore") for code in options["ignore"]), *found.ignore),
        baseline=read_baseline(options["baseline"]) if options["baseline"] else {},
    )
