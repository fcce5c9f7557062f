"""Measures the peak memory of each scheme, as the kernel counts it.

It includes Python, TensorFlow, weights and the optimizer's state, but no data set.
"""

import re

STATUS = '/proc/self/status'  # Linux's


def peak_bytes():
    """Returns this process's peak memory so far in bytes; None if the system does not report it."""
    try:
        with open(STATUS) as status:
            found = re.search(r'^VmHWM:\s*(\d+) kB', status.read(), re.M)
    except OSError:
        return None
    return 1024 * int(found.group(1)) if found else None


def peaks_of(maker, inputs, labels, masks):
    """Returns name -> peak bytes, None if unknown, for each mask and for 'importance'.

    'importance' is an evaluation of importance with a halved trial update, when it needs most.
    TensorFlow keeps its memory, so small masks run first; call this before the process runs a
    larger step. Weights change.
    maker: masked_step.StepMaker. inputs, labels: one batch. masks: name -> (N,) bool.
    """
    from elastic.selection.importance import Evaluator
    peaks = {}
    for name, mask in sorted(masks.items(), key=lambda item: item[1].sum()):
        maker.step(mask)(inputs, labels)[0].numpy()
        peaks[name] = peak_bytes()
    Evaluator(maker).trial(inputs, labels, 0.5)
    return dict(peaks, importance=peak_bytes())
