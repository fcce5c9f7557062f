"""Makes a timing table into knapsack items, tensors or whole layers, and finds the smallest rho.

Needs NumPy alone. selection_solver_DP.py chooses among the items.
"""

from typing import NamedTuple

import numpy as np

from elastic.timing.table import time_of_groups


class Items(NamedTuple):
    """Holds L items to choose from: single tensors, or whole layers.

    of: (N,) int, the item of each tensor.
    needs: (G, L) bool, the items that need each group of ops. group_ms: (G,) ms of the groups.
    own: (L,) ms that an item costs by itself.
    depth: (L,) int, depth of the item's deepest tensor; cache_ms: (L,) ms, that tensor's
    TensorTimings.cache_ms.
    """
    of: np.ndarray
    needs: np.ndarray
    group_ms: np.ndarray
    own: np.ndarray
    depth: np.ndarray
    cache_ms: np.ndarray

    @property
    def alone(self):
        """Returns the (L,) ms beyond `fixed` of a step that trains the item alone."""
        return self.own + time_of_groups(self.group_ms, self.needs) + self.cache_ms

    @property
    def least_ms_beside_deeper(self):
        """Returns the (L,) least ms beyond `fixed` of a step that also trains a deeper item."""
        order, least = np.argsort(-self.depth), np.empty(len(self.depth))
        least[order] = np.append(np.inf, np.minimum.accumulate(self.alone[order])[:-1])
        return self.own + least

    def time(self, mask):
        """Returns the ms beyond `fixed` of a step that trains the items of the (L,) bool mask."""
        needed = self.needs[:, mask].any(axis=1)
        return float(self.own[mask].sum() + self.group_ms[needed].sum()
                     + self.cache_ms[np.argmax(np.where(mask, self.depth, -1))])

    def priced(self, memory, members, ms_per_byte):
        """Returns the items with a price on the bytes that the forward pass leaves for them.

        memory: timing.memory.Memory. members: (L, N) bool, the tensors of each item.
        """
        needs = np.stack([memory.sets[:, tensors].any(axis=1) for tensors in members], axis=1)
        return self._replace(needs=np.concatenate([self.needs, needs]), group_ms=np.append(
            self.group_ms, ms_per_byte * memory.kept))

    def only(self, keep):
        """Returns the items in `keep`, (L,) bool; groups that only one needs move to its `own`."""
        needs = self.needs[:, keep]
        count = needs.sum(axis=1)
        return Items(None, needs[count > 1], self.group_ms[count > 1],
                     self.own[keep] + time_of_groups(self.group_ms[count == 1], needs[count == 1]),
                     self.depth[keep], self.cache_ms[keep])


def items_of(timings, layers=None):
    """Returns the Items of a TensorTimings.

    layers: (N,) int, the layer of each tensor, to make each layer an item; None: single tensors.
    """
    needs = timings.group_tensors
    if layers is None:
        return Items(np.arange(needs.shape[1]), needs, timings.group_ms, timings.t_own,
                     timings.depth, timings.cache_ms)
    _, of = np.unique(layers, return_inverse=True)
    members = of == np.arange(of.max() + 1)[:, None]  # (L, N) bool
    needs = np.stack([needs[:, of_item].any(axis=1) for of_item in members], axis=1)
    deepest = [timings.deepest(of_item) for of_item in members]
    return Items(of, needs, timings.group_ms, np.bincount(of, timings.t_own),
                 timings.depth[deepest], timings.cache_ms[deepest])


def layers_of(model):
    """Returns the (N,) int layer of each trainable tensor: the number of the layer's first one."""
    from elastic.compat import keras_stack
    paths = [keras_stack.layer_path(v) for v in model.trainable_variables]
    return np.array([paths.index(path) for path in paths])


def smallest_rho(timings, layers=None):
    """Returns the smallest rho at which some item of items_of can be trained (section 4.3)."""
    items = items_of(timings, layers)
    least = timings.step_time(items.of == np.argmin(items.alone))
    rho = least / timings.t_step
    while rho * timings.t_step < least:  # choose_tensors compares the product
        rho = np.nextafter(rho, np.inf)
    return float(rho)


def out_of_reach(timings, rho, layers=None):
    """Returns one line that says why rho is too small to train any item, or None if it is not."""
    least = smallest_rho(timings, layers)
    return None if rho >= least else (
        'rho {:g} is out of reach: the forward pass alone takes {:.3f} of a full step{}; the '
        'smallest rho that trains a tensor is {:.3f}'.format(
            rho, timings.t_fp / timings.t_step, '' if timings.cache is None else
            ', and the prefix cache has to be filled', least + 5e-4))


def rho_or_smallest(timings, rho, layers=None):
    """Returns rho; if the device has become too slow for it, prints and returns smallest_rho."""
    least = smallest_rho(timings, layers)
    if rho < least:
        print('rho {:g} is out of reach as the device is now: training at {:.3f}'.format(
            rho, least))
    return max(rho, least)
