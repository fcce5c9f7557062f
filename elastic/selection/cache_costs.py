"""What the prefix cache takes in the coming epochs, and the tensors that are chosen at that price.

Takes a timing table, a PrefixCache (prefix_cache.py) and these epochs; gives CachePrices
(table.py), first for each deepest tensor, by which tensors are chosen, then for the very
cut of those chosen. Rows that are stored already count: they stay as they are as long as nothing
below their cut is trained.
"""

import numpy as np

from elastic.timing.table import CachePrice, items_of
from selection_solver_DP import choose_tensors, reachable, smallest_rho

NEVER = 1e12  # ms


class Budget:
    """What steps may still take: rho of full training, over all epochs of the run.

    An epoch that fills a prefix cache takes more than rho. All that read its rows pay that off, and
    these stay valid beyond the next selection; so what the first epochs take more, the later ones
    have less, and what one selection leaves the next may spend.
    """

    def __init__(self, settings):
        self._num_epochs = settings.num_epochs
        self.left = settings.rho * settings.num_epochs  # in epochs of full training

    def spend(self, choice, result):
        """What the epoch of this EpochResult took, by what was predicted of its steps."""
        steps = result.counts
        ms = sum(count * choice.predicted_of(kind)[0] for kind, count in steps.items())
        self.left -= ms / sum(steps.values()) / choice.timings.t_step

    def rho(self, epoch):
        """Share of a full step that steps may take on the average, from `epoch` on."""
        return self.left / (self._num_epochs + 1 - epoch)


class CachePrices:
    """Of the epochs from `epoch` to `until` - 1.

    cache: prefix_cache.PrefixCache. timings: TensorTimings.
    table: `timings` with the CachePrice of the cheapest way for each deepest tensor: the rows that
    are there, or a new cache.
    """

    def __init__(self, cache, timings, epoch, until):
        self._cache, self._timings, self._measured_over_estimated = cache, timings, None
        self._share = fill_share(cache.dataset, epoch, until)
        prices = [self._price(timings.cut_bytes, timings.t_prefix / timings.t_fp)]
        self._kept = self._price_of_kept(epoch, until)
        if self._kept is not None:
            from_output = np.argsort(timings.depth)
            safe = np.empty(len(from_output), bool)  # with all tensors nearer the output
            safe[from_output] = np.logical_and.accumulate(self._kept.serves[from_output])
            prices.insert(0, only_for(self._kept, safe))
        self.table = timings.at_least_of(prices)

    def smallest_rho(self, layers=None):
        """The least rho at which some tensor can be trained."""
        return min(smallest_rho(table, layers) for table in self._tables())

    def chosen(self, importance, rho, layers=None):
        """((N,) bool, fallback, TensorTimings): as choose_tensors, and the table with the price of
        the cut to be used, `cut` of its CachePrice; None where a cache does not pay.

        Chosen for each deepest tensor, and among the tensors that the present cut serves; the
        better one gets its own cut, and what that leaves of the budget is spent.
        """
        rho = reachable(min(self._tables(), key=lambda table: smallest_rho(table, layers)), rho,
                        layers)
        found = [choose_tensors(table, importance, rho, layers) for table in self._tables()
                 if smallest_rho(table, layers) <= rho]
        mask, fallback = max(found, key=lambda choice: (
            not choice[1], float(importance[choice[0]].sum())))
        table = self.at_own_cut(mask)
        larger = None if fallback else mask
        while larger is not None:
            mask, table = larger, self.at_own_cut(larger, table.cache)
            larger = self._larger(table, mask, importance, rho, layers)
        return mask, fallback, table

    def at_own_cut(self, mask, *others):
        """The table with the price of the cut that is cheapest for the (N,) bool mask: its own,
        that of its deepest tensor, the present one, those of `others`; of none where none pays.
        """
        k = self.table.deepest(mask)
        prices = [price for price in (self._kept,) + others if price is not None
                  and price.cut is not None and price.serves[mask].all()]
        prices += self._prices_of_cuts(mask, k)
        least = [self._timings._replace(cache=price).at_deepest[k] for price in prices]
        if not prices or min(least) >= 0:
            prices, least = [only_for(self.table.cache, np.zeros(len(mask), bool))], [0.0]
        return self._timings._replace(cache=prices[int(np.argmin(least))])

    # ------------------------------------------------------------------------------ prices

    def _tables(self):
        """Tables to choose by: at any price, and among the tensors that the present cut serves."""
        return [self.table] if self._kept is None or not self._kept.serves.any() else [
            self.table, within(self._timings._replace(cache=self._kept))]

    def _price(self, nbytes, skipped, cut=None):
        """CachePrice of a new cache; nbytes: (N,) of one image without its label, inf for none."""
        read, write = self._cache.copying(nbytes)
        return CachePrice(np.full(len(nbytes), self._share), skipped, read, write, cut)

    def _chain(self, k):
        """(Cut or None, (N,) bool): tensor k and all nearer the output."""
        depth, cuts = self._timings.depth, self._cache.chain_cuts
        chain = depth <= depth[k]
        if k not in cuts:
            cuts[k] = self._cache.prefixes.cut_off(chain, self._timings.op_rates)
        return cuts[k], chain

    def _price_of_kept(self, epoch, until):
        """CachePrice of going on with the rows that are there; None where there are none."""
        cache, n = self._cache, len(self._timings.names)
        if cache.store is None or cache.skipped is None or (
                cache.view != cache.dataset.view(epoch)):
            return None
        share = fill_share(cache.dataset, epoch, until, cache.stored, cache.view)
        read, write = cache.copying_kept()
        return only_for(CachePrice(*(np.full(n, value) for value in (
            share, cache.skipped, read, write)), cut=cache.cut), cache.serves)

    def _prices_of_cuts(self, mask, k):
        """CachePrices of new caches at the mask's own cut and at that of its deepest tensor k."""
        timings, prefixes, n = self._timings, self._cache.prefixes, len(self._timings.names)
        cut, chain = self._chain(k)
        if cut is None or not np.isfinite(timings.cut_bytes[k]):
            return []
        found = [(cut, chain, timings.t_prefix[k])]
        own = prefixes.cut_off(mask, timings.op_rates,
                               self._cache.read_ms_of_row(timings.cut_bytes[k]))
        if own is not None and own != cut:
            saved = timings.t_prefix[k] + self._scale * (own.skipped_ms - cut.skipped_ms)
            found.append((own, mask, np.clip(saved, 0, timings.t_prefix.max())))
        prices = []
        for cut, trained, saved in found:
            new = self._price(np.full(n, float(cut.nbytes)), np.full(n, saved / timings.t_fp), cut)
            prices.append(only_for(new, prefixes.serves(cut) | trained))
        return prices

    @property
    def _scale(self):
        """ms as measured over ms as estimated, of all that runs once where the tensor nearest the
        output is trained.
        """
        if self._measured_over_estimated is None:
            nearest = self._timings.depth == 0
            cut = self._cache.prefixes.cut_off(nearest, self._timings.op_rates)
            self._measured_over_estimated = 0.0 if cut is None else float(
                self._timings.t_prefix[nearest][0] / max(cut.skipped_ms, 1e-9))
        return self._measured_over_estimated

    def _larger(self, table, mask, importance, rho, layers):
        """(N,) bool of more importance within rho than the mask: of tensors that its cut serves, or
        with a tensor (or layer) that wants another cut; None where there is none.
        """
        found, _ = choose_tensors(within(table) if table.cache.cut else table, importance, rho,
                                  layers, mask)
        if importance[found].sum() > importance[mask].sum():
            return found
        limit = rho * table.t_step if rho < 1 else np.inf
        of = items_of(table, layers).of
        worth = np.bincount(of, importance)
        for item in np.argsort(-worth)[:np.count_nonzero(worth > 0)]:
            wider = mask | (of == item)
            # No cut for more tensors saves more.
            least = table.plain_time(wider) + float(table.at_deepest[table.deepest(mask)])
            if wider.sum() > mask.sum() and least <= limit and (
                    self.at_own_cut(wider).step_time(wider) <= limit):
                return wider
        return None


