"""What the scripts in the root are made of.

A folder or module imports only from lines above its own. This is the only map, and a test reads it.

    errors, texts, options, trees   errors in one line; times and tables; what a flag is; arrays
    compat/                         the only code that knows versions of TensorFlow and Keras
    settings                        each flag of a run: default, type, help, what it decides
    command_line, files             how a script begins and ends; whole files, JSON, arrays
    device/                         host, energy, temperature and clock
    steps/, networks/, data/        the reduced step of a mask; backbone and head; images
    timing/, cache/, export/        timing table; activations kept and reused; LiteRT
    schemes/                        what is trained when: fixed masks, PruneTrain, solved head
    selection/, workers/            importance, items, the closed loop; several boards
    planning/                       what a run can afford: ways, deadline, cache
    runs/                           the run, its folder, records, checkpoints, tables of runs
    figures/                        what plot.py draws: confusion, selections, bars, tables
    flags                           the flags of main.py, and what contradicts what
"""
