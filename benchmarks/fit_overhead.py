"""Measures elastic training inside model.fit: the share of a step, and the cost beside the loop.

    python benchmarks/fit_overhead.py [--models mobilenetv2 lstm] [--rho 0.5]

Each network runs in its own process. Epochs of the full step and of the selected tensors alternate
in one `fit`. Between two steps of the latter, main.py's loop trains the same tensors on such a
batch, and Keras' own function runs one full step. A step in `fit` is timed from one batch to the
next, with all that Keras does between them. The overhead is the median of the pairs. `attention`,
four blocks of a transformer, and `lstm`, two LSTMs, which is asked for by name, read 80 tokens.
`one more`: the share of a step in which one more tensor could train.
"""

import itertools
import time

import _bench
import numpy as np

from elastic import command_line, options, texts
from elastic.compat import start

TEXTS = ('attention', 'lstm')
DEFAULT_MODELS = ['mobilenetv2', 'resnet50', 'attention']
MOST_OVERHEAD, MOST_OFF = 0.03, 0.08  # goals: beside the loop; of the achieved share, over rho


def prepared_text(name, seed):
    """Returns the Prepared text network, with a batch of 32 random texts of 4 classes."""
    import tensorflow as tf
    from tensorflow import keras

    from elastic.steps.masked_step import StepMaker
    from elastic.steps.optimizer import make_optimizer
    layers, rng = keras.layers, np.random.RandomState(seed)
    tokens = tf.constant(rng.randint(0, 5000, (32, 80)), tf.int32)
    labels = tf.constant(rng.randint(0, 4, 32), tf.int32)
    inputs = keras.Input((80,), dtype='int32')
    x = layers.Embedding(5000, 128)(inputs)
    if name == 'lstm':
        x = layers.LSTM(128)(layers.LSTM(128, return_sequences=True)(x))
    else:
        for _ in range(4):
            x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 32)(x, x))
            wide = layers.Dense(512, 'relu')(x)
            x = layers.LayerNormalization()(x + layers.Dense(128)(wide))
        x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, layers.Dense(4)(x))
    optimizer = make_optimizer('sgd', 1e-6, 1000, model.trainable_variables)
    return _bench.Prepared(model, StepMaker(model, optimizer, 0.0, tokens, labels), tokens, labels,
                           32)


def run_model(name, input_size, rho, epochs, steps, seed):
    """Returns the result of one network: medians of ms a step."""
    start.quiet_tensorflow()
    prepared = (prepared_text(name, seed) if name in TEXTS else
                _bench.prepare(name, input_size, seed))
    from tensorflow import keras
    model = prepared.model
    model.compile(keras.optimizers.SGD(1e-6, momentum=0.9),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  metrics=['accuracy'])
    ms, choice = times_in_fit(prepared, rho, epochs, steps)
    middle = {kind: float(np.median(times)) for kind, times in ms.items()}
    predicted, following = shares_of(choice)
    return dict(_bench.machine(), model=name, input_size=input_size, rho=rho, predicted=predicted,
                following=following, batch_size=prepared.batch_size, ms=middle,
                achieved=middle['chosen'] / middle['full'],
                overhead=float(np.median(np.divide(ms['chosen'], ms['loop']))) - 1)


