"""Counts the loops of a cloud of points: the first Betti number of its Vietoris-Rips complexes."""

import numpy as np

SCALES = (0.1, 0.2, 0.3, 0.4)  # quantiles of the distances; at larger ones few loops are left
ZERO = 1e-8  # largest eigenvalue that counts as zero; the others are far larger


def loops(points):
    """Returns the largest first Betti number at any of SCALES. points: (n, d) array."""
    if len(points) < 4:
        return 0  # three points have no loop that is not filled
    points = np.asarray(points, np.float64)
    norms = np.square(points).sum(axis=1)
    distances = norms[:, None] + norms - 2 * points @ points.T  # (n, n), squared
    pairs = distances[np.triu_indices(len(points), 1)]
    return max(first_betti(distances <= scale) for scale in np.quantile(pairs, SCALES))


def first_betti(near):
    """Returns the first Betti number of a complex of edges and triangles.

    It is the dimension of the kernel of the Hodge Laplacian of the edges.
    near: (n, n) bool, symmetric: which points an edge joins. Three joined points are a triangle.
    """
    upper = np.triu(near, 1)
    edges = np.argwhere(upper)  # (E, 2)
    triangles = np.argwhere(upper[:, :, None] & upper[None] & upper[:, None])  # (T, 3): i < j < k
    if not len(edges):
        return 0
    number = np.zeros(near.shape, int)
    number[tuple(edges.T)] = np.arange(len(edges))
    ends = _boundary(len(near), edges.T, (-1, 1))  # (n, E)
    i, j, k = triangles.T
    sides = _boundary(len(edges), (number[i, j], number[j, k], number[i, k]), (1, 1, -1))  # (E, T)
    laplacian = ends.T @ ends + sides @ sides.T
    return int((np.linalg.eigvalsh(laplacian) < ZERO).sum())


def _boundary(size, rows, signs):
    """Returns the (size, columns) matrix with these signs in these rows of each column."""
    matrix = np.zeros((size, len(rows[0])))
    for row, sign in zip(rows, signs):
        matrix[row, np.arange(len(row))] = sign
    return matrix
