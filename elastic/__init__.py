"""What the scripts in the root are made of.

A folder or module imports only from lines above its own. This is the only map, and a test reads it.

    compat/                         the only code that knows versions of TensorFlow and Keras
    durations, options, trees       times as text; what a flag is; trees of arrays
    settings                        each flag of a run: default, type, help, what it decides
    command_line                    flags, errors in one line, the start of TensorFlow
    files                           whole files, JSON, arrays
    figure_file                     what all figures look like
    device/                         host, energy, temperature and clock
    steps/, networks/, data/        the reduced step of a mask; backbone and head; images
    timing/, cache/, export/        timing table; activations kept and reused; LiteRT
    schemes/                        what is trained when: fixed masks, PruneTrain, solved head
    selection/, workers/            importance, items, the closed loop; several boards
    planning/                       what a run can afford: ways, deadline, cache
    runs/                           the run, its folder, records, checkpoints, tables of runs
    flags                           the flags of main.py, and what contradicts what
"""