def times_in_fit(prepared, rho, epochs, steps):
    """Returns (kind -> ms of steps, scheme.Choice of what was chosen) of one `fit`."""
    import tensorflow as tf
    from tensorflow import keras

    from elastic.schemes.scheme import Choice, Scheme
    from elastic.steps.epoch import plain_calls, run_epoch
    from train import ElasticTraining
    batches = tf.data.Dataset.from_tensors(prepared.batch).repeat()
    ms = dict(full=[], chosen=[], loop=[], keras=[])

    class Turns(Scheme):
        """Trains all tensors in odd epochs, and those of the first selection in even ones."""

        def __init__(self, elastic):
            super().__init__('elastic_training', elastic.maker)
            self.choice = elastic.select(1, None)
            self.step = prepared.maker.step(self.choice.mask)

        def select(self, epoch, last):
            return Choice(prepared.everything) if epoch % 2 else self.choice

    class Alternating(ElasticTraining):
        def on_train_begin(self, logs=None):
            super().on_train_begin(logs)
            self.usual = self.model.train_function

        def scheme_of(self, maker, inputs, labels):
            self.turns = Turns(super().scheme_of(maker, inputs, labels))
            return self.turns

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.chosen, self.counts = epoch % 2, epoch > 1  # the first two make the steps

        def on_train_batch_begin(self, batch, logs=None):
            now = time.perf_counter()
            if batch > 1 and self.counts:
                ms['chosen' if self.chosen else 'full'].append(1e3 * (now - self.begin))
            if batch and self.chosen:
                between(elastic, batch, self.counts and batch > 1)
            self.begin = time.perf_counter()

    def between(elastic, batch, counts):
        """Runs a step of the loop and one of Keras, in turns the first; keeps their times."""
        calls = dict(
            loop=lambda: run_epoch(plain_calls(elastic.turns.step, itertools.islice(others, 1)), 1,
                                   '').step_ms[0],
            keras=lambda: _bench.milliseconds(lambda: float(elastic.usual(others)['loss'])))
        for kind in sorted(calls, reverse=bool(batch % 2)):
            found = calls[kind]()
            if counts:
                ms[kind].append(found)
    others = iter(batches)
    elastic = Alternating(rho, probe=batches.take(1))
    prepared.model.fit(batches, epochs=2 * epochs, steps_per_epoch=steps, verbose=0, shuffle=False,
                       callbacks=[elastic, Clock()])
    return ms, elastic.turns.choice


def shares_of(choice):
    """Returns the predicted shares of a full step: of a Choice, and of one more tensor."""
    tensors, step_time = np.arange(len(choice.mask)), choice.timings.step_time
    more = [step_time(choice.mask | (tensors == k)) for k in np.flatnonzero(~choice.mask)]
    return [float(ms / choice.timings.t_step) for ms in (choice.predicted_ms, min(more))]


def row_of(result):
    off = result['achieved'] / result['rho'] - 1
    checks = [(result['overhead'] <= MOST_OVERHEAD, 'loop'), (abs(off) <= MOST_OFF, 'share')]
    missed = [text for met, text in checks if not met]
    return [result['model'], result['batch_size']] + [
        '%.1f' % result['ms'][kind] for kind in ('full', 'keras', 'chosen', 'loop')] + [
        '%+.1f %%' % (100 * result['overhead']), '%.2f' % result['rho'],
        '%.2f' % result['predicted'], '%.2f' % result['following'],
        '%.2f' % result['achieved'],
        'MISSED ' + ', '.join(missed) if missed else 'met']


def main(argv=None):
    parser = _bench.parser_for(__doc__)
    parser.add_argument('--rho', type=options.number(float, above=0, high=1), default=0.5)
    parser.add_argument('--epochs', type=options.number(int, low=2), default=18,
                        help='of each kind (default: %(default)s)')
    parser.add_argument('--steps', type=options.number(int, low=3), default=12,
                        help='in each epoch (default: %(default)s)')
    _bench.add_flags(parser, 'fit_overhead', DEFAULT_MODELS)
    args = _bench.parsed(parser, argv)
    results = list(_bench.each('fit_overhead', _bench.calls(
        args, args.rho, args.epochs, args.steps, args.seed)))
    print('ms a step, medians; goals: at most {:g} % over the loop, within {:g} % of rho'.format(
        100 * MOST_OVERHEAD, 100 * MOST_OFF))
    print(texts.table(
        ['model', 'batch', 'full, in fit', "Keras' own", 'chosen, in fit', 'in the loop',
         'overhead', 'rho', 'predicted', 'one more', 'achieved', 'goals'],
        [row_of(result) for result in results], '<>>>>>>>>>><'))
    _bench.write('fit_overhead', results, args.json)
    return 0


if __name__ == '__main__':
    command_line.run(main)
