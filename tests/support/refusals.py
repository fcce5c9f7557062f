"""How a command line refuses bad input: checked in the test's own process, for speed."""

import os

import pytest

import main
from elastic.command_line import UserError


def assert_refused(arguments, words, logs, capsys):
    """main.py refuses the arguments in one line with `words` in it, and leaves no file in `logs`.

    It may only raise what command_line.run turns into exit status 2.
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
