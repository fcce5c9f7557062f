"""Compares predicted and measured step times over random masks.

    python benchmarks/time_model.py [--models resnet50 mobilenetv2] [--masks 12]

Each model is profiled and measured in its own process. A mask has a random deepest tensor and a
random density above it. Its step, the forward pass and the full step run interleaved. The share of
backward pass and update that the mask needs, (step - forward) / (full - forward), is compared with
the table's. For comparison, the error with one scale for all groups of ops is listed, too: the
table scales weight gradients and the error gradient separately. Samples taken while other processes
used more than a tenth of a core are dropped and counted.
"""

import _bench
import numpy as np
from tqdm import tqdm

from elastic import command_line, options, texts

GOAL_POINTS = 3.0
WORST_POINTS = 10.0


def random_masks(count, num_tensors, seed):
    """Returns `count` masks, (N,) bool, each with a random deepest tensor and density."""
    rng = np.random.RandomState(seed)
    masks = []
    for _ in range(count):
        deepest = rng.randint(0, int(0.9 * num_tensors))
        mask = (rng.rand(num_tensors) < rng.uniform(0.1, 1)) & (np.arange(num_tensors) >= deepest)
        mask[deepest] = True
        masks.append(mask)
    return masks


def with_one_scale(table):
    """Returns the table with all groups of ops scaled alike, by the backward pass."""
    return table._replace(group_ms=table.profile.traced_ms * table.t_bp
                          / table.profile.traced_ms.sum())


def run_model(name, input_size, num_masks, rounds, seed):
    """Returns the result of one model, a dict with a row per mask."""
    prepared = _bench.prepare(name, input_size, seed)
    from profiler import profile_model
    table = profile_model(prepared.model, (input_size, input_size, 3), _bench.NUM_CLASSES,
                          prepared.batch_size)
    maker, rows, dropped = prepared.maker, [], 0
    forward, full = [_bench.call(step, prepared)
                     for step in (maker.forward(), maker.step(prepared.everything))]
    for mask in tqdm(random_masks(num_masks, prepared.num_tensors, seed), desc=name, unit='mask',
                     leave=False, disable=None):
        step = _bench.call(maker.step(mask), prepared)
        ms, noisy = _bench.interleaved([forward, step, full], rounds)
        dropped += noisy
        t_fp, t_step, t_full = np.median(ms, axis=0)
        measured = (t_step - t_fp) / (t_full - t_fp)
        predicted, by_one_scale = [(t.step_time(mask) - t.t_fp) / (t.t_bp + t.t_update)
                                   for t in (table, with_one_scale(table))]
        rows.append(dict(tensors=int(mask.sum()), deepest=int(np.argmax(mask)),
                         measured=float(measured), predicted=float(predicted),
                         by_one_scale=float(by_one_scale),
                         step_over_full=float(t_step / t_full),
                         predicted_over_full=float(table.step_time(mask) / table.t_step)))
    return dict(_bench.machine(), model=name, input_size=input_size,
                batch_size=prepared.batch_size, masks=rows, dropped_samples=dropped,
                coverage=table.profile.coverage)


def report(result):
    """Returns (table of the masks, summary row) of one model."""
    errors, one_scale = [np.array([100 * (row[key] - row['measured']) for row in result['masks']])
                         for key in ('predicted', 'by_one_scale')]
    text = texts.table(
        ['deepest', 'tensors', 'measured (%)', 'predicted (%)', 'error (points)'],
        [[row['deepest'], row['tensors'], '%.1f' % (100 * row['measured']),
          '%.1f' % (100 * row['predicted']), '%+.1f' % error]
         for row, error in zip(result['masks'], errors)], '>>>>>')
    mean, worst = float(np.abs(errors).mean()), float(np.abs(errors).max())
    return text, [result['model'], result['input_size'], result['batch_size'], len(errors),
                  '%.1f' % mean, '%.1f' % worst, '%+.1f' % errors.mean(),
                  '%.1f' % np.abs(one_scale).mean(), '%.1f' % np.abs(one_scale).max(),
                  result['dropped_samples'],
                  'met' if mean <= GOAL_POINTS and worst <= WORST_POINTS else 'MISSED']


def main(argv=None):
    parser = _bench.parser_for(__doc__)
    _bench.add_flags(parser, 'time_model', _bench.TWO_MODELS, rounds=9)
    parser.add_argument('--masks', type=options.number(int, low=1), default=12)
    parser.set_defaults(seed=1)
    args = _bench.parsed(parser, argv)
    results, summary = [], []
    for result in _bench.each('time_model', _bench.calls(args, args.masks, args.rounds,
                                                        args.seed)):
        text, row = report(result)
        results.append(result)
        summary.append(row)
        print('\n{}\n{}'.format(result['model'], text))
    print('\nshare of backward pass and update, predicted and measured (goals: mean {:g}, worst '
          '{:g} points)'.format(GOAL_POINTS, WORST_POINTS))
    print(texts.table(
        ['model', 'size', 'batch', 'masks', 'mean |error| (points)', 'worst', 'bias',
         'one scale: mean', 'worst', 'dropped', 'goal'], summary, '<>>>>>>>>>>'))
    _bench.write('time_model', results, args.json)
    return 0


if __name__ == '__main__':
    command_line.run(main)
