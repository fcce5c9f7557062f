"""The most memory that training takes at once, as the kernel counts it.

Takes a step maker; gives the bytes that this process held at most when each scheme has trained a
step. Python, TensorFlow, weights and the optimizer's state are included, a data set is not.
"""

import re

STATUS = '/proc/self/status'  # Linux's


def peak_bytes():
    """The most that this process has held in memory so far; None where no kernel tells."""
    try:
        with open(STATUS) as status:
            found = re.search(r'^VmHWM:\s*(\d+) kB', status.read(), re.M)
    except OSError:
        return None
    return 1024 * int(found.group(1)) if found else None


def peaks_of(maker, inputs, labels, masks):
    """Returns name -> the most bytes held, None where unknown, for each mask and 'importance'.

    'importance' is the evaluation of importance, at the end of a halved trial, when it holds most.
    Call this before the process runs a larger step: TensorFlow keeps what a step took. So masks of
    fewer tensors come first. Weights change.
    maker: masked_step.StepMaker. inputs, labels: one batch. masks: name -> (N,) bool.
    """
    from elastic.selection.importance import Evaluator
    peaks = {}
    for name, mask in sorted(masks.items(), key=lambda item: item[1].sum()):
        maker.step(mask)(inputs, labels)[0].numpy()
        peaks[name] = peak_bytes()
    Evaluator(maker).trial(inputs, labels, 0.5)
    return dict(peaks, importance=peak_bytes())
