"""Tests the graphs and networks of benchmarks/graphs.py, its smallest run, and its verdicts."""

import importlib.util
import json
import re

import _graphs
import graphs
import numpy as np
import pytest
import tensorflow as tf

from elastic.errors import UserError
from elastic.steps.masked_step import StepMaker
from elastic.steps.optimizer import make_optimizer
from profiler import profile_model
from timing_tables import op_times, table_of


@pytest.mark.parametrize('name', ['residual', 'attention'])
def test_padding_does_not_change_the_scores_and_the_order_of_nodes_neither(name):
    source = _graphs.make_task(name, 'digits', small=True).source
    graph = {key: array[:4] for key, array in source.inputs.items()}
    nodes = graph['nodes'].shape[1]
    model = _graphs.graph_classifier(_graphs.BLOCKS[name], 3, 8, nodes)
    scores = model(graph).numpy()
    padding = 1 - graph['mask']
    assert padding.any() and np.abs(scores - scores[0]).max() > 1e-3
    np.testing.assert_allclose(model(dict(graph, nodes=graph['nodes'] + 7 * padding)), scores,
                               atol=1e-4)
    order = np.random.RandomState(0).permutation(nodes)
    turned = {key: array[:, order] for key, array in graph.items()}
    turned['edges'] = turned['edges'][:, :, order]
    np.testing.assert_allclose(model(turned), scores, atol=1e-4)


def test_nodes_are_the_batch_and_no_cache_can_hold_what_they_share():
    task = _graphs.make_task('nodes', 'digits', small=True)
    model, everything = task.build(), np.arange(len(task.target.labels))
    for chosen in (everything[:task.batch_size], everything):  # some nodes, and all of them
        batch = task.batch(task.target, chosen)
        table = profile_model(model, batch=batch, num_steps=2, seconds=0.05)
        assert not np.isfinite(table.cut_bytes).any()
    optimizer = make_optimizer('sgd', 0.1, 100, model.trainable_variables)
    step = StepMaker(model, optimizer, 0.0, *batch).step(np.ones(8))
    losses = [float(step(*batch).loss) for _ in range(3)]
    assert losses[2] < losses[0] and step.examples == len(everything)
    inputs, labels = batch
    with pytest.raises(UserError, match=r'labels are int32 of shape \(1, 200\); needed is one'):
        StepMaker(model, optimizer, 0.0, inputs, tf.reshape(labels, (1, -1)))


def test_atoms_are_nodes_and_bonds_are_edges():
    pytest.importorskip('rdkit')  # Python 3.10 on
    small, large = _graphs.molecule_graphs(3)
    assert [domain.inputs['mask'].sum(1).ravel().tolist() for domain in (small, large)] == [
        [9, 14], [20]]
    nodes, edges = small.inputs['nodes'][0], small.inputs['edges'][0]  # CC1=CC(=O)C=CC1=O
    assert nodes.sum(0)[:3].tolist() == [7, 2, 0] and nodes[0, 11] == 0.75  # a methyl group
    np.testing.assert_allclose(edges.sum(1), [1] * 9 + [0] * 23, rtol=1e-6)
    assert np.flatnonzero(edges[1]).tolist() == [0, 1, 2, 7] and edges[1, 7] == 0.25
    assert small.labels.tolist() == [0, 4] and large.labels.tolist() == [0]


def test_the_last_tensors_fit_in_rho():
    table = table_of(op_times({0b001: 1.0, 0b010: 1.0, 0b100: 1.0, 0b011: 2.0, 0b111: 2.0}, 3))
    for rho in (1.0, 0.8, 0.6):
        mask = graphs.last_tensors(table, rho)
        count = int(mask.sum())
        assert mask[-count:].all() and table.step_time(mask) <= rho * table.t_step
    assert graphs.last_tensors(table, 1e-9).sum() == 1


@pytest.mark.parametrize('elastic, verdict', [
    ([0.95, 0.97, 0.96], 'pays'), ([0.80, 0.82, 0.81], 'does not pay'),
    ([0.90, 0.92, 0.92], 'no clear difference'), ([0.95], 'one seed')])
def test_elastic_training_pays_only_above_every_row_of_its_time(elastic, verdict):
    seeds = len(elastic)
    others = dict(full=[0.90, 0.92, 0.91], last=[0.85] * 3, head=[0.5] * 3)
    row = dict(kind='elastic', rho=0.7, accuracy=elastic)
    rows = [row] + [dict(kind=kind, rho=rho, accuracy=accuracy[:seeds])
                    for kind, accuracy in others.items() for rho in (0.7, 0.5)]
    assert graphs.verdict(row, dict(rows=rows)) == verdict


@pytest.mark.thorough
@pytest.mark.parametrize('name, tuning_seeds', [('residual', 0), ('nodes', 1), ('molecules', 0)])
def test_the_smallest_benchmark_prints_and_writes_its_table(name, tuning_seeds, tmp_path, capsys):
    path = tmp_path / 'graphs.json'
    flags = ['--small', '--networks', name, '--data', 'digits', '--seeds', '1',
             '--tuning_seeds', str(tuning_seeds), '--steps', '4', '--json', str(path)]
    if name == 'molecules' and importlib.util.find_spec('rdkit') is None:  # before Python 3.10
        with pytest.raises(UserError, match='pip install rdkit'):
            graphs.main(flags)
        return
    assert graphs.main(flags) == 0
    output = capsys.readouterr().out
    assert re.search(r'^{} +elastic [01]\.\d\d .* one seed$'.format(name), output, re.M)
    assert 'Smallest rho' in output
    result, = json.loads(path.read_text())
    assert result['data'] == 'digits' and 0 < result['where']['smallest_rho'] <= 1
    assert result['coverage'] >= 0.95
    for row in result['rows']:
        assert row['rho'] is None or result['where']['smallest_rho'] <= row['rho'] <= 1
        assert len(row['accuracy']) == 1 and row['rate'] in sum(graphs.RATES.values(), ())
        assert row['steps'][0] == 4 or row['rho'] and row['kind'] != 'elastic'