def only_for(price, serves):
    """The CachePrice with none for tensors outside the (N,) bool."""
    return price._replace(read_ms=np.where(serves, price.read_ms, np.inf),
                          write_ms=np.where(serves, price.write_ms, np.inf))


def within(table):
    """The table with those tensors out of reach that its cut does not serve; for choose_tensors."""
    return table._replace(
        group_tensors=np.concatenate([table.group_tensors, ~table.cache.serves[None]]),
        group_ms=np.append(table.group_ms, NEVER))


def left_over(stored, steps, batch_size):
    """Numbers of the images that an epoch of all full batches did not store; none otherwise."""
    left = np.flatnonzero(~stored)
    whole = steps == len(stored) // batch_size
    return left if whole and len(left) < batch_size else left[:0]


def fill_share(dataset, epoch, until, stored=None, view=None):
    """Share of the steps from `epoch` to `until` - 1 that compute what the others read back.

    Counted in the very order of these epochs: with --steps_per_epoch each has other images, and a
    batch is read whole or computed whole.
    stored: (images,) bool, whose rows are there before, in `view`; None: nobody's.
    """
    stored = np.zeros(dataset.num_images, bool) if stored is None else stored.copy()
    computed, steps = 0, (until - epoch) * len(dataset.order(epoch))
    for number in range(epoch, until):
        if dataset.view(number) == view and stored.all():
            continue  # which is most of a long run
        order = dataset.order(number)
        if dataset.view(number) != view:
            stored[:], view = False, dataset.view(number)
        missing = ~stored[order].all(axis=1)
        stored[order[missing]] = True
        stored[left_over(stored, len(order), order.shape[1])] = True
        computed += missing.sum()
    return float(computed / steps)
