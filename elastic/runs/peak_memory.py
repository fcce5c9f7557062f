"""Measures the peak memory of each scheme, as the kernel counts it.

It includes Python, TensorFlow, weights and the optimizer's state, but no data set.
"""

from elastic.device.host import peak_bytes
from elastic.selection.importance import Evaluator


def peaks_of(maker, inputs, labels, masks):
    """Returns name -> peak bytes, None if unknown, for each mask and for 'importance'.

    'importance' is an evaluation of importance with a halved trial update, when it needs most.
    TensorFlow keeps its memory, so small masks run first; call this before the process runs a
    larger step. Weights change.
    maker: masked_step.StepMaker. inputs, labels: one batch. masks: name -> (N,) bool.
    """
    peaks = {}
    for name, mask in sorted(masks.items(), key=lambda item: item[1].sum()):
        maker.step(mask)(inputs, labels)[0].numpy()
        peaks[name] = peak_bytes()
    Evaluator(maker).trial(inputs, labels, 0.5)
    return dict(peaks, importance=peak_bytes())
