"""Reports a run while it trains: on the terminal, in its records, and in its summary."""

import numpy as np

from elastic.compat import keras_stack
from elastic.runs.folder import judged_on
from elastic.runs.signals import stopping_if_unread


def summary_of(tally, clock, scheme, cache, outcome):
    """Returns the measured part of summary.json, a dict.

    tally: Tally of the epochs. scheme, cache: as in train.train. outcome: of the Tally or of a
    BestEpoch.
    """
    found = dict(
        epochs=tally.epochs, throttled_epochs=tally.throttled, step_ms=tally.step_ms,
        train_seconds=clock.train_seconds, importance_seconds=scheme.importance_seconds,
        **{bucket + '_seconds': seconds for bucket, seconds in clock.seconds.items()},
        **outcome, **scheme.summary)
    if cache is not None:
        found.update(cache.totals, **{kind + '_step_ms': ms for kind, ms in tally.medians.items()})
    return found


def record_epoch(recorder, scheme, choice, row, result, cache):
    """Records one epoch; choice: made before it, or None. row: dict of folder.epoch_columns."""
    if choice is not None:
        _record_choice(recorder, scheme.maker.model, choice, row['epoch'])
    recorder.epoch(row)
    if scheme.name.startswith('elastic'):
        recorder.elastic({'step_ms': row['step_ms'], 'wait_ms': result.wait_ms}, row['epoch'])
    if cache is not None:
        totals, tried = cache.totals, cache.totals['cache_hits'] + cache.totals['cache_misses']
        share = totals['cache_hits'] / max(1, tried)
        recorder.elastic(dict(totals, cache_share_read=share), row['epoch'])


def _record_choice(recorder, model, choice, epoch):
    variables, timings = model.trainable_variables, choice.timings
    share = None
    if timings is not None:
        share = timings.t_dw + timings.t_dy + timings.t_up
        share = share / share.sum()
    recorder.selection(epoch, [keras_stack.variable_name(v) for v in variables],
                       [tuple(v.shape) for v in variables], choice.mask, choice.importance, share)
    if choice.importance is not None:
        recorder.elastic({
            'selected_tensors': int(choice.mask.sum()),
            'selected_importance': float(choice.importance[choice.mask].sum()),
            'predicted_step_ms': choice.predicted_ms, 'full_step_ms': timings.t_step,
            'forward_ms': timings.t_fp, 'backward_ms': timings.t_bp, 'loop_ms': timings.t_loop,
            'share_drift': choice.drift, 'fallback': int(choice.fallback)}, epoch)
    if choice.trials:
        recorder.elastic({'trial_' + field: float(np.mean([getattr(t, field)
                                                           for t in choice.trials]))
                          for field in choice.trials[0]._fields}, epoch)


@stopping_if_unread()
def announce(choice, settings, seconds, cache):
    """Prints what was selected, how long it took, and warnings."""
    if choice.importance is None:
        print('training {} of {} tensors{}'.format(
            choice.mask.sum(), len(choice.mask), '' if choice.timings is None else
            ': {:.1f} ms/step predicted = {:.2f} of full'.format(
                choice.predicted_ms, choice.predicted_ms / choice.timings.t_step)))
    else:
        left = abs(choice.rho - settings.rho) >= 0.005
        print('selected {} of {} tensors: {:.0f} % of the importance, {:.1f} ms/step predicted = '
              '{:.2f} of full (rho {:g}{}), in {:.2f} s'.format(
                  choice.mask.sum(), len(choice.mask),
                  100 * choice.importance[choice.mask].sum()
                  / max(choice.importance[choice.importance > 0].sum(), 1e-12),
                  choice.predicted_ms, choice.predicted_ms / choice.timings.t_step, settings.rho,
                  '; {:.2f} left'.format(choice.rho) if left else '', seconds))
    if cache is not None and cache.cut is not None:
        print('  ' + cache.describe(choice.timings))
    elif cache is not None and choice.timings is not None:
        why = cache.too_large(choice.timings.cut_bytes)
        if why is not None:
            print('  without the prefix cache: ' + why)
    if any(trial.scale < 1 for trial in choice.trials):
        print('  a full trial update overshoots: importance measured at {:g} of it'.format(
            min(trial.scale for trial in choice.trials)))
    if choice.trials and not choice.trials[-1].holds:
        print('  warning: even {:g} of an update does not lower the loss as its gradient predicts '
              '({:+.2g} predicted, {:+.2g} measured): importances are unreliable; use a smaller '
              '--learning_rate'.format(*choice.trials[-1]))
    if choice.fallback:
        print('  no affordable tensor has positive importance: training the least negative ones; '
              'a smaller --learning_rate or more --probe_batches may help')


def epoch_label(epoch, num_epochs):
    """Returns a text like 'epoch  3/12'."""
    return 'epoch {:>{}}/{}'.format(epoch, len(str(num_epochs)), num_epochs)


@stopping_if_unread()
def print_epoch(row, num_epochs):
    """Prints the line of one epoch; row: dict of folder.epoch_columns."""
    penalty = '  penalty {:.3f}'.format(row['train_penalty']) if row['train_penalty'] else ''
    images = judged_on(row)
    print('{}   train {:5.1f} %  loss {:6.3f}{}   {} {:5.1f} %  loss {:6.3f}   '
          '{:7.1f} ms/step   {:7.1f} s trained{}'.format(
              epoch_label(row['epoch'], num_epochs), 100 * row['train_accuracy'],
              row['train_loss'], penalty, images, 100 * row[images + '_accuracy'],
              row[images + '_loss'],
              row['step_ms'], row['train_seconds'], '   throttled' if row['throttled'] else ''))
