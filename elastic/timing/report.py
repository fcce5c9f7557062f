"""Describes a timing table for people, and warns of a doubtful profile."""

from elastic import texts

MIN_COVERAGE = 0.95  # of the traced time outside the forward pass; real networks reach more
MAX_SPREAD = 0.10  # of the time of a step; above it, something else was running
MIN_KERNELS = 0.8  # of a step on a GPU; below it, the step waits for launches


def warn_of(profile):
    """Warns if step times varied, if steps wait for launches on a GPU, or if ops were left out."""
    if profile.spread > MAX_SPREAD:
        print(f'warning: the same step took {100 * profile.spread:.0f} % more or less from one '
              'call to the next; is something else running? On a quiet machine, profiler.py '
              '--force measures again')
    if profile.kernel_share is not None and profile.kernel_share < MIN_KERNELS:
        print(f'warning: the GPU runs kernels during only {100 * profile.kernel_share:.0f} % of a '
              'step and waits for launches in the rest, but the cost of a tensor is its kernel '
              'time: rho may be missed; a larger --batch_size helps')
    if profile.coverage < MIN_COVERAGE:
        left_out = ', '.join(f'{name} ({ms:.2f} ms)' for name, ms in profile.left_out[:10])
        print(f'warning: only {100 * profile.coverage:.1f} % of the traced time outside the '
              f'forward pass was attributed (at least {100 * MIN_COVERAGE:.0f} % is usual); '
              f'left out: {left_out}')


def describe(table):
    """Returns the table as text: a row for each tensor, then the totals."""
    rows = [[k, name, 'x'.join(map(str, shape)), '%.3f' % dw, '%.3f' % dy, '%.3f' % up,
             '%.2f' % (100 * (dw + dy) / table.t_bp), 'estimated' if guess else 'measured']
            + [each and '%.2f' % (each / 1e6) for each in kept]
            for k, (name, shape, dw, dy, up, guess, kept) in enumerate(zip(
                table.names, table.shapes, table.t_dw, table.t_dy, table.t_up,
                table.profile.estimated, table.kept_bytes))]
    tensors = texts.table(
        ['', 'tensor', 'shape', 't_dw (ms)', 't_dy (ms)', 't_up (ms)', 'backward (%)', 'time',
         'm_dw (MB)', 'm_dy (MB)'], rows, '><>>>>><>>')
    parts = [('forward pass (t_fp)', table.t_fp), ('backward pass (t_bp)', table.t_bp),
             ('update (t_update)', table.t_update), ('full step', table.t_step)]
    if table.wire.fixed:
        parts.insert(3, ('exchange with the other workers', table.wire_time([True] * len(rows))))
    totals = texts.table(['per step', 'ms', '%'], [
        [name, '%.2f' % ms, '%.1f' % (100 * ms / table.t_step)] for name, ms in parts])
    profile = table.profile
    kernels = '' if profile.kernel_share is None else (
        f'\nkernels run during {100 * profile.kernel_share:.1f} % of a full step')
    memory = '' if table.memory is None else (
        '\nworking memory, predicted: forward pass (m_fp) {:,.0f} MB, full step {:,.0f} MB'.format(
            table.memory.forward_peak() / 1e6, table.memory.peak([True] * len(rows)) / 1e6))
    return (f'{tensors}\n\n{totals}\n\nattributed: {100 * profile.coverage:.1f} % of the traced '
            f'time outside the forward pass{kernels}{memory}')
