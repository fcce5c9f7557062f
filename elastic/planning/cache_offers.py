"""Computes what a prefix cache costs and saves in the coming epochs, for any choice of tensors.

Tensors are chosen by one cost for each deepest tensor; the chosen mask then gets the cost of its
best cut. Cached activations stay valid, and need no filling, while no tensor before the cut trains.
"""

import numpy as np

from elastic.cache.prefix_cache import fill_share
from elastic.selection.items import smallest_rho
from elastic.timing.table import CacheCost

NEVER = 1e12  # ms, more than any budget


class Budget:
    """Keeps the time that a run has left: rho of full training, over all epochs.

    An epoch that fills a prefix cache exceeds rho; the later ones, which read it, get less.
    """

    def __init__(self, settings):
        self._num_epochs = settings.num_epochs
        # In epochs of full training. The epoch that solves the head is none.
        self.left = settings.rho * settings.trained_epochs

    def spend(self, choice, result):
        """Subtracts the predicted time of the steps in `result`, an EpochResult of this Choice."""
        self.left -= choice.mean_ms(result.counts) / choice.timings.t_step

    def rho(self, epoch):
        """Returns the mean share of a full step that each step from `epoch` on may take."""
        return self.left / (self._num_epochs + 1 - epoch)


class CacheOffers:
    """Computes the costs of a prefix cache in the epochs from `epoch` to `until` - 1.

    cache: prefix_cache.PrefixCache. timings: TensorTimings.
    table: `timings` with the cheaper CacheCost, present or new cache, for each deepest tensor.
    tables: those to choose by: `table`, and one limited to tensors that the present cache serves.
    """

    def __init__(self, cache, timings, epoch, until):
        self._cache, self._timings = cache, timings
        self._fill_share = fill_share(cache.dataset, epoch, until)
        new = self._cost(timings.cut_bytes, timings.t_prefix / timings.t_fp)
        self._present = present = self._cost_of_present(epoch, until)
        costs = [new] if present is None else [self._of_chains(present), new]
        self.table = timings._replace(cache=self._cheapest(costs))
        self.tables = [self.table]
        if present is not None and present.trainable.any():
            self.tables.append(timings._replace(  # no budget has time for tensors not served
                cache=present, group_ms=np.append(timings.group_ms, NEVER),
                group_tensors=np.concatenate([timings.group_tensors, ~present.trainable[None]])))

    def _of_chains(self, cost):
        """Returns the CacheCost where all tensors nearer to the output are trainable, too."""
        from_output, chains = np.argsort(self._timings.depth), np.empty(len(cost.trainable), bool)
        chains[from_output] = np.logical_and.accumulate(cost.trainable[from_output])
        return cost.restricted_to(chains)

    def _cheapest(self, costs):
        """Returns a CacheCost of the first of the cheapest CacheCosts for each deepest tensor.

        It has no cut, as each tensor's offer has its own.
        """
        best = np.argmin([self._timings._replace(cache=cost).cache_ms for cost in costs], axis=0)
        return CacheCost(*(np.choose(best, arrays) for arrays in list(zip(*costs))[:-1]))

    def smallest_rho(self, layers=None):
        """Returns the smallest rho at which some tensor can be trained."""
        return min(smallest_rho(table, layers) for table in self.tables)

    def at_own_cut(self, mask):
        """Returns the table with the CacheCost of the cheapest cut for the (N,) bool mask.

        Candidates are the mask's own cut, that of its deepest tensor, and the present one. If none
        pays, no tensor is trainable with the CacheCost.
        """
        k, nothing = self.table.deepest(mask), np.zeros(len(mask), bool)
        costs = [self.table.cache.restricted_to(nothing)]
        if self._present is not None and self._present.trainable[mask].all():
            costs.append(self._present)
        tables = [self._timings._replace(cache=cost) for cost in costs + self._costs_of_cuts(mask)]
        return min(tables, key=lambda table: table.cache_ms[k])

    def _cost(self, nbytes, skipped, cut=None):
        """Returns the CacheCost of a new cache; nbytes, skipped: (N,), see TensorTimings."""
        read, write = self._cache.copying(nbytes)
        return CacheCost(np.full(len(nbytes), self._fill_share), skipped, read, write, cut)

    def _cost_of_present(self, epoch, until):
        """Returns the CacheCost of the present cached activations; None if there are none."""
        cache = self._cache
        if cache.store is None or cache.skipped is None or (
                cache.view != cache.dataset.view(epoch)):
            return None
        share = fill_share(cache.dataset, epoch, until, cache.store.stored, cache.view)
        values = (share, cache.skipped) + cache.copying_present()
        return CacheCost(*(np.full(len(self._timings.names), value) for value in values),
                         cut=cache.cut).restricted_to(cache.trainable)

    def _costs_of_cuts(self, mask):
        """Returns the CacheCosts of new caches at the deepest tensor's cut and the mask's own."""
        timings, prefixes, k = self._timings, self._cache.prefixes, self._timings.deepest(mask)
        cut, chain = self._chain(k)
        if cut is None or not np.isfinite(timings.cut_bytes[k]):
            return []
        found = [(cut, chain, timings.t_prefix[k])]
        own = prefixes.cut_off(mask, timings.op_rates,
                               self._cache.read_ms_by_size(timings.cut_bytes[k]))
        if own is not None and own != cut:
            nearest = int(np.argmin(timings.depth))  # its prefix is the longest
            longest, _ = self._chain(nearest)
            scale = 0.0 if longest is None else (  # measured over estimated ms
                timings.t_prefix[nearest] / max(longest.skipped_ms, 1e-9))
            saved = timings.t_prefix[k] + scale * (own.skipped_ms - cut.skipped_ms)
            found.append((own, mask, np.clip(saved, 0, timings.t_prefix.max())))
        n = len(timings.names)
        return [self._cost(np.full(n, float(cut.nbytes)), np.full(n, saved / timings.t_fp), cut)
                .restricted_to(prefixes.trainable_at(cut) | trained)
                for cut, trained, saved in found]

    def _chain(self, k):
        """Returns (Cut or None, (N,) bool) of tensor k and all tensors nearer to the output."""
        depth, cuts = self._timings.depth, self._cache.chain_cuts
        chain = depth <= depth[k]
        if k not in cuts:
            cuts[k] = self._cache.prefixes.cut_off(chain, self._timings.op_rates)
        return cuts[k], chain
