"""Measures how well the first-order importance predicts the loss, over learning rates.

    python benchmarks/importance.py [--learning_rates 1e-5 1e-3 1e-1]

MobileNetV2 (width 0.35) is trained on digits for some hundred steps, then sees the shifted digits.
For each learning rate, a trial update of all tensors is made, once in full and once at the scale
that training uses. The table has the predicted and the real drop in loss, and the rank correlation
of each tensor's importance with the true value of its update: the rise in loss when that tensor
alone is put back.
"""

import _bench
import numpy as np
from tqdm import tqdm

from elastic import command_line, options, texts
from elastic.compat import start
from elastic.settings import TRAINING

RATES = [1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]


def source_weights(input_size, batch_size, steps, seed):
    """Returns (weights, last loss) of a network trained on the source domain."""
    import models
    from datasets import load_dataset
    from elastic.steps.masked_step import StepMaker
    from elastic.steps.optimizer import make_optimizer
    model = models.build_model('mobilenetv2', (input_size, input_size, 3), 10, 'none', 0.35,
                               bn_statistics='train')
    optimizer = make_optimizer('sgd', 0.03, steps, model.trainable_variables)
    data = load_dataset('digits', input_size, batch_size, seed=seed)
    step = StepMaker(model, optimizer, TRAINING.weight_decay, *data.train.element_spec).step(
        np.ones(len(model.trainable_variables)))
    for images, labels in tqdm(data.train.take(steps), desc='source', total=steps, leave=False,
                               disable=None):
        loss = step(images, labels).loss
    return model.get_weights(), float(loss)


def true_values(evaluator, forward, batch, updates, scale):
    """Returns (N,) the rise in loss when one tensor's update is undone and all others stay."""
    from elastic.compat import keras_stack
    with keras_stack.restored_afterwards(evaluator.variables):
        for variable, update in zip(evaluator.variables, updates):
            variable.assign_add(scale * update)
        after, values = float(forward(*batch)[0]), []
        for variable, update in zip(evaluator.variables, updates):
            with keras_stack.restored_afterwards([variable]):
                variable.assign_sub(scale * update)
                values.append(float(forward(*batch)[0]) - after)
    return np.array(values)


def row(model, batch, rate):
    """Returns a dict of one learning rate: the full update, and the scale that held."""
    from scipy.stats import spearmanr

    from elastic.selection.importance import Evaluator, evaluate_importance
    from elastic.steps.masked_step import StepMaker
    from elastic.steps.optimizer import make_optimizer
    optimizer = make_optimizer('sgd', rate, 1000, model.trainable_variables)
    evaluator = Evaluator(StepMaker(model, optimizer, 0.0, *batch))
    trials = []
    evaluate_importance(model, optimizer, [batch], evaluator=evaluator, trials=trials)
    with evaluator.updated(evaluator.gradients(*batch)[1]) as before:
        updates = [v.read_value() - old for v, old in zip(evaluator.variables, before)]
    forward = evaluator.maker.forward(dropout=False)
    found = dict(learning_rate=rate, scale=trials[0].scale)
    for name, scale in (('full', 1.0), ('scaled', trials[0].scale)):
        importance, trial = evaluator.trial(*batch, scale)
        values = true_values(evaluator, forward, batch, updates, scale)
        found[name] = dict(predicted=trial.predicted_drop, real=trial.real_drop,
                           holds=bool(trial.holds), positive=float((importance > 0).mean()),
                           rank=float(spearmanr(importance, values)[0]))
    return found


def measure(rates, input_size, batch_size, steps, seed):
    """Returns the result of all learning rates."""
    start.quiet_tensorflow()
    import models
    from datasets import load_dataset
    weights, loss = source_weights(input_size, batch_size, steps, seed)
    model = models.build_model('mobilenetv2', (input_size, input_size, 3), 10, 'none', 0.35,
                               bn_statistics='frozen')
    model.set_weights(weights)
    batch = next(iter(load_dataset('digits_shifted', input_size, batch_size, seed=seed).train))
    rows = [row(model, batch, rate) for rate in tqdm(rates, desc='rates', unit='rate',
                                                        leave=False, disable=None)]
    return dict(_bench.machine(), source_loss=loss, input_size=input_size, batch_size=batch_size,
                tensors=len(model.trainable_variables), rows=rows)


def main(argv=None):
    parser = _bench.parser_for(__doc__)
    parser.add_argument('--learning_rates', nargs='+', default=RATES, metavar='X',
                        type=options.number(float, above=0))
    parser.add_argument('--batch_size', type=options.number(int, low=1), default=16)
    parser.add_argument('--steps', type=options.number(int, low=1), default=400,
                        help='steps of training on the source domain (default: %(default)s)')
    _bench.add_flags(parser, 'importance', input_size=64)
    args = _bench.parsed(parser, argv)
    result = measure(args.learning_rates, args.input_size, args.batch_size, args.steps, args.seed)
    cells = []
    for found in result['rows']:
        full, scaled = found['full'], found['scaled']
        cells.append(['%g' % found['learning_rate'], '%+.2e' % full['predicted'],
                      '%+.2e' % full['real'], 'yes' if full['holds'] else 'no',
                      '%.0f' % (100 * full['positive']), '%+.2f' % full['rank'],
                      '%g' % found['scale'], '%+.2e' % scaled['predicted'],
                      '%+.2e' % scaled['real'], '%.0f' % (100 * scaled['positive']),
                      '%+.2f' % scaled['rank']])
    print('trial update of all {} tensors: at full size, then at the scale that held'.format(
        result['tensors']))
    print(texts.table(
        ['learning rate', 'predicted drop', 'real drop', 'holds', 'I > 0 (%)', 'rank corr.',
         'scale', 'predicted', 'real', 'I > 0 (%)', 'rank corr.'], cells, '>' * 11))
    _bench.write('importance', result, args.json)
    return 0


if __name__ == '__main__':
    command_line.run(main)
