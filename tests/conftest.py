"""Tests run on real TensorFlow with tiny models; its start-up notices are silenced here too."""

import pytest

import command_line

command_line.quiet_tensorflow()
pytest.register_assert_rewrite('refusals')  # its assertions show what they compared, too
