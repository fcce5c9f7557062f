"""Times calls round by round, so that a slow spell of the machine affects all alike."""

import time

import numpy as np


def interleaved_ms(functions, seconds, rounds=(5, 40)):
    """Returns the ms of each call: (rounds, functions) float64.

    Quick functions run first, so that none finds the processor's caches as a much larger one left
    them: a training step follows itself.
    functions: take no argument, and return once the device is done. rounds: fewest and most.
    seconds: how long to time.
    """
    for function in functions:
        function()  # the first call compiles
    order = np.argsort([milliseconds(function) for function in functions])
    samples, start = [], time.perf_counter()
    while len(samples) < rounds[0] or (len(samples) < rounds[1]
                                       and time.perf_counter() - start < seconds):
        ms = np.empty(len(functions))
        ms[order] = [milliseconds(functions[k]) for k in order]
        samples.append(ms)
    return np.array(samples)


def at_one_speed(rounds_ms):
    """Returns all rounds, (rounds, functions) ms, as the machine's usual speed would have them.

    A round is as slow as its calls are in the median, each beside its own median over the rounds.
    So no round is lost, also where most are disturbed.
    """
    slowness = np.median(rounds_ms / np.median(rounds_ms, axis=0), axis=1, keepdims=True)
    return rounds_ms / slowness


def milliseconds(function):
    """Returns the ms of one call."""
    begin = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - begin)
