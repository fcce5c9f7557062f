"""The most memory that training takes at once, as the kernel counts it.

Takes a model; gives the bytes that this process has held at most when each scheme has trained a
step: Python, TensorFlow, weights and the optimizer's state included, a data set not.
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


def peaks_of(model, inputs, labels, masks, optimizer='sgd', weight_decay=5e-4, clip_norm=None):
    """name -> bytes or None, of the schemes in `masks`, name -> (N,) bool; and of 'importance', its
    evaluation: at the end of a trial that was halved, when it holds most.

    To be called while the process has run no larger step: TensorFlow keeps what one took. So those
    of fewer tensors come first, and of equal peaks the later one may take less. Weights change.
    inputs, labels: one batch. optimizer: 'sgd' or 'adam'. clip_norm: see make_optimizer.
    """
    from backbone import statistics_from_batch
    from importance import Evaluator
    from masked_step import StepMaker
    from training_step import make_optimizer
    statistics_from_batch(model, inputs[:1])  # of one image: all take more than a step
    trained_by = make_optimizer(optimizer, 1e-6, 1000, model.trainable_variables,
                                clip_norm=clip_norm)
    maker = StepMaker(model, trained_by, weight_decay, inputs, labels)
    peaks = {}
    for name, mask in sorted(masks.items(), key=lambda item: item[1].sum()):
        maker.step(mask)(inputs, labels)[0].numpy()
        peaks[name] = peak_bytes()
    Evaluator(maker).trial(inputs, labels, 0.5)
    return dict(peaks, importance=peak_bytes())
