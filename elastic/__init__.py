"""What the scripts in the root are made of. A folder imports only from those above it here.

    compat/      the only code that knows versions of TensorFlow and Keras
    (here)       command line, files, figure files, settings, trees of arrays
    steps/       the training step, its graph, the reduced step of a mask, the cut for the cache
    networks/    backbone and head, saved models, weights
    data/        digits, image folders, TensorFlow Datasets; augmentation and batches
    device/      host, energy, temperature and clock
    timing/      from the trace of a step to the timing table
    cache/       activations of the frozen layers, stored and reused
    schemes/     what is trained when: fixed masks, PruneTrain
    export/      trained networks for use elsewhere: plain Keras, LiteRT, predictions
    workers/     several boards, one model: joint steps, the cost of the wire
    selection/   importance, costs with the cache, the timing table kept true as speed changes
    runs/        run folder, records, checkpoints, signals, tables of runs
    (here)       flags of main.py, costs of a way to train
"""
