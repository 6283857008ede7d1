"""The ``sluiceway`` command: serve, chat, pull, config.

Each command imports what it needs when it runs, so that ``--help`` answers at once. The flags of
``serve`` and ``config`` are those of the services' config models, grouped by service.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence

from services import __version__
from services.common.errors import SluicewayError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_PREFIX_HELP = """\
Every flag of a service can be given to that service alone: --worker.log-level debug.
The same settings can stand in a TOML file ([worker] log_level = "debug", see --config) or in the
environment (SLUICEWAY_WORKER__LOG_LEVEL=debug). Flags win over the environment, that over the file.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Without the program's name; ``None`` = this process's.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(words)
    try:
        options, unknown = parser.parse_known_args(words)
        if unknown:
            return _refuse(unknown, parser)
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except SluicewayError as error:
        print(f"sluiceway: {error.message}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; the interpreter must not complain as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that ``words`` name; the others have no flags yet."""
    parser = argparse.ArgumentParser(
        prog="sluiceway",
        description="Serve large language models through five gRPC services.",
        epilog="`sluiceway COMMAND --help` lists the flags of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sluiceway {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (text, add, run) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        if name in words:
            add(command)
    return parser


def _refuse(unknown: Sequence[str], parser: argparse.ArgumentParser) -> int:
    known = _flags_in(parser)
    for word in unknown:
        near = _nearest(word.split("=")[0], known)
        hint = f"; did you mean {near}?" if near else "; --help lists what there is"
        kind = "flag" if word.startswith("-") else "argument"
        print(f"sluiceway: unknown {kind} {word!r}{hint}", file=sys.stderr)
    return EXIT_USAGE


def _nearest(word: str, known: Sequence[str]) -> str | None:
    """The flag that was probably meant; what all flags have in common makes none a near one."""
    service, dot, _ = word.partition(".")
    prefix = f"{service}." if dot and any(f.startswith(f"{service}.") for f in known) else "--"
    names = {flag.removeprefix(prefix): flag for flag in known if flag.startswith(prefix)}
    near = difflib.get_close_matches(word.removeprefix(prefix), names, n=1)
    return names[near[0]] if near else None


def _flags_in(parser: argparse.ArgumentParser) -> list[str]:
    found: list[str] = []
    for action in parser._actions:
        found += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found += _flags_in(command)
    return found


def _add_service_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the launcher, then of each service; one that several have is listed once."""
    from services.common.config import ServiceConfig, add_config_file_flag, add_flags
    from services.launcher import settings

    parser.epilog = _PREFIX_HELP
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"smollm2, a model directory, or a hub id [default: {settings.DEFAULT_MODEL}]",
    )
    add_config_file_flag(parser)
    add_flags(parser.add_argument_group("serve"), settings.ServeConfig)
    shown = set(settings.ServeConfig.model_fields) | settings.LAUNCHER_ONLY
    everywhere = parser.add_argument_group("every service")
    add_flags(everywhere, ServiceConfig, skip=shown | settings.GATEWAY_ONLY)
    shown |= set(ServiceConfig.model_fields) - settings.GATEWAY_ONLY
    for service in settings.SERVICES:
        cls = settings.config_class(service)
        add_flags(parser.add_argument_group(service), cls, skip=shown)
        shown |= set(cls.model_fields)
        add_flags(parser, cls, prefix=f"{service}.")


def _serve(options: argparse.Namespace) -> int:
    from services.launcher.serve import serve
    from services.launcher.settings import split_flags

    return serve(options.model, split_flags(vars(options)), out=sys.stdout)


def _config(options: argparse.Namespace) -> int:
    from services.launcher.settings import resolve_settings, split_flags
    from services.launcher.show_config import config_lines

    for line in config_lines(resolve_settings(options.model, split_flags(vars(options)))):
        print(line)
    return 0


def _add_chat_flags(parser: argparse.ArgumentParser) -> None:
    from services.chat import ChatConfig
    from services.common.config import add_config_file_flag, add_flags

    add_config_file_flag(parser)
    add_flags(parser, ChatConfig)


def _chat(options: argparse.Namespace) -> int:
    from services.chat import ChatConfig, chat
    from services.common.config import resolve

    given = {name: getattr(options, name) for name in ChatConfig.model_fields}
    flags = {name: value for name, value in given.items() if value is not None}
    loaded = resolve(ChatConfig, section="chat", flags=flags, config_file=options.config)
    return chat(loaded.config, source=sys.stdin, out=sys.stdout, is_terminal=sys.stdin.isatty())


def _add_pull_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default="smollm2")
    parser.add_argument("--cache-dir", metavar="DIR", help="where models go [the user's cache]")


def _pull(options: argparse.Namespace) -> int:
    from services.pull import main as pull

    words = ["--cache-dir", options.cache_dir] if options.cache_dir else []
    return pull([options.model, *words])


_Command = tuple[
    str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]
]
_COMMANDS: dict[str, _Command] = {
    "serve": ("Start all services and serve MODEL.", _add_service_flags, _serve),
    "chat": ("Talk to a running server.", _add_chat_flags, _chat),
    "pull": ("Fetch MODEL and print where it lies.", _add_pull_flags, _pull),
    "config": (
        "Print every setting of every service and where its value came from.",
        _add_service_flags,
        _config,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
