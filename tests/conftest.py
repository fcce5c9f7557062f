"""Tests run on real TensorFlow with tiny models; its start-up notices are silenced here too."""

import command_line

command_line.quiet_tensorflow()
