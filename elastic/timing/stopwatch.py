"""Times calls round by round, so that a slow spell of the machine affects all alike."""

import time

import numpy as np

DISTURBED = 1.15  # times the quickest round; longer ones were slowed down by the machine


def interleaved_ms(functions, seconds, rounds=(5, 40)):
    """Returns the ms of each call: (rounds, functions) float64.

    functions: take no argument, and return once the device is done. rounds: fewest and usual.
    seconds: how long to time. While too few rounds are undisturbed, it takes up to three times as
    many rounds and three times as long.
    """
    for function in functions:
        function()  # the first call compiles
        function()
    samples, start, factor = [], time.perf_counter(), 3
    while len(samples) < rounds[0] or (len(samples) < factor * rounds[1]
                                       and time.perf_counter() - start < factor * seconds):
        samples.append([settled_ms(function) for function in functions])
        enough = len(undisturbed(np.array(samples), least=1)) >= rounds[0]
        factor = 1 if enough else 3
    return np.array(samples)


def undisturbed(rounds_ms, least=3):
    """Returns the rounds, (rounds, functions) ms, whose sum is within DISTURBED of the quickest.

    Keeps at least the quickest `least` rounds. Other guests of a shared host, invisible from here,
    slow it down by a third for seconds.
    """
    whole = rounds_ms.sum(axis=1)
    limit = max(DISTURBED * whole.min(), np.sort(whole)[:least][-1])
    return rounds_ms[whole <= limit]


def at_one_speed(rounds_ms):
    """Returns all rounds, (rounds, functions) ms, as the machine's usual speed would have them.

    A round is as slow as its calls are in the median, each beside its own median over the rounds.
    So no round is lost, also where most are disturbed.
    """
    slowness = np.median(rounds_ms / np.median(rounds_ms, axis=0), axis=1, keepdims=True)
    return rounds_ms / slowness


def settled_ms(function):
    """Returns the ms of the second of two calls in a row, as a training step follows itself."""
    function()  # else the call would find the processor's caches cold after a larger function
    begin = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - begin)
