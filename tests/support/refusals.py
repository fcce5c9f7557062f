"""Checks, in this process, how a command line refuses bad input."""

import os

import pytest

import main
from elastic.errors import UserError


def assert_refused(arguments, words, logs, capsys):
    """Asserts that main.py refuses the arguments in one line with `words` and leaves no file.

    It may raise only errors that command_line.run turns into exit status 2.
    """
    try:
        main.check_arguments(main.parse_arguments(arguments))
    except UserError as error:
        message = str(error)
        assert '\n' not in message
    except SystemExit as stop:  # argparse
        assert stop.code == 2
        message = capsys.readouterr().err
    else:
        pytest.fail('accepted')
    assert words in message and os.listdir(str(logs)) == []
